"""All transports in one process: none costs another its lane, in whichever order they come."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvbridge.transport import Transport

pytestmark = pytest.mark.multi_process

# ucxx needs no place among the required transports: what matters is what its import does.
LIBRARIES = {
    "nixl": "from kvbridge_nixl import library; library.load()",
    "ucx": "from kvbridge_ucx import library; library.load(None, 'lo')",
    "mooncake": "from kvbridge_mooncake import library; library.load()",
    "ucxx": """
import os, sys, types
try:
    import ucxx
except ImportError:
    sys.modules["ucxx"] = types.ModuleType("ucxx")
    for name, value in {"UCX_RNDV_THRESH": "8192", "UCX_RNDV_FRAG_MEM_TYPE": "cuda",
                        "UCX_MAX_RNDV_RAILS": "1", "UCX_MEMTYPE_CACHE": "n"}.items():
        os.environ.setdefault(name, value)
""",
}
# Mooncake has TCP alone, and opens ports to all the world: it is loaded, not opened.
LANES = {"nixl": "cma", "ucx": "cma"}

MEASURE = """
import json, os, sys
import numpy as np
from kvbridge.transport import Descriptors, Region, open_transport

def lane(name):
    memory = np.arange(2 * 65536, dtype=np.uint8).reshape(2, -1)
    agents = [open_transport({"transport": name}) for _ in memory]
    for agent, row in zip(agents, memory):
        agent.register([Region(row.ctypes.data, row.nbytes)])
    reader, owner = agents
    peer = reader.add_peer(owner.agent_info(), owner.memory.regions, timeout_s=20)
    memory[0] = 7
    reader.submit("read", peer, *(Descriptors([r.ctypes.data], [r.nbytes]) for r in memory))
    while not (finished := reader.poll().finished):
        pass
    assert finished[0].state.value == "done" and (memory[0] == memory[1]).all()
    for agent in agents:
        agent.close()
    return peer.path

found = {}
for name in sys.argv[1:]:
    exec(LIBRARIES[name])
    if name in LANES:  # at once, and again when all are there
        found[name] = lane(name)
before = dict(os.environ)
for name in list(found):
    found[name + " again"] = lane(name)
assert dict(os.environ) == before
print(json.dumps(found))
"""


def orders() -> list[object]:
    """Every order; in the quick tier only so many that each comes first, and last, once."""
    every = list(itertools.permutations(LIBRARIES))
    names = list(LIBRARIES)
    quick = {tuple(names[i:] + names[:i]) for i in range(len(names))}
    return [
        pytest.param(order, marks=() if order in quick else pytest.mark.full, id="-".join(order))
        for order in every
    ]


@pytest.mark.parametrize("order", orders())
def test_every_lane_is_the_fast_one_in_every_order(
    order: tuple[str, ...], usable_transport: Callable[[str], type[Transport]]
) -> None:
    for name in set(LIBRARIES) - {"ucxx"}:
        usable_transport(name)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_", "MC_"))}
    setup = f"LIBRARIES, LANES = {LIBRARIES!r}, {LANES!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + MEASURE, *order],
        env=clean,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {k: v for n, v in LANES.items() for k in (n, f"{n} again")}
