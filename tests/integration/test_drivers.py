"""What the drivers have in common because it is written once: states, arguments, peers."""

import ctypes
import math
import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import ConfigError, OutOfBoundsError, PeerLostError, TransportError
from kvbridge.namespaces import private_network
from kvbridge.transport import Descriptors, Peer, Poll, Region, State, Transport
from tests.conformance.peer_process import Agent, pieces_at
from tests.integration.drivers import KIB, OPS, MakeAgent, agents, everything, run, two_agents

pytestmark = pytest.mark.multi_process

OPTIONS: dict[str, dict[str, Any]] = {
    "local": {},
    "mooncake": {"allow_open_data_port": True},
    "nixl": {},
    "ucx": {},
}


@pytest.fixture(params=sorted(OPTIONS), scope="module")
def kind(
    request: pytest.FixtureRequest, usable_transport: Callable[[str], type[Transport]]
) -> Iterator[type[Transport]]:
    """Each of our drivers, in a network that nobody else can reach."""
    found = usable_transport(request.param)
    if not OPTIONS[found.name]:
        yield found
        return
    with private_network():
        yield found


@pytest.fixture
def make_agent(kind: type[Transport]) -> Iterator[MakeAgent]:
    yield from agents(kind.name, OPTIONS[kind.name])


@pytest.fixture
def pair(make_agent: MakeAgent) -> tuple[Agent, Peer]:
    """An agent and the other one, as its peer."""
    here, there = make_agent(), make_agent()
    return here, here.add(there.address_card)


# ------------------------------------------------------------------------------- the states


def uses(transport: Transport) -> dict[str, Callable[[], object]]:
    """Calls that need an agent."""
    return {
        "register": lambda: transport.register([]),
        "unregister": lambda: transport.unregister([]),
        "agent_info": transport.agent_info,
        "add_peer": lambda: transport.add_peer(b"", [], timeout_s=1),
    }


def check_refuses(calls: dict[str, Callable[[], object]], why: str) -> None:
    for call in calls.values():
        with pytest.raises(TransportError, match=why):
            call()


def test_what_was_never_opened_refuses_all_and_closes_for_good(kind: type[Transport]) -> None:
    transport = kind()
    calls = uses(transport) | {"poll": transport.poll, "wait": lambda: transport.wait(0)}
    check_refuses(calls, r"is not open; call open\(\) first")
    for _ in range(2):
        assert transport.close() == ()
        check_refuses(uses(transport), "is closed; make a new one")
        with pytest.raises(TransportError, match="is closed; make a new one"):
            transport.open(OPTIONS[kind.name])
        assert transport.poll() == Poll()
        transport.wait(0)


def test_an_open_that_failed_may_be_tried_again(kind: type[Transport]) -> None:
    transport = kind()
    with pytest.raises(ConfigError, match="no_such_option"):
        transport.open({"no_such_option": 1})
    transport.open(OPTIONS[kind.name])
    with pytest.raises(TransportError, match="was opened before; make a new one"):
        transport.open(OPTIONS[kind.name])
    assert transport.close() == ()


def test_what_has_ended_is_polled_after_close(pair: tuple[Agent, Peer]) -> None:
    here, peer = pair
    handle = here.submit("read", peer, everything(here), everything(here))
    assert here.transport.close() == ()
    start = time.monotonic()
    here.transport.wait(60)  # there is something to tell
    assert time.monotonic() - start < 10
    here.pump()
    assert here.finished[handle].state in (State.DONE, State.FAILED)
    assert here.transport.poll() == Poll()
    here.transport.abandon(handle)
    calls = uses(here.transport) | {
        "submit": lambda: here.submit("read", peer, [], []),
        "notify": lambda: here.transport.notify(peer, b""),
        "drop_peer": lambda: here.transport.drop_peer(peer),
        "open": here.transport.open,
    }
    check_refuses(calls, "is closed; make a new one")


# ---------------------------------------------------------------------------- the arguments


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, 0, -1, 1e30, "x", None])
def test_a_timeout_is_a_time(timeout_s: Any, pair: tuple[Agent, Peer]) -> None:
    here, _ = pair
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"timeout_s of add_peer\(\) .* must be above 0"):
        here.transport.add_peer(b"", [], timeout_s=timeout_s)
    if timeout_s != 0:  # which means not to wait
        with pytest.raises(ConfigError, match=r"timeout_s of close\(\) .* must be at least 0"):
            here.transport.close(timeout_s=timeout_s)
        with pytest.raises(ConfigError, match=r"timeout_s of wait\(\) .* must be at least 0"):
            here.transport.wait(timeout_s)
    assert time.monotonic() - start < 1
    assert here.transport.poll() == Poll()  # so it is open still


