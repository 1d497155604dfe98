"""What every transport must do, whatever carries its bytes."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import (
    MemoryBusyError,
    NotSupportedError,
    OutOfBoundsError,
    PeerLostError,
    TransportError,
)
from kvbridge.transport import Descriptors, Op, Peer, Region, State, Transport, seal_agent_info
from tests.conformance.peer_process import (
    PATIENCE_S,
    Agent,
    PeerProcess,
    Pieces,
    pattern,
    pieces_at,
    resources,
)

pytestmark = pytest.mark.multi_process

MIB = 1 << 20
ARENA_NBYTES = 34 * MIB
SMALL_NBYTES = 64 << 10
OPS: tuple[Op, ...] = ("read", "write")


@pytest.fixture(scope="module", params=["local", "nixl"])
def name(request: pytest.FixtureRequest, usable_transport: Callable[[str], type[Transport]]) -> str:
    chosen: str = request.param
    usable_transport(chosen)
    return chosen


@pytest.fixture(scope="module")
def owner(name: str) -> Iterator[PeerProcess]:
    """Another process, whose memory is read and written."""
    with PeerProcess(name, ARENA_NBYTES) as process:
        yield process


@pytest.fixture(scope="module")
def agent(name: str) -> Iterator[Agent]:
    """The agent of this process."""
    here = Agent(name, ARENA_NBYTES)
    yield here
    here.close()


@pytest.fixture(scope="module")
def peer(agent: Agent, owner: PeerProcess) -> Peer:
    return agent.add(owner.address_card)


@pytest.fixture
def make_agent(name: str) -> Iterator[Callable[[int], Agent]]:
    """Make agents that one test may close or break."""
    with ExitStack() as stack:

        def make(nbytes: int) -> Agent:
            made = Agent(name, nbytes)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def make_owner(name: str) -> Iterator[Callable[..., PeerProcess]]:
    """Make processes that one test may kill."""
    with ExitStack() as stack:
        yield lambda nbytes, **more: stack.enter_context(PeerProcess(name, nbytes, **more))


def check_transfer(
    op: Op, agent: Agent, owner: PeerProcess, peer: Peer, pieces: list[tuple[int, int, int]]
) -> None:
    """Move pieces (source, destination, length) and compare with what numpy makes of them."""
    extent = min(ARENA_NBYTES, max((max(s, d) + n for s, d, n in pieces), default=0) + 4096)
    agent.arena.fill(1, extent)
    owner.call("fill", 2, extent)
    ours, theirs = pattern(1, extent), pattern(2, extent)
    source, model = (theirs, ours.copy()) if op == "read" else (ours, theirs.copy())
    for start, to, nbytes in pieces:
        model[to : to + nbytes] = source[start : start + nbytes]
    sources: Pieces = [(start, nbytes) for start, _, nbytes in pieces]
    targets: Pieces = [(to, nbytes) for _, to, nbytes in pieces]
    local, remote = (targets, sources) if op == "read" else (sources, targets)
    done = agent.wait(agent.submit(op, peer, local, remote))
    assert done.state is State.DONE, done.reason
    seen_here = agent.arena.data[:extent]
    seen_there = np.frombuffer(owner.call("dump", 0, extent), np.uint8)
    np.testing.assert_array_equal(seen_here, model if op == "read" else ours)
    np.testing.assert_array_equal(seen_there, theirs if op == "read" else model)
    assert agent.arena.guards_intact()
    assert owner.call("guards_intact")


def notify_for(agent: Agent, peer: Peer, seconds: float) -> None:
    """Notify again and again: not every transport knows at once that a peer is gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        agent.transport.notify(peer, b"anybody?")
        agent.pump()
        time.sleep(0.01)


