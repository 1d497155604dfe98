"""Reads of the transport ``nixl`` that the owner serves, as it does over TCP by default."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import MemoryBusyError, PeerLostError
from kvbridge.transport import Peer, Region, State, Transport
from kvbridge_nixl import NixlTransport
from kvbridge_nixl.connections import Connection
from kvbridge_nixl.peering import NixlPeer
from kvbridge_nixl.worker import Worker
from tests.conformance.peer_process import (
    Agent,
    PeerProcess,
    pattern,
    pieces_at,
)
from tests.integration.drivers import KIB, MIB, MakeAgent, agents, everything, until

pytestmark = pytest.mark.multi_process

NBYTES = 32 * MIB
# What UCX may use, and the options that make reads served over it.
LANES = {"tcp": ("tcp", {}), "cma": ("all", {"read_mode": "served"})}


# Empty, a READ without a body, one that is cut off, an answer nobody waits for, an unknown kind.
GARBLED = [b"", b"\x01", b"\x01\x96", b"\x02\x91\x07", b"\x03", b"\xff" * 9]


@pytest.fixture(autouse=True)
def _nixl(usable_transport: Callable[[str], type[Transport]]) -> None:
    usable_transport("nixl")


@pytest.fixture(params=sorted(LANES))
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make the lane the one that is named; return the options for a reader."""
    lanes, options = LANES[request.param]
    monkeypatch.setenv("UCX_TLS", lanes)
    return dict(options)


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    yield from agents("nixl", nbytes=NBYTES)


@pytest.fixture
def make_process() -> Iterator[Callable[..., PeerProcess]]:
    with ExitStack() as stack:

        def make(nbytes: int = NBYTES, **more: Any) -> PeerProcess:
            return stack.enter_context(PeerProcess("nixl", nbytes, **more))

        yield make


def worker_of(agent: Agent) -> Worker:
    assert isinstance(agent.transport, NixlTransport)
    return agent.transport._opened().worker


def connection_of(peer: Peer) -> Connection:
    assert isinstance(peer, NixlPeer)
    return peer.connection


