"""Packed writes, on both sides: parts that are asked for, and parts that are packed and written.

A reader asks for a part only once it has staging memory for it, and that is its credit: whoever
packs needs no further word of the reader's. It packs into staging memory of its own, which waits
for nothing but its own writes. Those end by themselves, so neither side's memory can be full of
what waits for the other's. The two are pools of their own for the same reason: two engines that
take from each other would else each wait with what it asks for in the room where it packs.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kvbridge.errors import KVBridgeError, NotSupportedError, PlanError
from kvbridge.handshake.messages import Packed, Want
from kvbridge.model import Rank
from kvbridge.model.arrays import bytes_at
from kvbridge.plan import BlockTable, EngineTransferPlan, PackedStream, Rearrangement
from kvbridge.session.asking import tables_of
from kvbridge.session.beside import Beside
from kvbridge.session.causes import cause_of
from kvbridge.session.computed import Ready
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.operations import Moves, Operations
from kvbridge.session.session import Session
from kvbridge.session.staging import Staging
from kvbridge.session.transfer import SourceStats, Transfer
from kvbridge.session.wants import Wants
from kvbridge.transport import Descriptors, Handle

STREAMS_KEPT = 8
"""So many streams are remembered, for the parts of them that are still to be asked for."""


# The reader's side.


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """What of a transfer one rank is asked to write in one piece; see :class:`Portions`.

    Attributes:
        wants: Where it is asked for.
        want_of: Returns the want for a part.
        rank: Who is asked.
        stream: All that comes from there.
        start: Where the part begins in that.
        stop: Where it ends.
    """

    wants: Wants
    want_of: Callable[[Packed], Want]
    rank: Rank
    stream: PackedStream
    start: int
    stop: int

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory that it takes."""
        return self.stop - self.start

    def begin(self, transfer: Transfer, address: int) -> frozenset[Hashable]:
        """Ask for it."""
        packed = Packed(self.start, self.stop, address, self.stream.digest)
        copies = self.stream.count(self.start, self.stop)
        source = SourceStats(self.rank, self.staging_nbytes, copies, 1)
        return frozenset({self.wants.ask(transfer, self.rank, self.want_of(packed), source)})

    def scatter(self, address: int) -> Rearrangement:
        """Return what puts it in its place once it is in staging memory."""
        return self.stream.scatter(self.start, self.stop, address)


def streams_of(
    plan: EngineTransferPlan,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    start_token: int,
    end_token: int,
) -> dict[Rank, PackedStream]:
    """Return what comes from each rank, or goes there, by the plan of either side.

    Raises:
        BlockTableError: The tables do not cover the range.
    """
    batches = plan.lower(local_tables, remote_tables, start_token=start_token, end_token=end_token)
    return {
        batch.remote_rank: PackedStream.of(
            batch.local_address,
            batch.local_address if plan.direction == "read" else batch.remote_address,
            batch.nbytes,
        )
        for batch in batches
    }


# The side that has the blocks.


class Packs(Moves, Protocol):
    """What is packed for a reader; see :class:`~kvbridge.session.gifts.Gift`.

    Attributes:
        reason: Why it will not be written; empty while it may be.
        has_begun: Whether some of it has been submitted.
        is_whole: Whether all of it has been.
        nbytes: Bytes of that.
    """

    reason: str
    has_begun: bool
    is_whole: bool
    nbytes: int


