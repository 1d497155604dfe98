"""Staged loads, portion by portion: each waits for staging memory, comes, and is arranged.

A portion reserves all the staging that it needs at once, or none. Then it is read into that, or
another engine is asked to write it there; its cells are put in their places beside the engine's
steps, and the staging is given back: it waits for no other portion, not even for one of its own
load. Portions begin in the order in which their loads were asked for, so the first one that waits
gets what those before it give back, and all get their turn. A load that fails takes its portions
out of the line.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import KVBridgeError
from kvbridge.model import RankCache
from kvbridge.model.arrays import bytes_at
from kvbridge.plan import BlockTable, Rearrangement, StagedPortion
from kvbridge.session.beside import Beside
from kvbridge.session.causes import cause_of
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.operations import Operations
from kvbridge.session.session import Session
from kvbridge.session.staging import Staging
from kvbridge.session.transfer import Transfer
from kvbridge.transport import State

SHARE = 4
"""A portion takes at most this part of the staging, unless it is a single page: so some are read
while others are arranged, and one load leaves room for the next."""


class Portion(Protocol):
    """A part of a load that is staged and put in its place by itself."""

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory that it takes; 0 if it needs none."""

    def begin(self, transfer: Transfer, address: int) -> frozenset[Hashable]:
        """Let it come; what is refused fails the transfer.

        Args:
            transfer: Whose it is.
            address: Where its staging is.

        Returns:
            What it waits for, of the transfer's ``pending``.
        """

    def scatter(self, address: int) -> Rearrangement:
        """Return what puts it in its place once it is in staging memory; from any thread."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A portion that is read."""

    operations: Operations
    pages: StagedPortion

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory that it takes."""
        return self.pages.staging_nbytes

    def begin(self, transfer: Transfer, address: int) -> frozenset[Hashable]:
        """Read it."""
        handles: frozenset[Hashable] = frozenset()
        for batch in self.pages.batches(address):
            transfer.reads(batch)
            handles |= self.operations.submit("read", transfer.session, transfer, batch)
            if transfer.reason:
                break
        return handles

    def scatter(self, address: int) -> Rearrangement:
        """Return what puts it in its place."""
        return self.pages.scatter(address)


@dataclass(slots=True, eq=False)
class _Load:
    """What of a transfer waits for staging; in its ``pending`` for as long as there is any."""

    transfer: Transfer
    waiting: deque[Portion]
    count: int


@dataclass(slots=True, eq=False)
class _Coming:
    """A transfer of which is being found out what its portions are; in its ``pending``."""

    transfer: Transfer
    portions: "Future[Sequence[Portion]]"


@dataclass(slots=True, eq=False)
class _Begun:
    """A portion that comes or is arranged; in its transfer's ``pending`` until it touches nothing.

    Attributes:
        transfer: Whose it is.
        portion: What it is.
        address: Where its staging is; None if it needs none.
        awaited: What brings it, each in the transfer's ``pending`` until it is quiet.
        arranging: The end of the work of putting it in its place; None before that has begun.
    """

    transfer: Transfer
    portion: Portion
    address: int | None
    awaited: frozenset[Hashable] = frozenset()
    arranging: "Future[None] | None" = None

    @property
    def is_here(self) -> bool:
        """Whether all that brings it is quiet."""
        return self.awaited.isdisjoint(self.transfer.pending)


class Portions:
    """The staged loads of one rank."""

    def __init__(
        self,
        local: LocalRank,
        operations: Operations,
        beside: Beside,
        staging: Staging,
        clock: Callable[[], float],
    ) -> None:
        """Take what reads, what works beside, the memory, and the agent's clock."""
        self._local, self._operations = local, operations
        self._beside, self._staging, self._clock = beside, staging, clock
        self._coming: list[_Coming] = []
        self._waiting: deque[_Load] = deque()
        self._begun: list[_Begun] = []

    def __len__(self) -> int:
        """How much there is that waits, comes or is arranged."""
        return len(self._coming) + len(self._waiting) + len(self._begun)

    @property
    def quarantined(self) -> int:
        """Portions that are put in their places though nobody waits for them; from any thread."""
        return sum(
            each.arranging is not None and each.transfer.state is not State.PENDING
            for each in list(self._begun)
        )

    def are_with(self, session: Session) -> bool:
        """Whether one is of a remote engine."""
        return any(transfer.session is session for transfer in self._transfers())

    def are_possible(self, session: Session) -> bool:
        """Whether what is read from a remote engine will be staged."""
        return session.is_staged and self._staging.is_possible

    def of(
        self,
        session: Session,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        start_token: int,
        end_token: int,
    ) -> Sequence[Portion] | None:
        """Return the portions of a request that is read; None if it is read directly.

        Raises:
            BlockTableError: The tables do not cover the range.
        """
        if not (self.are_possible(session) and self._staging.open()):
            return None
        pages = session.plan.staged_portions(
            local_tables,
            remote_tables,
            start_token=start_token,
            end_token=end_token,
            most_nbytes=self._staging.nbytes,
            aim_nbytes=self.aim_nbytes,
        )
        return [_Read(self._operations, each) for each in pages]

    @property
    def aim_nbytes(self) -> int:
        """How much staging a portion should take at most."""
        return -(-self._staging.nbytes // SHARE)

    def start_later(
        self, transfer: Transfer, find: Callable[[], Sequence[Portion]], what: str
    ) -> None:
        """Start a transfer once it is known what its portions are, which takes a while.

        Args:
            transfer: The transfer.
            find: Finds that out, beside the steps; what it raises fails the transfer.
            what: What it does, for the error message.
        """
        coming = _Coming(transfer, self._beside.start(find, what))
        transfer.pending.add(coming)
        self._coming.append(coming)

    def start(self, transfer: Transfer, portions: Sequence[Portion]) -> None:
        """Let a transfer come in portions; those that need no staging begin at once."""
        waiting = [portion for portion in portions if portion.staging_nbytes]
        for portion in portions:
            if not portion.staging_nbytes:
                self._begin(transfer, portion, None)
        if waiting:
            load = _Load(transfer, deque(waiting), len(waiting))
            transfer.pending.add(load)
            self._waiting.append(load)
            self._go_on()

    def poll(self) -> None:
        """Arrange what is here, give back what is done, and begin what there is room for."""
        for coming in [each for each in self._coming if each.portions.done()]:
            self._come(coming)
        for begun in list(self._begun):
            if self._is_over(begun):
                self._end(begun)
        for load in [each for each in self._waiting if each.transfer.reason]:
            self._leave(load)
        self._go_on()
        missing = {each.transfer for each in self._waiting}
        missing |= {each.transfer for each in self._begun if not each.is_here}
        for begun in self._begun:
            begun.transfer.is_arranging = begun.transfer not in missing

    def give_up(self, transfer: Transfer) -> str:
        """Begin nothing more of a transfer that is late; return what it waited for, in words.

        What is coming or being arranged ends by itself.
        """
        words = []
        for coming in [each for each in self._coming if each.transfer is transfer]:
            words.append("what it consists of was not known")
            self._forget(coming)
        for load in [each for each in self._waiting if each.transfer is transfer]:
            words.append(
                f"{len(load.waiting)} of {load.count} portions had not got their turn in "
                f"{self._staging.nbytes} bytes of staging memory (staging_nbytes)"
            )
            self._leave(load)
        for begun in [each for each in self._begun if each.transfer is transfer]:
            if begun.arranging is not None:
                words.append("what had come was not in its place")
                if begun.arranging.cancel():
                    self._end(begun)
        return " and ".join(dict.fromkeys(words))

    def close(self) -> None:
        """Fail what is not in its place: nothing will be put there any more."""
        for transfer in self._transfers():
            transfer.fail("the reader was shut down", "shutdown")

    def _transfers(self) -> Iterator[Transfer]:
        """Yield whose portions there are, perhaps more than once."""
        yield from (coming.transfer for coming in self._coming)
        yield from (load.transfer for load in self._waiting)
        yield from (begun.transfer for begun in self._begun)

    def _come(self, coming: _Coming) -> None:
        """Start a transfer whose portions are known now."""
        try:
            with suppress(CancelledError):  # by close(), which has failed it
                portions = coming.portions.result()
                if not coming.transfer.reason:
                    self.start(coming.transfer, portions)
        except KVBridgeError as error:
            coming.transfer.fail(str(error), cause_of(error))
        self._forget(coming)

    def _forget(self, coming: _Coming) -> None:
        self._coming.remove(coming)
        coming.transfer.pending.discard(coming)

    def _go_on(self) -> None:
        """Begin what there is room for, the first one first."""
        while self._waiting:
            load = self._waiting[0]
            if load.transfer.reason:  # what came before it was refused
                self._leave(load)
                continue
            address = self._staging.reserve(load.waiting[0].staging_nbytes)
            if address is None:
                return
            self._begin(load.transfer, load.waiting.popleft(), address)
            if not load.waiting:
                self._leave(load)

    def _leave(self, load: _Load) -> None:
        """Let a load wait no longer."""
        self._waiting.remove(load)
        load.transfer.pending.discard(load)

    def _begin(self, transfer: Transfer, portion: Portion, address: int | None) -> None:
        """Let a portion come; what is refused fails the transfer."""
        begun = _Begun(transfer, portion, address)
        transfer.pending.add(begun)
        self._begun.append(begun)
        begun.awaited = portion.begin(transfer, address or 0)

    def _is_over(self, begun: _Begun) -> bool:
        """Bring a portion forward; whether nothing touches its staging any more."""
        transfer, address = begun.transfer, begun.address
        if begun.arranging is not None:
            if not begun.arranging.done():
                return False
            try:
                with suppress(CancelledError):  # by close(), which has failed it
                    begun.arranging.result()
            except KVBridgeError as error:
                transfer.fail(str(error), cause_of(error))
            transfer.arranging_s = self._clock() - transfer.read_s  # that of the last one counts
            return True
        if not begun.is_here:
            return False
        if address is None or transfer.reason:
            return True
        transfer.read_s = self._clock()
        content, cache = self._staging.content, self._local.cache
        work = partial(_arrange, begun.portion, address, content, cache)
        begun.arranging = self._beside.start(work, "putting what has come in its place")
        return False

    def _end(self, begun: _Begun) -> None:
        """Give back a portion's staging."""
        self._begun.remove(begun)
        if begun.address is not None:
            self._staging.release(begun.address)
        begun.transfer.is_arranging = False
        begun.transfer.pending.discard(begun)


def _arrange(portion: Portion, address: int, content: NDArray[np.uint8], cache: RankCache) -> None:
    """Put the cells of a portion that has come in their places."""
    regions = [bytes_at(region.address, region.nbytes) for region in cache.regions]
    portion.scatter(address).apply([content], regions)
