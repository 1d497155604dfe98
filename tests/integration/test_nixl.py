"""What holds for the transport ``nixl`` beyond what every transport must do."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbridge.errors import ConfigError, PeerLostError, TransportError
from kvbridge.transport import (
    Descriptors,
    Region,
    State,
    Transport,
    open_agent_info,
    seal_agent_info,
)
from kvbridge_nixl import NixlTransport, library
from kvbridge_nixl.card import read_card
from tests.conformance.peer_process import Agent, PeerProcess

pytestmark = pytest.mark.multi_process

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 20.0

TWO_AGENTS = """
import numpy as np
from kvbridge.transport import Descriptors, Region, open_transport
agents, memory = [], np.arange(2 * 65536, dtype=np.uint8).reshape(2, -1)
for row in memory:
    agent = open_transport({"transport": "nixl"})
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


@pytest.fixture(autouse=True)
def _nixl(usable_transport: Callable[[str], type[Transport]]) -> None:
    usable_transport("nixl")


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    with ExitStack() as stack:

        def make(nbytes: int = 64 * KIB, **options: Any) -> Agent:
            made = Agent("nixl", nbytes, options)
            stack.callback(made.transport.close, timeout_s=0.2)
            return made

        yield make


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def agent_of(transport: Transport) -> Any:
    """NIXL's agent, to spy on."""
    assert isinstance(transport, NixlTransport)
    assert transport._worker is not None
    return transport._worker._agent


def everything(agent: Agent) -> list[tuple[int, int]]:
    return [(0, agent.arena.data.size)]