def test_a_list_that_was_forgotten_is_asked_for(pair: tuple[Agent, Peer]) -> None:
    here, _ = pair
    transport, region = here.transport, here.arena.region
    add = partial(transport.add_peer, transport.agent_info(), timeout_s=1)
    calls: dict[str, Callable[[Any], object]] = {
        r"register\(\)": transport.register,
        r"unregister\(\)": transport.unregister,
        r"add_peer\(\)": add,
    }
    for what, call in calls.items():
        for forgotten in (region, 5, None, [region, (1, 2)], [[region]]):
            with pytest.raises(TransportError, match=rf"{what} takes a list .* list: \[region\]"):
                call(forgotten)
    assert transport.memory.regions == (region,)
    with pytest.raises(TransportError, match=r"bytes that the peer's agent_info\(\) returned"):
        transport.add_peer(None, [], timeout_s=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("strange", [5, None, [1, 2], (0, 1)])
def test_pieces_and_peers_are_what_they_are_called(strange: Any, pair: tuple[Agent, Peer]) -> None:
    here, peer = pair
    transport, good = here.transport, pieces_at(here.arena.address, [(0, 1)])
    for pieces in ((strange, good), (good, strange)):
        with pytest.raises(OutOfBoundsError, match=r"Descriptors\(address, nbytes\), got"):
            transport.submit("read", peer, *pieces)
    for call in (
        lambda: transport.submit("read", strange, good, good),
        lambda: transport.notify(strange, b""),
        lambda: transport.drop_peer(strange),
    ):
        with pytest.raises(TransportError, match=r"a peer is what add_peer\(\) returns, got"):
            call()
    assert transport.memory.busy == ()


def test_only_handles_of_its_own_are_abandoned(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    peer, back = here.add(there.address_card), there.add(here.address_card)
    handle = here.submit("read", peer, everything(here), everything(there))
    foreign = there.submit("read", back, [(0, 1)], [(0, 1)])
    strange: Any
    for strange in (foreign, 5, None, "x", peer):
        with pytest.raises(TransportError, match=r"cannot abandon .* has not returned it"):
            here.transport.abandon(strange)
    there.wait(foreign)
    assert not foreign.abandoned
    for _ in range(2):
        here.transport.abandon(handle)
    here.wait(handle)
    here.transport.drop_peer(peer)
    here.transport.abandon(handle)


# -------------------------------------------------------------------------------- the peers


def test_a_peer_is_its_own_until_it_is_dropped(make_agent: MakeAgent) -> None:
    here, there, other = make_agent(), make_agent(), make_agent()
    mine, foreign = here.add(there.address_card), other.add(there.address_card)
    peer: Peer
    for peer, kind, why in (
        (foreign, TransportError, "was made by another transport"),
        (mine, PeerLostError, "was dropped; add it again"),
    ):
        if peer is mine:
            for _ in range(2):
                here.transport.drop_peer(peer)
        else:
            with pytest.raises(kind, match=why):
                here.transport.drop_peer(peer)
        for op in OPS:
            with pytest.raises(kind, match=why):
                here.submit(op, peer, [(0, 1)], [(0, 1)])
        with pytest.raises(kind, match=why):
            here.transport.notify(peer, b"")
    assert other.wait(other.submit("read", foreign, [(0, 1)], [(0, 1)])).state is State.DONE


def test_a_peer_that_has_ended_says_so(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    there.close()
    deadline = time.monotonic() + 20
    with pytest.raises(PeerLostError, match=rf"peer {peer.agent} is gone: .*; add it again"):
        while time.monotonic() < deadline:
            here.wait(here.submit("write", peer, [(0, 1)], [(0, 1)]))
            time.sleep(0.01)


# ------------------------------------------------------------------------------- the memory


@pytest.fixture
def fixed() -> Iterator[Region]:
    """Memory that can only be read."""
    pages = mmap.mmap(-1, 64 * KIB)
    view = np.frombuffer(pages, np.uint8)
    address, libc = int(view.ctypes.data), ctypes.CDLL(None)
    assert not libc.mprotect(ctypes.c_void_p(address), 64 * KIB, mmap.PROT_READ)
    yield Region(address, 64 * KIB)
    del view
    pages.close()


def test_nothing_is_read_into_memory_that_can_only_be_read(
    fixed: Region, pair: tuple[Agent, Peer]
) -> None:
    here, peer = pair
    here.transport.register([fixed])
    local = Descriptors(np.array([fixed.address]), np.array([fixed.nbytes]))
    remote = Descriptors(np.array([peer.table.regions[0].address]), local.nbytes)
    with pytest.raises(TransportError, match=f"cannot read into region {fixed.address:#x}"):
        here.transport.submit("read", peer, local, remote)
    assert here.transport.memory.busy == ()
    ended = here.wait(here.transport.submit("write", peer, local, remote))
    assert ended.state is State.DONE, ended.reason
    here.transport.unregister([fixed])


def test_memory_that_is_not_there_is_not_registered(pair: tuple[Agent, Peer]) -> None:
    here, peer = pair
    pages = mmap.mmap(-1, 64 * KIB)
    view = np.frombuffer(pages, np.uint8)
    gone = Region(int(view.ctypes.data), view.nbytes)
    del view
    pages.close()
    with pytest.raises(TransportError, match=f"{gone.address:#x}.* is not all memory"):
        here.transport.register([gone])
    assert here.transport.memory.regions == (here.arena.region,)
    ended = here.wait(here.submit("read", peer, everything(here), everything(here)))
    assert ended.state is State.DONE, ended.reason


def test_the_memory_functions_of_the_process_stay_as_they_are(kind: type[Transport]) -> None:
    """UCX rewrites them otherwise, while the engine's threads may be in them."""
    program = two_agents(kind.name, OPTIONS[kind.name])
    done = run(
        f"""
import ctypes
from kvbridge.namespaces import private_network
network = private_network()
network.__enter__()
def code():
    libc, names = ctypes.CDLL(None), ("mmap", "munmap", "mremap", "brk", "madvise")
    addresses = [ctypes.cast(getattr(libc, name), ctypes.c_void_p).value for name in names]
    return [ctypes.string_at(address, 16) for address in addresses]
before = code()
{program}
print("changed" if code() != before else "as before")
[agent.close() for agent in agents]
"""
    )
    assert done.returncode == 0, done.stderr
    assert "as before" in done.stdout
