"""What the tests of single drivers share: agents, programs of two agents, open ports."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvbridge.transport import Op
from tests.conformance.peer_process import Agent, Pieces
from tests.integration.tiny_engine import AXES

KIB, MIB = 1 << 10, 1 << 20
OPS: tuple[Op, ...] = ("read", "write")

# What a user sets for a vendor library reaches no program of a test.
VENDORS = ("UCX_", "NIXL_", "MC_")

MakeAgent = Callable[..., Agent]


def agents(
    name: str, options: Mapping[str, Any] | None = None, *, nbytes: int = 64 * KIB
) -> Iterator[MakeAgent]:
    """Make agents of a transport, and close them at the end: what a fixture ``make_agent`` is."""
    usual, usual_nbytes = options or {}, nbytes
    with ExitStack() as stack:

        def make(nbytes: int = usual_nbytes, **options: Any) -> Agent:
            made = Agent(name, nbytes, {**usual, **options})
            stack.callback(made.transport.close, timeout_s=0.2)
            return made

        yield make


def everything(agent: Agent) -> Pieces:
    return [(0, agent.arena.data.size)]


def until(true: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with nothing set for the vendors' libraries."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(VENDORS)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def count_of_loads(
    name: str,
    series: str,
    labels: Mapping[str, str],
    *,
    requests: int = 3,
    axes: str = AXES,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **environment: str,
) -> int:
    """Load some requests, one after another, and compare every byte, in a process of its own.

    Args:
        name: The transport.
        series: What is counted, without our prefix.
        labels: Of what.
        requests: How many requests.
        axes: The order of axes in prefill's memory; its two ranks share the heads.
        prefill: What else is configured there.
        decode: The same of the engine that loads, which has one rank.
        **environment: Variables of the process.

    Returns:
        What that rank has counted.
    """
    done = run(
        f"""
from kvbridge.namespaces import private_network
network = private_network()
network.__enter__()
from tests.integration.tiny_engine import TinyEngine, run
p = TinyEngine("p", {dict(prefill or {}, transport=name)!r}, tp=2, axes={axes!r})
d = TinyEngine("d", {dict(decode or {}, transport=name)!r})
for n in range({requests}):
    request = f"r{{n}}"
    d.load(request, [5, 9, 4], 10, p.prefill(request, [7, 2, 3], 10))
    run([p, d], lambda: request in d.loaded and request in p.sent)
    assert d.loaded[request].ok, d.loaded
    assert (d.tokens([5, 9, 4], 10) == p.tokens([7, 2, 3], 10)).all()
    d.fill([5, 9, 4], 0.25)
print("counted", int(d.workers[0, 0].stats().value({"kvbridge_" + series!r}, **{dict(labels)!r})))
p.close()
d.close()
""",
        **environment,
    )
    assert done.returncode == 0, done.stderr
    (counted,) = (line for line in done.stdout.splitlines() if line.startswith("counted "))
    return int(counted.removeprefix("counted "))


def two_agents(name: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a program in which ``reader`` has read from ``peer``, which is ``owner``."""
    choice = {"transport": name, "options": dict(options or {})}
    return f"""
import numpy as np
from kvbridge.transport import Descriptors, Region, open_transport
agents, memory = [], np.arange(2 * 65536, dtype=np.uint8).reshape(2, -1)
for row in memory:
    agent = open_transport({choice!r})
    agent.register([Region(row.ctypes.data, row.nbytes)])
    agents.append(agent)
reader, owner = agents
peer = reader.add_peer(owner.agent_info(), owner.memory.regions, timeout_s=20)
pieces = [Descriptors([row.ctypes.data], [row.nbytes]) for row in memory]
memory[0] = 7
reader.submit("read", peer, *pieces)
while not (finished := reader.poll().finished):
    pass
assert finished[0].state.value == "done" and (memory[0] == memory[1]).all()
"""


def without_package(prefix: str, transport: str, options: Mapping[str, Any] | None = None) -> str:
    """Return a program that prints what a driver's probe, then its open, say without a package.

    Args:
        prefix: What the names of the packages begin with.
        transport: The driver, as ``module:Class``.
        options: What it is opened with.
    """
    module, kind = transport.split(":")
    return f"""
import ctypes.util, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({prefix!r}):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
ctypes.util.find_library = lambda name: None
from kvbridge.errors import TransportUnavailableError
from {module} import {kind}
print(*{kind}.probe(), sep="|")
try:
    {kind}().open({dict(options or {})!r})
except TransportUnavailableError as error:
    print(error.hint)
"""


def listening() -> set[tuple[str, str]]:
    """Address and port of the listening TCP sockets of this process."""
    mine = {_link(f) for f in Path("/proc/self/fd").iterdir()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [r[1].split(":") for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in mine]
    return {(address, port) for address, port in found}


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:  # the descriptor that lists the folder
        return ""