def kill_readers(
    make_process: Callable[..., PeerProcess], options: dict[str, Any], times: int, seed: int
) -> None:
    owner = make_process()
    owner.call("fill", 3, NBYTES)
    pieces = [(k * 64 * KIB, 64 * KIB) for k in range(NBYTES // (64 * KIB))]
    random = np.random.default_rng(seed)
    for _ in range(times):
        reader = make_process(options=options)
        reader.call("add_peer", *owner.address_card)
        reader.start("transfer_for_ever", "read", pieces, pieces)
        time.sleep(random.uniform(0.005, 0.15))
        reader.kill()
        assert owner.is_alive()
    survivor = make_process(options=options)
    survivor.call("add_peer", *owner.address_card)
    assert survivor.call("transfer", "read", pieces, pieces, b"") == "done"
    assert survivor.call("dump", 0, NBYTES) == pattern(3, NBYTES).tobytes()


def test_the_owner_outlives_killed_readers(
    make_process: Callable[..., PeerProcess], options: dict[str, Any]
) -> None:
    kill_readers(make_process, options, 4, 0)


@pytest.mark.full
@pytest.mark.timeout(85)
@pytest.mark.parametrize("seed", range(5))
def test_the_owner_outlives_many_killed_readers(
    make_process: Callable[..., PeerProcess], options: dict[str, Any], seed: int
) -> None:
    kill_readers(make_process, options, 10, seed)


def test_many_scattered_pieces_and_then_the_notification(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_process(), make_agent(**options)
    peer = reader.add(owner.address_card)
    owner.call("fill", 5, NBYTES)
    nbytes = 96
    order = np.random.default_rng(1).permutation(100_000)
    source = [(int(i) * 128, nbytes) for i in order]
    target = [(k * 128, nbytes) for k in range(order.size)]
    handle = reader.submit("read", peer, target, source, b"taken")
    assert reader.wait(handle).state is State.DONE
    expected = pattern(5, NBYTES)[: order.size * 128].reshape(-1, 128)[order, :nbytes]
    found = reader.arena.data[: order.size * 128].reshape(-1, 128)
    np.testing.assert_array_equal(found[:, :nbytes], expected)
    assert (found[:, nbytes:] == 0xA5).all()
    assert [payload for _, payload in owner.call("notifications", 1)] == [b"taken"]


def test_the_bytes_are_there_when_the_read_is_done(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_process(), make_agent(**options)
    peer = reader.add(owner.address_card)
    for seed in range(10):
        owner.call("fill", seed, NBYTES)
        reader.arena.data[:] = 0
        handle = reader.submit("read", peer, everything(reader), everything(reader))
        while handle not in reader.finished:
            reader.pump()
        assert reader.arena.data.tobytes() == pattern(seed, NBYTES).tobytes()


def test_the_owner_need_not_poll(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_process(polls_when_idle=False), make_agent(**options)
    peer = reader.add(owner.address_card)
    handle = reader.submit("read", peer, everything(reader), everything(reader))
    assert reader.wait(handle).state is State.DONE


def test_memory_that_the_owner_took_back_is_refused(
    make_agent: MakeAgent, options: dict[str, Any]
) -> None:
    owner, reader = make_agent(MIB), make_agent(MIB, **options)
    more = np.full(MIB, 9, np.uint8)
    region = Region(int(more.ctypes.data), more.nbytes)
    owner.transport.register([region])
    peer = reader.add((owner.transport.agent_info(), (region, owner.arena.region)))
    here, kept, taken_back = (
        pieces_at(r.address, [(0, r.nbytes)])
        for r in (reader.arena.region, owner.arena.region, region)
    )
    assert reader.wait(reader.transport.submit("read", peer, here, taken_back)).state is State.DONE
    # The reader may learn of the end before the owner does.
    until(lambda: not owner.transport.memory.busy)
    owner.transport.unregister([region])
    del more
    ended = reader.wait(reader.transport.submit("read", peer, here, taken_back))
    assert ended.state is State.FAILED
    assert "outside the 1 registered regions" in ended.reason
    assert reader.wait(reader.transport.submit("read", peer, here, kept)).state is State.DONE


def test_memory_that_the_reader_registers_later_or_anew_is_served(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_process(), make_agent(MIB, **options)
    peer = reader.add(owner.address_card)
    source = pieces_at(peer.table.regions[0].address, [(0, MIB)])
    more = np.empty(MIB, np.uint8)
    region = Region(int(more.ctypes.data), more.nbytes)
    for seed in range(4):
        owner.call("fill", seed, MIB)
        for memory, place in ((reader.arena.data, reader.arena.region), (more, region)):
            target = pieces_at(place.address, [(0, MIB)])
            if place is region:
                reader.transport.register([region])
            ended = reader.wait(reader.transport.submit("read", peer, target, source))
            assert ended.state is State.DONE, ended.reason
            assert memory.tobytes() == pattern(seed, MIB).tobytes()
        reader.transport.unregister([region])


def test_memory_is_busy_while_it_is_served(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_agent(), make_process(options=options)
    reader.call("add_peer", *owner.address_card)
    reader.start("transfer_for_ever", "read", everything(owner), everything(owner))
    with pytest.raises(MemoryBusyError):
        for _ in range(100):
            until(lambda: bool(owner.transport.memory.busy))
            owner.transport.unregister([owner.arena.region])  # it may just have become free
            owner.transport.register([owner.arena.region])
    reader.kill()
    until(lambda: not owner.transport.memory.busy)
    owner.transport.unregister([owner.arena.region])


def test_an_owner_killed_while_it_serves_leaves_quiet_memory(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    reader = make_agent(**options)
    for round_number in range(2):
        owner = make_process()
        peer = reader.add(owner.address_card)
        handles = [
            reader.submit("read", peer, everything(reader), everything(reader)) for _ in range(60)
        ]
        time.sleep(0.02 * (1 + round_number))
        owner.kill()
        ends = [reader.wait(handle) for handle in handles]
        reader.arena.data[:] = 7
        assert State.FAILED in {end.state for end in ends}
        time.sleep(0.2)
        assert (reader.arena.data == 7).all()
        with pytest.raises(PeerLostError):
            reader.submit("read", peer, everything(reader), everything(reader))


def test_a_stopped_owner_keeps_the_read_pending(
    make_process: Callable[..., PeerProcess],
    make_agent: MakeAgent,
    options: dict[str, Any],
) -> None:
    owner, reader = make_process(), make_agent(**options)
    peer = reader.add(owner.address_card)
    owner.signal(signal.SIGSTOP)
    try:
        handle = reader.submit("read", peer, everything(reader), everything(reader))
        with pytest.raises(TimeoutError):
            reader.wait(handle, timeout_s=1.0)
        assert reader.transport.memory.busy == (reader.arena.region,)
    finally:
        owner.signal(signal.SIGCONT)
    assert reader.wait(handle).state is State.DONE


@pytest.mark.parametrize("message", GARBLED, ids=bytes.hex)
def test_garbled_messages_are_ignored(
    message: bytes, make_agent: MakeAgent, options: dict[str, Any]
) -> None:
    owner, reader = make_agent(MIB), make_agent(MIB, **options)
    peer = reader.add(owner.address_card)
    worker_of(reader).send(connection_of(peer), message)
    handle = reader.submit("read", peer, everything(reader), everything(reader))
    assert reader.wait(handle).state is State.DONE
    assert owner.transport.poll().notifications == ()