@st.composite
def scattered(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces anywhere in the source, and apart from each other in the destination."""
    sizes = draw(st.lists(st.one_of(st.sampled_from([0, 1, 3, 4096, 4097]), st.integers(0, 9000))))
    gaps = draw(st.lists(st.integers(0, 70), min_size=len(sizes), max_size=len(sizes)))
    pieces, position = [], 0
    for nbytes, gap in zip(sizes, gaps, strict=True):
        position += gap
        pieces.append((draw(st.integers(0, SMALL_NBYTES)), position, nbytes))
        position += nbytes
    return draw(st.permutations(pieces))


@pytest.mark.parametrize("op", OPS)
@given(pieces=scattered())
def test_scattered_pieces_arrive_where_they_belong(
    agent: Agent, owner: PeerProcess, peer: Peer, op: Op, pieces: list[tuple[int, int, int]]
) -> None:
    check_transfer(op, agent, owner, peer, pieces)


@pytest.mark.parametrize("op", OPS)
def test_one_large_unaligned_piece(agent: Agent, owner: PeerProcess, peer: Peer, op: Op) -> None:
    check_transfer(op, agent, owner, peer, [(3, 12_345, 32 * MIB + 1)])


@pytest.mark.parametrize("op", OPS)
def test_thousands_of_descriptors(agent: Agent, owner: PeerProcess, peer: Peer, op: Op) -> None:
    order = np.random.default_rng(0).permutation(5000)
    check_transfer(
        op, agent, owner, peer, [(int(i) * 801, k * 999, 777) for k, i in enumerate(order)]
    )


@pytest.mark.parametrize("pieces", [[], [(0, 0), (7, 0)]], ids=["no pieces", "empty pieces"])
def test_nothing_to_move_is_done_and_still_notifies(
    agent: Agent, owner: PeerProcess, peer: Peer, pieces: Pieces
) -> None:
    done = agent.wait(agent.submit("read", peer, pieces, pieces, b"nothing"))
    assert done.state is State.DONE
    assert [p for _, p in owner.call("notifications", 1)] == [b"nothing"]


def test_a_notification_arrives_only_after_its_bytes(
    agent: Agent, owner: PeerProcess, peer: Peer
) -> None:
    nbytes = 8 * MIB
    for seed in range(10):
        agent.arena.fill(seed, nbytes)
        expected = agent.arena.data[:nbytes].tobytes()
        owner.call("fill", 99, nbytes)
        owner.start("dump_at_notification", 0, nbytes)
        handle = agent.submit("write", peer, [(0, nbytes)], [(0, nbytes)], b"now")
        assert agent.wait(handle).state is State.DONE
        agent.pump()
        assert owner.finish() == expected


def test_a_thousand_notifications_of_all_byte_values(
    agent: Agent, owner: PeerProcess, peer: Peer
) -> None:
    payloads = [bytes((i + k) % 256 for k in range(i % 257)) for i in range(1, 999)]
    payloads += [bytes(range(256)), b"\xff" * peer.capabilities.notify_max_bytes]
    for payload in payloads:
        agent.transport.notify(peer, payload)
        agent.pump()
    owner.start("notifications", len(payloads))
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        agent.pump()
    received = owner.finish()
    assert sorted(p for _, p in received) == sorted(payloads)
    assert len({sender for sender, _ in received}) == 1


def test_the_sender_of_a_notification_is_the_name_of_the_peer(
    make_agent: Callable[[int], Agent], make_owner: Callable[..., PeerProcess]
) -> None:
    here, there = make_agent(4096), make_owner(4096)
    name_here = there.call("add_peer", *here.address_card)
    there.start("transfer", "write", [(0, 10)], [(5, 10)], b"hello")
    assert here.wait_notifications(1) == [(here.add(there.address_card).agent, b"hello")]
    assert there.finish() == "done"
    assert name_here != here.add(there.address_card).agent


BAD_PIECES: list[tuple[Pieces, Pieces]] = [
    ([(0, 10)], [(ARENA_NBYTES - 9, 10)]),
    ([(ARENA_NBYTES - 9, 10)], [(0, 10)]),
    ([(0, 10), (20, 10)], [(0, 10), (ARENA_NBYTES + 1, 10)]),
    ([(0, 10)], [(0, 11)]),
    ([(0, 10), (20, 10)], [(0, 10)]),
    ([(0, ARENA_NBYTES + 1)], [(0, ARENA_NBYTES + 1)]),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", BAD_PIECES, ids=range(len(BAD_PIECES)))
def test_out_of_bounds_is_refused_before_anything_moves(
    agent: Agent, owner: PeerProcess, peer: Peer, op: Op, bad: tuple[Pieces, Pieces]
) -> None:
    agent.arena.fill(1, 100)
    owner.call("fill", 2, 100)
    with pytest.raises(OutOfBoundsError):
        agent.submit(op, peer, *bad, b"never")
    assert (agent.arena.data[:100] == pattern(1, 100)).all()
    assert owner.call("dump", 0, 100) == pattern(2, 100).tobytes()
    assert owner.call("notifications", 1, 0.05) == []


def test_what_is_not_registered_any_more_is_refused(make_agent: Callable[[int], Agent]) -> None:
    here, there = make_agent(4096), make_agent(4096)
    peer = here.add(there.address_card)
    here.transport.unregister([here.arena.region])
    with pytest.raises(OutOfBoundsError):
        here.submit("read", peer, [(0, 10)], [(0, 10)])
    with pytest.raises(OutOfBoundsError):
        here.transport.unregister([here.arena.region])
    here.transport.register([here.arena.region])
    assert here.wait(here.submit("read", peer, [(0, 10)], [(0, 10)])).state is State.DONE


def test_what_is_not_declared_is_refused(agent: Agent, peer: Peer) -> None:
    transport = agent.transport
    piece = pieces_at(agent.arena.address, [(0, 10)])
    with pytest.raises(NotSupportedError):
        transport.submit("swap", peer, piece, piece)  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError):
        transport.notify(peer, bytes(transport.capabilities.notify_max_bytes + 1))
    with pytest.raises(NotSupportedError):
        agent.submit(
            "read", peer, [(0, 1)], [(0, 1)], bytes(transport.capabilities.notify_max_bytes + 1)
        )
    with pytest.raises(NotSupportedError):
        transport.register([Region(4096, 4096, memory_kind="core rope")])
    elsewhere = Descriptors(piece.address, piece.nbytes, memory_kind="core rope")
    with pytest.raises(OutOfBoundsError):
        transport.submit("read", peer, elsewhere, piece)


def test_overlapping_regions_are_refused(agent: Agent) -> None:
    with pytest.raises(OutOfBoundsError):
        agent.transport.register([Region(agent.arena.address + 10, 10)])


@pytest.mark.parametrize("op", OPS)
def test_memory_in_flight_cannot_be_unregistered(
    agent: Agent, owner: PeerProcess, peer: Peer, op: Op
) -> None:
    handles = [agent.submit(op, peer, [(0, 32 * MIB)], [(0, 32 * MIB)]) for _ in range(4)]
    with pytest.raises(MemoryBusyError):
        agent.transport.unregister([agent.arena.region])
    for handle in handles:
        assert agent.wait(handle).state is State.DONE
    agent.transport.unregister([agent.arena.region])
    agent.transport.register([agent.arena.region])


@pytest.mark.parametrize("op", OPS)
def test_a_peer_killed_in_mid_transfer_fails_its_operations_only(
    agent: Agent,
    owner: PeerProcess,
    peer: Peer,
    make_owner: Callable[..., PeerProcess],
    op: Op,
) -> None:
    victim = make_owner(ARENA_NBYTES)
    doomed = agent.add(victim.address_card)
    pieces = [(k * 32 * 1024, 32 * 1024) for k in range(1024)]
    handles = [agent.submit(op, doomed, pieces, pieces) for _ in range(30)]
    agent.wait(handles[0])
    victim.kill()
    ends = [agent.wait(handle) for handle in handles]
    failed = [end for end in ends if end.state is State.FAILED]
    assert failed, "the kill came too late to hit anything"
    assert all(end.reason for end in failed)
    # Quiet: nothing comes any more, whatever is done to the memory.
    agent.arena.data[:] = 7
    time.sleep(0.1)
    agent.pump()
    assert (agent.arena.data == 7).all()
    with pytest.raises(PeerLostError):
        notify_for(agent, doomed, PATIENCE_S)
    agent.transport.drop_peer(doomed)
    check_transfer(op, agent, owner, peer, [(0, 1, 100_000)])


def test_the_owner_survives_its_readers(
    agent: Agent, make_owner: Callable[..., PeerProcess]
) -> None:
    for round_number in range(3):
        reader = make_owner(32 * MIB)
        reader.call("add_peer", *agent.address_card)
        reader.start("transfer_for_ever", "read", [(0, 32 * MIB)], [(0, 32 * MIB)])
        time.sleep(0.03 * (round_number + 1))
        reader.kill()
        agent.pump()
    survivor = make_owner(4096)
    survivor.call("add_peer", *agent.address_card)
    assert survivor.call("transfer", "read", [(0, 4096)], [(0, 4096)], b"") == "done"


@pytest.mark.parametrize("op", OPS)
def test_a_passive_owner_may_be_stopped(
    agent: Agent, make_owner: Callable[..., PeerProcess], op: Op
) -> None:
    there = make_owner(MIB)
    peer = agent.add(there.address_card)
    if not peer.capabilities.owner_passive:
        pytest.skip("not declared for this peer")
    assert agent.wait(agent.submit(op, peer, [(0, 10)], [(0, 10)])).state is State.DONE
    there.signal(signal.SIGSTOP)
    try:
        end = agent.wait(agent.submit(op, peer, [(0, MIB)], [(0, MIB)]))
    finally:
        there.signal(signal.SIGCONT)
    assert end.state is State.DONE
    agent.transport.drop_peer(peer)


def test_a_restarted_peer_is_a_new_one(
    agent: Agent, make_owner: Callable[..., PeerProcess]
) -> None:
    first = make_owner(4096)
    old_card = first.address_card
    old = agent.add(old_card)
    first.kill()
    second = make_owner(4096)
    new = agent.add(second.address_card)
    assert new.agent != old.agent
    try:
        end = agent.wait(agent.submit("read", old, [(0, 10)], [(0, 10)]))
        assert end.state is State.FAILED
    except PeerLostError:
        pass
    agent.transport.drop_peer(old)
    with pytest.raises(PeerLostError):
        agent.submit("read", old, [(0, 10)], [(0, 10)])
    assert agent.wait(agent.submit("read", new, [(0, 10)], [(0, 10)])).state is State.DONE
    agent.transport.drop_peer(new)


def test_dropping_a_peer_ends_its_operations(agent: Agent, owner: PeerProcess, peer: Peer) -> None:
    again = agent.add(owner.address_card)
    handles = [agent.submit("read", again, [(0, 32 * MIB)], [(0, 32 * MIB)]) for _ in range(8)]
    agent.transport.drop_peer(again)
    ends = [agent.wait(handle) for handle in handles]
    assert {end.state for end in ends} <= {State.DONE, State.FAILED}
    check_transfer("read", agent, owner, peer, [(5, 1, 1000)])


def test_an_abandoned_operation_is_still_reported(agent: Agent, peer: Peer) -> None:
    handles = [agent.submit("read", peer, [(0, 32 * MIB)], [(0, 32 * MIB)]) for _ in range(4)]
    for handle in handles:
        agent.transport.abandon(handle)
    for handle in handles:
        assert agent.wait(handle).state in (State.DONE, State.FAILED)
    assert agent.transport.memory.busy == ()


def test_garbled_agent_info_is_refused(agent: Agent, owner: PeerProcess, peer: Peer) -> None:
    info, regions = owner.address_card
    bad = [info[:cut] for cut in range(0, len(info), max(1, len(info) // 40))]
    bad += [info + b"\0", seal_agent_info("somebody else", b"x"), b"\xff" * 100]
    for at in range(0, len(info), max(1, len(info) // 100)):
        bad.append(info[:at] + bytes([info[at] ^ 1 << at % 8]) + info[at + 1 :])
    for garbled in bad:
        with pytest.raises(TransportError):
            agent.transport.add_peer(garbled, regions, timeout_s=1)
    check_transfer("read", agent, owner, peer, [(5, 1, 1000)])


def test_a_peer_that_has_ended_cannot_be_added(
    agent: Agent, make_owner: Callable[..., PeerProcess]
) -> None:
    gone = make_owner(4096)
    gone.kill()
    start = time.monotonic()
    # Some libraries connect at first use only; then that is what fails.
    try:
        peer = agent.transport.add_peer(*gone.address_card, timeout_s=2)
        end = agent.wait(agent.submit("read", peer, [(0, 10)], [(0, 10)]))
        assert end.state is State.FAILED
        agent.transport.drop_peer(peer)
    except PeerLostError:
        pass
    assert time.monotonic() - start < PATIENCE_S


def test_close_with_operations_in_flight(
    make_agent: Callable[[int], Agent], owner: PeerProcess
) -> None:
    here = make_agent(ARENA_NBYTES)
    peer = here.add(owner.address_card)
    for _ in range(16):
        here.submit("read", peer, [(0, 32 * MIB)], [(0, 32 * MIB)])
    start = time.monotonic()
    not_quiet = here.transport.close(timeout_s=5)
    assert time.monotonic() - start < 10
    if not not_quiet:
        here.arena.data[:] = 7
        time.sleep(0.05)
        assert (here.arena.data == 7).all()
    assert owner.call("guards_intact")


def test_closed_stays_closed(make_agent: Callable[[int], Agent]) -> None:
    here = make_agent(4096)
    assert here.transport.close() == ()
    assert here.transport.close() == ()
    for use in (here.transport.agent_info, lambda: here.transport.register([Region(1 << 20, 1)])):
        with pytest.raises(TransportError):
            use()
    with pytest.raises(TransportError):
        here.transport.open()


def test_two_agents_of_one_process(make_agent: Callable[[int], Agent]) -> None:
    here, there = make_agent(MIB), make_agent(MIB)
    if not here.transport.capabilities.peers_in_process:
        pytest.skip("not declared")
    there.arena.fill(5, MIB)
    peer = here.add(there.address_card)
    handle = here.submit("read", peer, [(1, MIB - 1)], [(1, MIB - 1)], b"taken")
    assert here.wait(handle).state is State.DONE
    assert (here.arena.data[1:] == there.arena.data[1:]).all()
    assert [n.payload for n in there.wait_notifications(1)] == [b"taken"]


def test_a_forked_child_is_refused(agent: Agent, peer: Peer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        status = 1
        try:
            agent.transport.poll()
        except TransportError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agent.wait(agent.submit("read", peer, [(0, 10)], [(0, 10)])).state is State.DONE


def test_nothing_leaks_over_many_rounds(name: str, owner: PeerProcess) -> None:
    def one_round(*, drop: bool) -> None:
        here = Agent(name, 64 << 10)
        peer = here.add(owner.address_card)
        assert here.wait(here.submit("read", peer, [(0, 10)], [(0, 10)], b"x")).state is State.DONE
        if drop:
            here.transport.drop_peer(peer)
        assert here.close() == ()

    def settled() -> tuple[int, int, int, int]:
        time.sleep(0.2)
        owner.call("notifications", 1000, 0.05)
        return (*resources(), *owner.call("resources"))

    for i in range(4):
        one_round(drop=i % 2 == 0)
    before = settled()
    for i in range(30):
        one_round(drop=i % 2 == 0)
    after = settled()
    assert all(a <= b + 2 for a, b in zip(after, before, strict=True)), f"{before} became {after}"


def test_ten_thousand_notifications_to_a_peer_that_does_not_poll(
    make_agent: Callable[[int], Agent], make_owner: Callable[..., PeerProcess]
) -> None:
    here, there = make_agent(4096), make_owner(4096, polls_when_idle=False)
    peer = here.add(there.address_card)
    payloads = [str(i).encode() * (1 + i % 50) for i in range(10_000)]
    for payload in payloads:
        here.transport.notify(peer, payload)
    there.start("notifications", len(payloads))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        here.pump()
    assert sorted(p for _, p in there.finish()) == sorted(payloads)


def test_nothing_leaks_over_many_peers(
    make_agent: Callable[[int], Agent], owner: PeerProcess
) -> None:
    here = make_agent(4096)

    def one_peer() -> None:
        peer = here.add(owner.address_card)
        assert here.wait(here.submit("read", peer, [(0, 10)], [(0, 10)])).state is State.DONE
        here.transport.drop_peer(peer)
        here.pump()
        time.sleep(0.01)

    one_peer()
    before = (*resources(), *owner.call("resources"))
    for _ in range(20):
        one_peer()
    time.sleep(0.2)
    after = (*resources(), *owner.call("resources"))
    assert all(a <= b + 2 for a, b in zip(after, before, strict=True)), f"{before} became {after}"