# ------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("end", ["reader.close(); owner.close()", ""], ids=["closed", "not closed"])
def test_a_process_with_agents_ends_well_and_says_nothing(end: str) -> None:
    ended = run(TWO_AGENTS + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_importing_the_driver_loads_no_library() -> None:
    code = "import sys, kvbridge_nixl as k; k.NixlTransport.probe(); print(*sys.modules)"
    loaded = run(code).stdout.split()
    assert not {"nixl", "nixl_cu12", "nixl_cu13", "torch"} & set(loaded)


def test_without_the_library_probe_says_how_to_install_it() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("nixl"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocker())
from kvbridge.errors import TransportUnavailableError
from kvbridge_nixl import NixlTransport
print(*NixlTransport.probe(), sep="|")
try:
    NixlTransport().open()
except TransportUnavailableError as error:
    print(error.hint)
"""
    first, second = run(code).stdout.splitlines()
    assert first.startswith("False|none of nixl_cu12, nixl_cu13 is installed|")
    assert first.endswith(second)
    assert "pip install 'kvbridge[nixl]'" in second
    assert "pip install --no-deps nixl-cu12" in second


def test_loading_leaves_the_logging_of_the_process_alone() -> None:
    library.load()
    assert logging.raiseExceptions
    assert logging.getLogger("nixl").handlers == []


# ------------------------------------------------------------------------------- the device


def test_it_listens_on_loopback_only(make_agent: Callable[..., Agent]) -> None:
    before = listening()
    make_agent()
    opened = listening() - before
    assert opened
    assert {address for address, _ in opened} == {"0100007F"}


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


def test_a_device_must_exist_and_agree_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, make_agent: Callable[..., Agent]
) -> None:
    with pytest.raises(ConfigError, match=r"device='nosuch0': this host has .*lo"):
        make_agent(device="nosuch0")
    monkeypatch.setenv("UCX_NET_DEVICES", "nosuch0")
    with pytest.raises(ConfigError, match="contradicts UCX_NET_DEVICES='nosuch0'"):
        make_agent(device="lo")


def test_a_peer_that_loopback_does_not_lead_to_is_refused(
    make_agent: Callable[..., Agent],
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    card = read_card(open_agent_info("nixl", info))
    elsewhere = msgspec.structs.replace(card, network="another host")
    sealed = seal_agent_info("nixl", msgspec.msgpack.encode(elsewhere))
    with pytest.raises(TransportError, match="option 'device'"):
        here.add((sealed, regions))


@pytest.mark.parametrize(("lanes", "path"), [("all", "cma"), ("tcp", "tcp")])
def test_the_path_is_what_carries_the_bytes(
    lanes: str, path: str, monkeypatch: pytest.MonkeyPatch, make_agent: Callable[..., Agent]
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    with PeerProcess("nixl", 64 * KIB) as owner:
        peer = make_agent().add(owner.address_card)
        assert peer.path == path
        assert peer.capabilities.owner_passive == (path == "cma")
        assert peer.capabilities.preferred_direction == ("either" if path == "cma" else "write")


# --------------------------------------------------------------------------------- metadata


def test_garbled_metadata_never_reaches_the_library(
    monkeypatch: pytest.MonkeyPatch, make_agent: Callable[..., Agent]
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    library_agent = agent_of(here.transport)
    given: list[bytes] = []
    add = library_agent.add_remote_agent

    def spy(metadata: bytes) -> object:
        given.append(metadata)
        return add(metadata)

    monkeypatch.setattr(library_agent, "add_remote_agent", spy)
    garbled = [info[:n] for n in (0, 1, len(info) - 1)]
    garbled += [bytes([*info[:i], info[i] ^ 4, *info[i + 1 :]]) for i in range(0, len(info), 7)]
    for blob in garbled:
        with pytest.raises(TransportError):
            here.add((blob, regions))
    assert given == []
    peer = here.add((info, regions))
    assert len(given) == 1
    done = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert done.state is State.DONE


def test_memory_registered_later_is_reached_after_adding_the_peer_again(
    make_agent: Callable[..., Agent],
) -> None:
    here, there = make_agent(), make_agent()
    first = here.add(there.address_card)
    more = np.full(64 * KIB, 9, np.uint8)
    region = Region(more.ctypes.data, more.nbytes)
    there.transport.register([region])
    second = here.add((there.transport.agent_info(), (region,)))
    assert second.agent == first.agent
    here.transport.drop_peer(first)  # the connection stays for the second
    done = here.wait(here.submit("read", second, everything(here), everything(there)))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data == 9).all()
    with pytest.raises(PeerLostError):
        here.submit("read", first, everything(here), everything(there))


def test_memory_registered_anew_is_reached_again(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(), make_agent()
    for value in range(3):
        there.arena.data[:] = value
        peer = here.add(there.address_card)
        done = here.wait(here.submit("read", peer, everything(here), everything(there)))
        assert done.state is State.DONE, done.reason
        assert (here.arena.data == value).all()
        here.transport.drop_peer(peer)
        there.transport.unregister([there.arena.region])
        there.transport.register([there.arena.region])


# ------------------------------------------------------------------------------- operations


def test_submit_does_not_wait_for_the_bytes(make_agent: Callable[..., Agent]) -> None:
    nbytes = 256 * MIB
    here = make_agent(nbytes)
    with PeerProcess("nixl", nbytes) as owner:
        peer = here.add(owner.address_card)
        offsets = np.arange(0, nbytes, 4 * KIB, dtype=np.uint64)
        lengths = np.full(offsets.size, 4 * KIB)
        local = Descriptors(offsets + np.uint64(here.arena.address), lengths)
        remote = Descriptors(offsets + np.uint64(peer.table.regions[0].address), lengths)
        handle = here.transport.submit("read", peer, local, remote)
        here.pump()
        assert handle not in here.finished
        assert here.wait(handle).state is State.DONE


def test_several_threads_may_post(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(4 * MIB, num_threads=2), make_agent(4 * MIB)
    there.arena.data[:] = np.arange(4 * MIB) % 251
    peer = here.add(there.address_card)
    pieces = [(offset, 777) for offset in range(0, 4 * MIB - 777, 777)]
    done = here.wait(here.submit("read", peer, pieces, pieces))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data[: len(pieces) * 777] == there.arena.data[: len(pieces) * 777]).all()


@pytest.mark.parametrize("lanes", ["all", "tcp"])
def test_a_killed_peer_leaves_the_agent_usable(
    lanes: str, monkeypatch: pytest.MonkeyPatch, make_agent: Callable[..., Agent]
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    here = make_agent(32 * MIB)
    with PeerProcess("nixl", 32 * MIB) as owner, PeerProcess("nixl", 32 * MIB) as other:
        lost, good = here.add(owner.address_card), here.add(other.address_card)
        handles = [
            here.submit(op, lost, everything(here), everything(here))
            for op in ("read", "write") * 10
        ]
        owner.kill()
        states = {here.wait(handle).state for handle in handles}
        assert State.FAILED in states or lanes == "all"  # all may have been copied by then
        late = []
        with pytest.raises(PeerLostError):
            for _ in range(3):  # the loss may be noticed by the first that is posted
                late.append(here.submit("read", lost, everything(here), everything(here)))
                assert here.wait(late[-1]).state is State.FAILED
        done = here.wait(here.submit("read", good, everything(here), everything(here)))
        assert done.state is State.DONE


def test_a_peer_that_does_not_answer_can_be_added_once_it_does(
    make_agent: Callable[..., Agent],
) -> None:
    here = make_agent()
    with PeerProcess("nixl", 64 * KIB) as owner:
        owner.signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(PeerLostError, match="does not answer in time"):
                here.transport.add_peer(*owner.address_card, timeout_s=0.5)
        finally:
            owner.signal(signal.SIGCONT)
        assert time.monotonic() - start < PATIENCE_S
        peer = here.add(owner.address_card)
        done = here.wait(here.submit("read", peer, everything(here), everything(here)))
        assert done.state is State.DONE


def test_what_may_still_move_stays_pending_and_close_names_its_memory(
    monkeypatch: pytest.MonkeyPatch, make_agent: Callable[..., Agent]
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    bindings = library.load().bindings

    def fail(request: object) -> str:
        raise bindings.nixlBackendError("something went wrong")

    monkeypatch.setattr(agent_of(here.transport), "transfer", fail)
    handle = here.submit("read", peer, everything(here), everything(there))
    here.transport.abandon(handle)
    with pytest.raises(TimeoutError):
        here.wait(handle, timeout_s=0.3)
    assert here.transport.close(timeout_s=0.2) == (here.arena.region,)
