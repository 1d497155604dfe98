"""Reads that the owner of the memory serves by writing.

On some paths a native read endangers the owner: a reader that is killed, or that uses an address
of yesterday, takes the owner's process with it. A write never does. There the reader asks, and
the owner checks what is asked for and writes it.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvbridge.errors import KVBridgeError, OutOfBoundsError, TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.base import State
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.memory import LocalMemory, RegionTable
from kvbridge.transport.served_wire import (
    DONE,
    FAILED,
    PING,
    READ,
    Answer,
    Introduction,
    Read,
    Side,
    raw,
    seal_notification,
)

logger = logging.getLogger(__name__)

# A READ of this many pieces takes 400 kB; what has more is asked for in several.
PIECES_MAX = 16_384
PING_EVERY_S = 0.2
# With more readers than this, those that are gone are looked for before another is admitted.
READERS_KEPT = 256

Ended = Callable[[State, str], object]
"""Is told once how an operation ended, and why where it failed."""


class Link(Protocol):
    """A remote agent as a driver knows it; hashed by identity."""

    @property
    def agent(self) -> str:
        """Its name, fresh at each of its starts."""

    @property
    def lost(self) -> str:
        """Why it cannot be used any more; empty while it can.

        That must hold for both directions: nothing more can arrive from there, but what is already
        on its way.
        """


LinkT = TypeVar("LinkT", bound=Link)


class Carrier(Protocol[LinkT]):
    """What a driver does for served reads, in the thread that uses :class:`ServedReads`."""

    def introduce(self) -> tuple[bytes, Sequence[Region]]:
        """Return what a peer needs to write here: agent info and registered regions."""

    def admit(self, sender: str, agent_info: bytes) -> LinkT:
        """Connect to an agent that asks.

        Raises:
            TransportError: The info is garbled, or not that of the sender.
            PeerLostError: It cannot be reached.
        """

    def send(self, link: LinkT, message: bytes) -> None:
        """Send a message.

        Raises:
            TransportError: It was not sent. Where the agent is gone, its ``lost`` says so.
        """

    def write(
        self, link: LinkT, local: Descriptors, remote: Descriptors, message: bytes, ended: Ended
    ) -> None:
        """Start to write, and send ``message`` once the bytes are visible there.

        ``ended`` is called once the memory of both sides is quiet, whether now or later. No
        pieces, or empty ones, are no error: the message is sent all the same.
        """


@dataclass(slots=True, eq=False)
class _Operation:
    """One read, however many questions it takes."""

    unanswered: int
    notification: bytes
    ended: Ended
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Owner(Generic[LinkT]):
    """An agent that has not answered everything yet, over one link."""

    link: LinkT
    ping_at: float
    asked: dict[int, _Operation] = field(default_factory=dict)
    lost_at: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Reader(Generic[LinkT]):
    introduction: bytes
    table: RegionTable
    link: LinkT


class ServedReads(Generic[LinkT]):
    """Both sides of served reads, of one agent. All calls come from one thread at a time."""

    def __init__(
        self,
        agent: str,
        carrier: Carrier[LinkT],
        memory: LocalMemory,
        memory_kinds: frozenset[str],
        *,
        settle_s: float,
    ) -> None:
        """Start with nothing asked.

        Args:
            agent: Name of this agent.
            carrier: Sends and writes.
            memory: What this agent has registered; pinned while it is being served.
            memory_kinds: Kinds of memory that can be written to.
            settle_s: How long after an owner's loss bytes of it may still arrive.
        """
        self._agent = agent
        self._carrier = carrier
        self._memory = memory
        self._memory_kinds = memory_kinds
        self._settle_s = settle_s
        self._ids = itertools.count(1)
        self._owners: dict[LinkT, _Owner[LinkT]] = {}
        self._asked: dict[int, _Owner[LinkT]] = {}
        self._readers: dict[str, _Reader[LinkT]] = {}

    @property
    def waiting(self) -> bool:
        """Whether an owner has something left to answer; then :meth:`tick` has to be called."""
        return bool(self._owners)

    def ask(
        self,
        link: LinkT,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
        ended: Ended,
    ) -> None:
        """Read a peer's memory; both lists have been checked and pair up.

        Without any pieces this asks whether the owner is there, and can reach this agent.

        Args:
            link: The owner.
            local: Where the bytes go.
            remote: Where they are.
            notification: Sent to the owner once they are here; empty sends none.
            ended: Called when no more bytes will come.
        """
        starts = range(0, max(len(local), 1), PIECES_MAX)
        operation = _Operation(len(starts), notification, ended)
        introduction = Introduction.of(*self._carrier.introduce()).encode()
        for start in starts:
            part = slice(start, start + PIECES_MAX)
            read = Read(
                next(self._ids),
                link.agent,
                introduction,
                raw(local.nbytes[part]),
                Side.of(remote, part),
                Side.of(local, part),
            )
            owner = self._owners.get(link) or _Owner(link, time.monotonic() + PING_EVERY_S)
            self._owners[link] = self._asked[read.id] = owner
            owner.asked[read.id] = operation
            try:
                self._carrier.send(link, READ + read.encode())
            except TransportError as error:  # never asked, so nothing of it will come
                self._end_part(owner, read.id, str(error))

    def receive(self, sender: str, message: bytes) -> None:
        """Handle a message that is no notification, whoever made it."""
        kind, payload = message[:1], message[1:]
        try:
            if kind == READ:
                self._serve(sender, Read.decode(payload))
            elif kind == DONE:
                self._answered(sender, Answer.decode(payload).id, "")
            elif kind == FAILED:
                answer = Answer.decode(payload)
                self._answered(sender, answer.id, answer.reason or "no reason was given")
            elif kind != PING:
                raise TransportError(f"a message of unknown kind {kind!r}")
        except TransportError as error:
            logger.warning("ignored what %s sent: %s", sender, error)

    def tick(self) -> None:
        """Look after the owners that have something left to answer."""
        now = time.monotonic()
        for owner in list(self._owners.values()):
            if not owner.link.lost and now >= owner.ping_at:
                owner.ping_at = now + PING_EVERY_S
                self._ping(owner.link)
            if not owner.link.lost:
                continue
            if owner.lost_at is None:
                owner.lost_at = now
            elif now >= owner.lost_at + self._settle_s:
                for part in list(owner.asked):
                    self._end_part(owner, part, owner.link.lost)

    def _ping(self, link: LinkT) -> None:
        try:
            self._carrier.send(link, PING)
        except TransportError as error:  # if it is gone, the link says so from now on
            logger.debug("cannot ping %s: %s", link.agent, error)

    # The reader's side.

    def _answered(self, sender: str, part: int, reason: str) -> None:
        owner = self._asked.get(part)
        if owner is None or owner.link.agent != sender:
            raise TransportError(f"an answer to question {part}, which it was not asked")
        self._end_part(owner, part, reason)

    def _end_part(self, owner: _Owner[LinkT], part: int, reason: str) -> None:
        del self._asked[part]
        operation = owner.asked.pop(part)
        if not owner.asked:
            del self._owners[owner.link]
        operation.reason = operation.reason or reason
        operation.unanswered -= 1
        if operation.unanswered:
            return  # bytes of the other parts may still come
        if operation.reason:
            operation.ended(State.FAILED, operation.reason)
            return
        if operation.notification:
            try:
                self._carrier.send(owner.link, seal_notification(operation.notification))
            except TransportError as error:
                logger.debug("the notification after a read was lost: %s", error)
        operation.ended(State.DONE, "")

    # The owner's side.

    def _serve(self, sender: str, read: Read) -> None:
        reader = self._readers.get(sender)
        try:
            reader = self._admit(sender, read.introduction)
            source, target, pinned = self._check(reader, read)
        except KVBridgeError as error:
            if reader is None:  # there is no way to answer
                raise TransportError(f"a read that cannot be served: {error}") from error
            self._answer(reader.link, Answer(read.id, str(error)))
            return
        served = partial(self._served, reader.link, read.id, pinned)
        self._carrier.write(reader.link, source, target, Answer(read.id).message, served)

    def _check(
        self, reader: _Reader[LinkT], read: Read
    ) -> tuple[Descriptors, Descriptors, frozenset[Region]]:
        """Check all that a READ asks for, and pin this agent's memory for it."""
        if read.owner != self._agent:
            raise TransportError(
                f"agent {read.owner} does not exist any more; {self._agent} is in its place"
            )
        source = read.source.descriptors(read.nbytes)
        target = read.target.descriptors(read.nbytes)
        if target.memory_kind not in self._memory_kinds:
            raise OutOfBoundsError(
                f"cannot write to {target.memory_kind!r} memory, only to "
                f"{', '.join(sorted(self._memory_kinds))}"
            )
        reader.table.locate(target, f"the reader, {reader.link.agent}")
        return source, target, self._memory.pin(source)

    def _served(
        self, link: LinkT, part: int, pinned: frozenset[Region], state: State, reason: str
    ) -> None:
        self._memory.unpin(pinned)
        if state is State.FAILED:
            self._answer(link, Answer(part, reason or "the write failed"))

    def _answer(self, link: LinkT, answer: Answer) -> None:
        try:
            self._carrier.send(link, answer.message)
        except TransportError as error:
            logger.debug("cannot answer %s: %s", link.agent, error)

    def _admit(self, sender: str, introduction: bytes) -> _Reader[LinkT]:
        known = self._readers.get(sender)
        if known and known.introduction == introduction and not known.link.lost:
            return known
        told = Introduction.decode(introduction)
        table = RegionTable(Region(*row) for row in told.regions)
        if len(self._readers) >= READERS_KEPT:
            self._forget_lost_readers()
        reader = _Reader(introduction, table, self._carrier.admit(sender, told.agent_info))
        self._readers[sender] = reader
        return reader

    def _forget_lost_readers(self) -> None:
        for name, reader in list(self._readers.items()):
            self._ping(reader.link)
            if reader.link.lost:
                del self._readers[name]
