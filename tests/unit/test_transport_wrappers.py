"""Wrappers around the real transport ``local``: what goes wrong on purpose, what is recorded."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbridge.errors import (
    ConfigError,
    MemoryBusyError,
    OutOfBoundsError,
    PeerLostError,
    TransportError,
)
from kvbridge.testing.poller import Poller
from kvbridge.transport import (
    Fault,
    Faults,
    FaultyTransport,
    Finished,
    Handle,
    Peer,
    RecordingTransport,
    State,
    TransportConfig,
    open_transport,
)
from kvbridge.transport.local import LocalTransport
from tests.conformance.peer_process import Agent, Arena, Pieces, pieces_at

KIB = 1 << 10
NBYTES = 64 * KIB


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Pair:
    """A wrapped agent, and a plain one whose memory it uses, in one process."""

    def __init__(self, wrapped: FaultyTransport | RecordingTransport, clock: Clock) -> None:
        self.clock = clock
        self.wrapped = wrapped
        self.poller = Poller(wrapped, knows_all=False)
        self.memory = Arena(NBYTES)
        self.there = Agent("local", NBYTES)
        wrapped.register([self.memory.region])
        self.memory.fill(1, NBYTES)
        self.there.arena.fill(2, NBYTES)

    def add(self) -> Peer:
        info, regions = self.there.address_card
        return self.wrapped.add_peer(info, regions, timeout_s=20)

    def read(self, peer: Peer, nbytes: int = KIB, notification: bytes = b"") -> Handle:
        return self.read_pieces(peer, [(0, nbytes)], notification)

    def read_pieces(self, peer: Peer, pieces: Pieces, notification: bytes = b"") -> Handle:
        local = pieces_at(self.memory.address, pieces)
        remote = pieces_at(self.there.arena.address, pieces)
        return self.wrapped.submit("read", peer, local, remote, notification)

    def wait(self, handle: Handle) -> Finished:
        return self.poller.wait(handle, 20)

    def poll_for(self, seconds: float = 0.2) -> list[Finished]:
        """Return everything that ends within that time of the real clock."""
        ended: list[Finished] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            polled = self.wrapped.poll()
            ended += polled.finished
            self.poller.notifications += polled.notifications
            time.sleep(0.001)
        return ended

    def send_here(self, payloads: list[bytes]) -> list[bytes]:
        """Notify the wrapped agent; return what it hears of."""
        peer = self.there.add((self.wrapped.agent_info(), (self.memory.region,)))
        for payload in payloads:
            self.there.transport.notify(peer, payload)
        self.poll_for()
        heard, self.poller.notifications = self.poller.notifications, []
        return [payload for _, payload in heard]


@pytest.fixture
def make_pair(usable_transport: Callable[[str], object]) -> Iterator[Callable[..., Pair]]:
    usable_transport("local")
    pairs: list[Pair] = []

    def make(faults: Faults | None = None, kind: type[Any] = FaultyTransport, **more: Any) -> Pair:
        clock = Clock()
        if kind is FaultyTransport:
            more["sleep"] = clock.sleep
        wrapped = kind(LocalTransport(), clock=clock, **more)
        wrapped.open(faults)
        pairs.append(Pair(wrapped, clock))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.wrapped.close()
        pair.there.close()


def test_without_faults_nothing_changes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    peer = pair.add()
    handle = pair.read(peer, NBYTES, b"taken")
    assert pair.wait(handle).state is State.DONE
    assert (pair.memory.data == pair.there.arena.data).all()
    assert [n.payload for n in pair.there.wait_notifications(1)] == [b"taken"]
    assert pair.wrapped.name == "local"
    assert pair.wrapped.capabilities == LocalTransport().capabilities


# ---------------------------------------------------------------- faults of operations


def test_a_failed_operation_is_dirty_quiet_and_silent(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="fail", at=(1,)),)))
    peer = pair.add()
    handles = [pair.read(peer, KIB, b"n%d" % i) for i in range(3)]
    assert [handle.nbytes for handle in handles] == [KIB] * 3
    states = [pair.wait(handle).state for handle in handles]
    assert states == [State.DONE, State.FAILED, State.DONE]
    assert "asked for" in pair.poller.finished[handles[1]].reason
    assert [n.payload for n in pair.there.wait_notifications(3, 0.2)] == [b"n0", b"n2"]
    assert not pair.wrapped.memory.busy


def test_a_failed_operation_moves_half(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="fail", share=1),)))
    before = pair.memory.data.copy()
    assert pair.wait(pair.read(pair.add())).state is State.FAILED
    half = KIB // 2
    assert (pair.memory.data[:half] == pair.there.arena.data[:half]).all()
    assert (pair.memory.data[half:] == before[half:]).all()


def test_a_failed_operation_can_be_abandoned(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="fail", share=1),)))
    handle = pair.read(pair.add())
    pair.wrapped.abandon(handle)
    assert pair.wait(handle).state is State.FAILED
    pair.wrapped.abandon(handle)


def test_a_delayed_operation_is_busy_until_it_is_reported(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="delay", at=(0,), delay_s=5),)))
    peer = pair.add()
    late, prompt = pair.read(peer), pair.read(peer)
    assert [end.handle for end in pair.poll_for()] == [prompt]
    with pytest.raises(MemoryBusyError):
        pair.wrapped.unregister([pair.memory.region])
    pair.clock.now_s = 5.0
    assert [(end.handle, end.state) for end in pair.poll_for(0.01)] == [(late, State.DONE)]
    pair.wrapped.unregister([pair.memory.region])


def test_what_is_late_is_not_slept_over(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="delay", at=(0,), delay_s=5),)))
    late = pair.read(pair.add())
    assert pair.poll_for() == []
    start = time.monotonic()
    pair.wrapped.wait(20)  # nobody tells it that it is time
    assert time.monotonic() - start < 5
    pair.clock.now_s = 5.0
    assert [end.handle for end in pair.wrapped.poll().finished] == [late]
    with pytest.raises(ConfigError, match=r"timeout_s of wait\(\)"):
        pair.wrapped.wait(-1)


def test_a_recorder_waits_as_what_it_records(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(kind=RecordingTransport)
    start = time.monotonic()
    pair.wrapped.wait(0.2)
    assert time.monotonic() - start >= 0.19
    pair.read(pair.add())
    start = time.monotonic()
    pair.wrapped.wait(20)
    assert time.monotonic() - start < 5
    assert len(pair.wrapped.poll().finished) == 1


def test_reordered_operations(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="reorder", at=(0, 3), delay_s=5),)))
    peer = pair.add()
    handles = [pair.read(peer) for _ in range(4)]
    first, second, third, fourth = handles
    assert [end.handle for end in pair.poll_for()] == [second, first, third]
    pair.clock.now_s = 5.0
    assert [end.handle for end in pair.poll_for(0.01)] == [fourth]


def test_a_duplicate_is_reported_twice(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="duplicate", at=(0,)),)))
    handle = pair.read(pair.add())
    assert [end.handle for end in pair.poll_for()] == [handle, handle]
    assert not pair.wrapped.memory.busy


def test_a_dropped_operation_ends_with_its_peer(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Faults(operations=(Fault(what="drop", share=1),)))
    peer, other = pair.add(), pair.add()
    lost, kept = pair.read(peer), pair.read(other)
    assert pair.poll_for() == []
    assert pair.wrapped.memory.busy == (pair.memory.region,)
    pair.wrapped.drop_peer(peer)
    assert [(e.handle, e.state) for e in pair.poll_for(0.05)] == [(lost, State.FAILED)]
    late = pair.read(other, NBYTES)
    pair.wrapped.drop_peer(other)  # one has ended inside, the other perhaps not
    ends = pair.poll_for()
    assert {e.handle for e in ends} == {kept, late}
    assert {e.state for e in ends} == {State.FAILED}
    assert not pair.wrapped.memory.busy


def test_close_leaves_nothing_pending(make_pair: Callable[..., Pair]) -> None:
    kinds = (Fault(what="drop", at=(0,)), Fault(what="delay", at=(1,), delay_s=60))
    pair = make_pair(Faults(operations=kinds))
    peer = pair.add()
    dropped, delayed = pair.read(peer), pair.read(peer)
    pair.poll_for(0.1)
    assert pair.wrapped.close() == ()
    ends = {end.handle: end.state for end in pair.wrapped.poll().finished}
    assert ends == {dropped: State.FAILED, delayed: State.DONE}
    assert pair.wrapped.close() == ()


def test_what_is_refused_without_faults_is_refused_with_them(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(Faults(operations=(Fault(what="fail", share=1),)))
    peer = pair.add()
    with pytest.raises(OutOfBoundsError):
        pair.read(peer, NBYTES + 1)
    pair.wrapped.drop_peer(peer)
    with pytest.raises(PeerLostError):
        pair.read(peer)
    assert not pair.wrapped.memory.busy


# ---------------------------------------------------------------- notifications and peering


@pytest.mark.parametrize(
    ("fault", "heard", "later"),
    [
        (Fault(what="drop", at=(1,)), [b"0", b"2", b"3"], []),
        (Fault(what="duplicate", at=(1,)), [b"0", b"1", b"1", b"2", b"3"], []),
        (Fault(what="reorder", at=(1,)), [b"0", b"2", b"1", b"3"], []),
        (Fault(what="delay", at=(1,), delay_s=3), [b"0", b"2", b"3"], [b"1"]),
    ],
    ids=lambda value: value.what if isinstance(value, Fault) else "",
)
def test_faults_of_notifications(
    make_pair: Callable[..., Pair], fault: Fault, heard: list[bytes], later: list[bytes]
) -> None:
    pair = make_pair(Faults(notifications=(fault,)))
    assert pair.send_here([b"0", b"1", b"2", b"3"]) == heard
    pair.clock.now_s = 3.0
    assert [n.payload for n in pair.wrapped.poll().notifications] == later


def test_faults_of_peering(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(
        Faults(
            peering=(
                Fault(what="fail", at=(0,)),
                Fault(what="drop", at=(1,)),
                Fault(what="delay", at=(2,), delay_s=7),
                Fault(what="delay", at=(3,), delay_s=70),
            )
        )
    )
    with pytest.raises(PeerLostError, match="cannot be reached"):
        pair.add()
    with pytest.raises(PeerLostError, match="did not answer in 20 s"):
        pair.add()
    assert pair.clock.now_s == 20
    peer = pair.add()
    assert pair.clock.now_s == 27
    with pytest.raises(PeerLostError, match="did not answer"):
        pair.add()
    assert pair.clock.now_s == 47
    assert pair.wait(pair.read(peer)).state is State.DONE


def test_equal_seeds_make_equal_faults(make_pair: Callable[..., Pair]) -> None:
    def states(seed: int) -> list[State]:
        pair = make_pair(Faults(operations=(Fault(what="fail", share=0.3),), seed=seed))
        peer = pair.add()
        handles = [pair.read(peer, 8) for _ in range(100)]
        return [pair.wait(handle).state for handle in handles]

    first = states(1)
    assert first == states(1)
    assert first != states(2)
    assert 10 < first.count(State.FAILED) < 60


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"notifications": [{"what": "fail"}]}, "notifications cannot 'fail'"),
        ({"peering": [{"what": "reorder"}]}, "peering cannot 'reorder'"),
        ({"operations": [{"what": "explode"}]}, "explode"),
        ({"operations": [{"what": "fail", "share": 2}]}, "share"),
        ({"operations": [{"what": "fail", "share": 0.6}] * 2}, "more than 1"),
        ({"operation": []}, "did you mean 'operations'"),
    ],
)
def test_impossible_faults_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_transport({"transport": "faulty", "options": options})


# ---------------------------------------------------------------- recording, and stacks


def test_a_record_of_everything(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(kind=RecordingTransport)
    recorder = pair.wrapped
    assert isinstance(recorder, RecordingTransport)
    peer = pair.add()
    handle = pair.read_pieces(peer, [(0, 10), (20, 5)], b"tied")
    [pending] = [r for r in recorder.records if r.state is State.PENDING]
    assert (pending.event, pending.nbytes, pending.pieces) == ("read", 15, 2)
    pair.clock.now_s = 2.0
    pair.wait(handle)
    pair.wrapped.notify(peer, b"alone")
    with pytest.raises(OutOfBoundsError):
        pair.read(peer, NBYTES + 1)
    assert pair.send_here([b"there"]) == [b"there"]
    pair.wrapped.drop_peer(peer)
    records = recorder.records
    assert [r.event for r in records] == [
        *("add_peer", "read", "notify", "read", "received", "drop_peer")
    ]
    assert {r.peer for r in records} == {peer.agent}
    read, alone, refused = records[1:4]
    assert (read.notification, read.state, read.started_s, read.seconds) == (
        *(b"tied", State.DONE, 0.0, 2.0),
    )
    assert alone.notification == b"alone"
    assert refused.state is State.FAILED
    assert refused.reason.startswith("OutOfBoundsError: descriptor 0")
    [reads] = [total for total in recorder.summary() if total.event == "read"]
    assert (reads.count, reads.failed, reads.pending, reads.pieces) == (2, 1, 0, 3)
    assert f"read      {peer.agent}: 2 (1 failed, 0 pending)" in str(reads)


def test_the_record_is_bounded(make_pair: Callable[..., Pair]) -> None:
    recorder = RecordingTransport(LocalTransport())
    recorder.open({"records_max": 3})
    pair = Pair(recorder, Clock())
    peer = pair.add()
    for i in range(5):
        recorder.notify(peer, b"%d" % i)
    assert [r.notification for r in recorder.records] == [b"2", b"3", b"4"]
    assert recorder.forgotten == 3
    recorder.clear()
    assert recorder.records == ()
    recorder.close()
    pair.there.close()


def test_wrappers_stack(make_pair: Callable[..., Pair]) -> None:
    inner = FaultyTransport(LocalTransport())
    recorder = RecordingTransport(inner)
    recorder.open({"inner": {"options": {"operations": [{"what": "duplicate", "share": 1}]}}})
    pair = Pair(recorder, Clock())
    handle = pair.read(pair.add())
    assert [end.handle for end in pair.poll_for()] == [handle, handle]
    assert "not pending" in recorder.records[-1].reason
    recorder.close()
    pair.there.close()


def test_wrappers_in_a_configuration() -> None:
    faulty = {"transport": "faulty", "options": {"operations": [{"what": "fail", "at": [0]}]}}
    agent = Agent("recording", NBYTES, {"inner": faulty})
    there = Agent("local", NBYTES)
    peer = agent.add(there.address_card)
    end = agent.wait(agent.submit("read", peer, [(0, 10)], [(0, 10)]))
    assert end.state is State.FAILED
    assert isinstance(agent.transport, RecordingTransport)
    assert [r.state for r in agent.transport.records if r.event == "read"] == [State.FAILED]
    agent.close()
    there.close()


@pytest.mark.parametrize("kind", [FaultyTransport, RecordingTransport])
def test_before_it_is_open(kind: type[FaultyTransport | RecordingTransport]) -> None:
    for fresh in (kind(), kind(LocalTransport())):
        for is_so in ("not open", "closed"):
            with pytest.raises(TransportError, match=is_so):
                fresh.agent_info()
            with pytest.raises(TransportError, match=is_so):
                fresh.add_peer(b"", [], timeout_s=1)
            assert fresh.close() == ()
        with pytest.raises(TransportError, match="closed"):
            fresh.open()


@pytest.mark.parametrize("kind", [FaultyTransport, RecordingTransport])
def test_it_opens_once(kind: type[FaultyTransport | RecordingTransport]) -> None:
    wrapped = kind()
    config: TransportConfig | None = None
    wrapped.open(config)
    with pytest.raises(TransportError, match="opened before"):
        wrapped.open(config)
    assert not wrapped.close()
    with pytest.raises(TransportError):
        wrapped.open(config)
