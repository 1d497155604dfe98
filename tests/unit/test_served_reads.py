"""Reads that the owner serves: what is asked, checked and answered, without any library."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.errors import MemoryBusyError, PeerLostError, TransportError
from kvbridge.transport import (
    Descriptors,
    Ended,
    LocalMemory,
    Region,
    ServedReads,
    State,
    open_notification,
    seal_notification,
)
from kvbridge.transport.served import PIECES_MAX, PING_EVERY_S, READERS_KEPT
from kvbridge.transport.served_wire import DONE, FAILED, READ, Answer, Introduction, Read, Side

NBYTES = 4096
SETTLE_S = 0.05


@dataclass(eq=False)
class Line:
    """A way to an agent of this process."""

    agent: str
    lost: str = ""


@dataclass(eq=False)
class Write:
    line: Line
    local: Descriptors
    remote: Descriptors
    message: bytes
    ended: Ended


@dataclass(eq=False)
class Party:
    """An agent whose messages and writes go where the test lets them."""

    name: str
    world: dict[str, "Party"]
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    writes: deque[Write] = field(default_factory=deque)
    ends: list[tuple[State, str]] = field(default_factory=list)
    sent: int = 0

    def __post_init__(self) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(NBYTES, np.uint8)
        self.region = Region(int(self.bytes.ctypes.data), NBYTES)
        self.memory = LocalMemory()
        self.memory.add([self.region])
        self.served: ServedReads[Line] = ServedReads(
            self.name, self, self.memory, frozenset({"dram"}), settle_s=SETTLE_S
        )
        self.world[self.name] = self

    def introduce(self) -> tuple[bytes, tuple[Region, ...]]:
        return self.name.encode(), self.memory.regions

    def admit(self, sender: str, agent_info: bytes) -> Line:
        if agent_info.decode(errors="replace") != sender:
            raise TransportError("not that of the sender")
        return Line(sender)

    def send(self, link: Line, message: bytes) -> None:
        self.sent += 1
        if link.agent not in self.world:
            link.lost = "gone"
        if link.lost:
            raise PeerLostError(link.lost)
        self.world[link.agent].inbox.append((self.name, message))

    def write(
        self, link: Line, local: Descriptors, remote: Descriptors, message: bytes, ended: Ended
    ) -> None:
        self.writes.append(Write(link, local, remote, message, ended))

    def pieces(self, offsets: object, nbytes: object) -> Descriptors:
        at = np.asarray(offsets, np.uint64) + np.uint64(self.region.address)
        return Descriptors(at, np.broadcast_to(np.asarray(nbytes, np.uint64), at.shape))

    def ask(self, link: Line, local: Descriptors, remote: Descriptors, note: bytes = b"") -> None:
        self.served.ask(link, local, remote, note, lambda *end: self.ends.append(end))

    def receive(self) -> None:
        while self.inbox:
            sender, message = self.inbox.popleft()
            if open_notification(message) is None:
                self.served.receive(sender, message)
            else:
                self.inbox.append((sender, message))
                return

    def carry_out(self, write: Write) -> None:
        other = self.world[write.line.agent]
        for source, target, nbytes in zip(
            write.local.address, write.remote.address, write.local.nbytes, strict=True
        ):
            start, to, n = (
                int(source) - self.region.address,
                int(target) - other.region.address,
                int(nbytes),
            )
            assert min(start, to) >= 0
            assert max(start, to) + n <= NBYTES
            other.bytes[to : to + n] = self.bytes[start : start + n]
        self.send(write.line, write.message)
        write.ended(State.DONE, "")


@pytest.fixture
def world() -> dict[str, Party]:
    return {}


@pytest.fixture
def reader(world: dict[str, Party]) -> Party:
    return Party("reader", world)


@pytest.fixture
def owner(world: dict[str, Party]) -> Party:
    party = Party("owner", world)
    party.bytes[:] = np.arange(NBYTES) % 251
    return party


def answers(party: Party) -> list[tuple[bytes, Answer]]:
    found = [(m[:1], Answer.decode(m[1:])) for _, m in party.inbox]
    party.inbox.clear()
    return found


# ------------------------------------------------------------------------------ as it should


def test_bytes_come_first_then_the_answer_then_the_notification(
    reader: Party, owner: Party
) -> None:
    pieces = [0, 100, 300], [7, 0, 11]
    reader.ask(Line("owner"), reader.pieces([5, 50, 60], pieces[1]), owner.pieces(*pieces), b"hi")
    owner.receive()
    assert owner.memory.busy == (owner.region,)
    with pytest.raises(MemoryBusyError):
        owner.memory.remove([owner.region])
    owner.carry_out(owner.writes.popleft())
    owner.memory.remove([owner.region])
    assert (reader.ends, list(owner.inbox)) == ([], [])
    reader.receive()
    assert reader.ends == [(State.DONE, "")]
    assert list(owner.inbox) == [("reader", seal_notification(b"hi"))]
    assert (reader.bytes[5:12] == owner.bytes[:7]).all()
    assert (reader.bytes[60:71] == owner.bytes[300:311]).all()
    assert reader.bytes.nonzero()[0].size <= 7 + 11
    assert not reader.served.waiting


def test_without_pieces_it_is_a_question_whether_the_owner_is_there(
    reader: Party, owner: Party
) -> None:
    reader.ask(Line("owner"), reader.pieces([], []), owner.pieces([], []))
    owner.receive()
    owner.carry_out(owner.writes.popleft())
    reader.receive()
    assert reader.ends == [(State.DONE, "")]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("failing", [None, 0, 2])
def test_many_pieces_take_several_questions_and_end_with_the_last_answer(
    reader: Party, owner: Party, backwards: bool, failing: int | None
) -> None:
    count = 2 * PIECES_MAX + 3
    offsets = np.arange(count) % NBYTES
    reader.ask(Line("owner"), reader.pieces(offsets, 1), owner.pieces(offsets, 1), b"all")
    assert len(owner.inbox) == 3
    owner.receive()
    assert sum(len(write.local) for write in owner.writes) == count
    writes = list(enumerate(owner.writes))
    for number, write in reversed(writes) if backwards else writes:
        assert reader.ends == []
        if number == failing:
            write.ended(State.FAILED, "the wire broke")
        else:
            owner.carry_out(write)
        reader.receive()
    expected = (State.DONE, "") if failing is None else (State.FAILED, "the wire broke")
    assert reader.ends == [expected]
    assert len(owner.inbox) == (failing is None)
    assert owner.memory.busy == ()


def test_a_message_is_a_notification_or_is_not() -> None:
    for payload in (b"", b"\0", b"\x01READ", bytes(range(256))):
        assert open_notification(seal_notification(payload)) == payload
    assert open_notification(b"") is None
    assert open_notification(READ) is None


# -------------------------------------------------------------------------- what is not right


def question(reader: Party, owner: Party, changes: dict[str, Any] | None = None) -> Read:
    """Return a sound question, but for the changes."""
    source, target = owner.pieces([0, 8], [4, 4]), reader.pieces([0, 8], [4, 4])
    everything = slice(None)
    values: dict[str, Any] = {
        "id": 77,
        "owner": "owner",
        "introduction": Introduction.of(*reader.introduce()).encode(),
        "nbytes": source.nbytes.tobytes(),
        "source": Side.of(source, everything),
        "target": Side.of(target, everything),
    }
    return Read(**{**values, **(changes or {})})


def side(address: list[int], memory_kind: str = "dram", device: int = 0) -> Side:
    return Side(np.array(address, np.uint64).tobytes(), memory_kind, device)


def nbytes(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


TOP = (1 << 64) - 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"owner": "somebody else"}, "does not exist any more"),
        ({"nbytes": nbytes(4)}, "2 addresses but 1 lengths"),
        ({"nbytes": nbytes(4, NBYTES)}, "outside the 1 registered regions"),
        ({"nbytes": nbytes(4, TOP)}, "outside the 1 registered regions"),
        ({"nbytes": b"12345678901"}, "11 bytes are no list"),
        ({"source": side([0, TOP])}, "regions of this agent"),
        ({"target": side([0, TOP])}, "regions of the reader"),
        ({"source": side([4096])}, "1 addresses but 2 lengths"),
        ({"source": side([1, 2], "cuda")}, "regions of this agent"),
        ({"target": side([1, 2], "cuda")}, "cannot write to 'cuda' memory"),
        ({"target": side([1, 2], device=1)}, "regions of the reader"),
        ({"introduction": b"\xc1"}, "garbled Introduction"),
        ({"introduction": Introduction(b"reader", ((0, 0, "dram", 0),)).encode()}, "no range"),
        ({"introduction": Introduction(b"somebody", ()).encode()}, "not that of the sender"),
    ],
)
def test_a_bad_question_is_refused_and_moves_nothing(
    reader: Party, owner: Party, changes: dict[str, object], reason: str
) -> None:
    owner.served.receive("reader", READ + question(reader, owner).encode())
    owner.writes.clear()
    owner.served.receive("reader", READ + question(reader, owner, changes).encode())
    assert not owner.writes
    ((kind, answer),) = answers(reader)
    assert (kind, answer.id) == (FAILED, 77)
    assert reason in answer.reason


def test_a_stranger_that_cannot_be_answered_is_ignored(
    reader: Party, owner: Party, caplog: pytest.LogCaptureFixture
) -> None:
    bad = question(reader, owner, {"introduction": b"\xc1"})
    owner.served.receive("reader", READ + bad.encode())
    assert not owner.writes
    assert not reader.inbox
    assert "ignored what reader sent" in caplog.text


@given(
    st.data(),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1),
)
def test_no_garbled_question_reaches_memory_that_is_not_registered(
    data: st.DataObject, flips: list[tuple[float, int]]
) -> None:
    world: dict[str, Party] = {}
    reader, owner = Party("reader", world), Party("owner", world)
    message = bytearray(READ + question(reader, owner).encode())
    for at, change in flips:
        message[int(at * len(message))] ^= change
    cut = data.draw(st.integers(0, len(message)))
    for garbled in (bytes(message), bytes(message[:cut])):
        if open_notification(garbled) is None:
            owner.served.receive("reader", garbled)
    for write in owner.writes:
        assert (write.local.address >= owner.region.address).all()
        assert (write.local.address + write.local.nbytes <= owner.region.end).all()
        assert (write.local.nbytes == write.remote.nbytes).all()


def test_only_the_one_that_was_asked_can_answer(
    reader: Party, owner: Party, caplog: pytest.LogCaptureFixture
) -> None:
    reader.ask(Line("owner"), reader.pieces([0], [4]), owner.pieces([0], [4]))
    part = Read.decode(owner.inbox[0][1][1:]).id
    for sender, message in [
        ("somebody", DONE + Answer(part).encode()),
        ("owner", DONE + Answer(part + 1).encode()),
        ("owner", FAILED + Answer(part + 1, "no").encode()),
    ]:
        reader.served.receive(sender, message)
        assert "which it was not asked" in caplog.text
        caplog.clear()
    assert reader.ends == []
    reader.served.receive("owner", FAILED + Answer(part).encode())  # a failure without a reason
    assert [state for state, _ in reader.ends] == [State.FAILED]


# ----------------------------------------------------------------------------------- losses


def test_a_lost_owner_is_noticed_by_asking_and_given_time_to_become_quiet(
    reader: Party, owner: Party, world: dict[str, Party]
) -> None:
    line = Line("owner")
    reader.ask(line, reader.pieces([0], [4]), owner.pieces([0], [4]))
    reader.ask(line, reader.pieces([8], [4]), owner.pieces([8], [4]))
    owner.receive()
    del world["owner"]
    deadline = time.monotonic() + 5
    while not line.lost:
        reader.served.tick()
        assert time.monotonic() < deadline
    reader.served.tick()
    lost_at = time.monotonic()
    owner.carry_out(owner.writes.popleft())  # bytes and answer were on their way
    reader.receive()
    assert reader.ends == [(State.DONE, "")]
    while reader.served.waiting:
        reader.served.tick()
        assert time.monotonic() < deadline
    assert reader.ends[1:] == [(State.FAILED, "gone")]
    assert time.monotonic() - lost_at >= SETTLE_S * 0.9


def test_an_owner_that_takes_its_time_is_not_flooded(reader: Party, owner: Party) -> None:
    reader.ask(Line("owner"), reader.pieces([0], [4]), owner.pieces([0], [4]))
    end = time.monotonic() + 1.5 * PING_EVERY_S
    while time.monotonic() < end:
        reader.served.tick()
    assert reader.sent == 1 + 1
    assert reader.ends == []


def test_an_owner_that_cannot_be_asked_fails_the_read(reader: Party, owner: Party) -> None:
    reader.ask(Line("owner", lost="gone"), reader.pieces([0], [4]), owner.pieces([0], [4]))
    assert reader.ends == [(State.FAILED, "gone")]
    assert not reader.served.waiting


def test_a_lost_reader_lets_the_owner_go_on(
    reader: Party, owner: Party, world: dict[str, Party]
) -> None:
    reader.ask(Line("owner"), reader.pieces([0], [4]), owner.pieces([0], [4]))
    owner.receive()
    del world["reader"]
    owner.writes.popleft().ended(State.FAILED, "the reader is gone")
    assert owner.memory.busy == ()


def test_readers_that_are_gone_are_forgotten(owner: Party, world: dict[str, Party]) -> None:
    for number in range(2 * READERS_KEPT):
        party = Party(f"reader {number}", world)
        party.ask(Line("owner"), party.pieces([0], [4]), owner.pieces([0], [4]))
        owner.receive()
        owner.carry_out(owner.writes.popleft())
        del world[party.name]
    assert len(owner.served._readers) <= READERS_KEPT


def test_a_reader_that_registers_more_is_served_there_too(reader: Party, owner: Party) -> None:
    line = Line("owner")
    more = np.zeros(64, np.uint8)
    region = Region(int(more.ctypes.data), more.nbytes)
    target = Descriptors(np.array([region.address], np.uint64), np.array([4], np.uint64))
    reader.ask(line, target, owner.pieces([0], [4]))
    owner.receive()
    assert not owner.writes
    reader.receive()
    assert reader.ends[0][0] is State.FAILED
    reader.memory.add([region])
    reader.ask(line, target, owner.pieces([0], [4]))
    owner.receive()
    assert len(owner.writes) == 1