@dataclass(slots=True, eq=False)
class _Job:
    """A part that is packed or written; among what its gift waits for until it is packed.

    Attributes:
        gift: What it is for.
        address: Where its staging is.
        packing: The end of the work of bringing it there.
        handle: Its write; None before that has begun.
    """

    gift: Packs
    address: int
    packing: "Future[None]"
    handle: Handle | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing touches its staging any more, nor the blocks that it is packed from."""
        if self.handle is not None:
            return self.handle not in self.gift.pending
        return bool(self.gift.reason) and self.packing.done()


class Packing:
    """The packed writes of one rank."""

    def __init__(
        self, local: LocalRank, operations: Operations, beside: Beside, staging: Staging
    ) -> None:
        """Take what writes, what works beside, and the memory to pack into."""
        self._local, self._operations = local, operations
        self._beside, self._staging = beside, staging
        self._jobs: dict[Packs, _Job] = {}
        self._streams: OrderedDict[Hashable, PackedStream | None] = OrderedDict()
        self._is_full = False

    def __len__(self) -> int:
        """How many parts are packed or written."""
        return len(self._jobs)

    @property
    def most_nbytes(self) -> int:
        """The longest part that can be packed here."""
        return self._staging.nbytes if self._staging.is_possible else 0

    def give(self, gift: Packs, session: Session, want: Want, ready: Ready) -> None:
        """Bring a part forward: have it packed once there is room, and write what is packed.

        Args:
            gift: What it is for; it is whole once the write has begun.
            session: With the reader's engine.
            want: What is wanted, packed.
            ready: What is there of that.

        Raises:
            NotSupportedError: It is longer than what can be packed here.
            KVBridgeError: It could not be packed.
        """
        part = want.packed
        if part is None or not ready.is_all:  # before that, others may still be filling it
            return
        job = self._jobs.get(gift)
        if job is None:
            self._begin(gift, session, want, part, ready)
        elif job.handle is None and job.packing.done():
            self._write(job, session, want.rank, part)

    def poll(self) -> None:
        """Give back the staging of what is over."""
        for gift, job in list(self._jobs.items()):
            if job.is_over:
                del self._jobs[gift]
                self._staging.release(job.address)
                gift.pending.discard(job)
        self._is_full = False

    def _begin(self, gift: Packs, session: Session, want: Want, part: Packed, ready: Ready) -> None:
        """Have a part packed, if there is room and nobody else has waited for that longer."""
        if not self._staging.open() or part.nbytes > self._staging.nbytes:
            raise NotSupportedError(
                f"{part.nbytes} bytes cannot be packed in {self.most_nbytes} bytes of staging "
                "memory (staging_nbytes)"
            )
        address = None if self._is_full else self._staging.reserve(part.nbytes)
        if address is None:
            self._is_full = True
            return
        work = partial(self._pack, session, want, part, ready, address)
        self._jobs[gift] = job = _Job(gift, address, self._beside.start(work, "packing blocks"))
        gift.pending.add(job)
        gift.has_begun = True

    def _write(self, job: _Job, session: Session, rank: Rank, part: Packed) -> None:
        """Write what has been packed."""
        gift = job.gift
        try:
            job.packing.result()
        except CancelledError:  # by close(): nothing was packed
            gift.fail("the writer was shut down", "shutdown")
            return
        except KVBridgeError as error:
            gift.fail(str(error), cause_of(error))
            return
        nbytes = np.array([part.nbytes], np.uint64)
        here = Descriptors(np.array([job.address], np.uint64), nbytes, *self._local.memory)
        there = Descriptors(np.array([part.address], np.uint64), nbytes, *session.memory[rank])
        job.handle = self._operations.submit_part("write", session, gift, rank, here, there)
        if job.handle is not None:
            gift.pending.discard(job)
            gift.nbytes, gift.is_whole = part.nbytes, True

    def _pack(self, session: Session, want: Want, part: Packed, ready: Ready, address: int) -> None:
        """Bring a part of a stream into staging memory; in the thread beside the steps.

        Raises:
            PlanError: The reader means other bytes.
            BlockTableError: The tables do not cover what is wanted.
        """
        stream = self._stream(session, want, ready)
        if stream is None or stream.digest != part.digest or part.stop > stream.nbytes:
            known = "none" if stream is None else f"{stream.nbytes} bytes, {stream.digest.hex()}"
            raise PlanError(
                f"bytes [{part.start}, {part.stop}) of stream {part.digest.hex()} of request "
                f"{want.request_id!r} are wanted, and the stream is {known} here; the engines "
                "disagree about what the request's blocks hold"
            )
        regions = [bytes_at(region.address, region.nbytes) for region in self._local.cache.regions]
        stream.gather(part.start, part.stop, address).apply(regions, [self._staging.content])

    def _stream(self, session: Session, want: Want, ready: Ready) -> PackedStream | None:
        """Return all that goes to a reader, which asks for it part by part."""
        tokens = (want.start_token, want.end_token)
        start = (session.engine_id, session.incarnation, session.generation)
        key = (*start, want.request_id, ready.attempt, want.rank, *tokens, want.blocks)
        if key in self._streams:
            return self._streams[key]
        plan = session.plan_to("write")
        found = streams_of(plan, ready.tables, tables_of(want.blocks), *tokens).get(want.rank)
        self._streams[key] = found
        while len(self._streams) > STREAMS_KEPT:
            self._streams.popitem(last=False)
        return found
