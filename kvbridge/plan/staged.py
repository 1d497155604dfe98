"""The staged form of a read: whole pages into staging memory, then one rearrangement here.

Staging is laid out like the remote pages that hold scattered cells, without the pages that are not
needed. So the rearrangement is the same lowering as ever, with the staging in the place of the
remote memory. Cells that are large pieces anyway go straight into the cache.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.plan.binding import Binding, Stream
from kvbridge.plan.lower import Part, SegmentsOf, batch_of, extend, merged, pieces_of, segments_for
from kvbridge.plan.pieces import Pieces
from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.values import BlockTable, Int64Array, TransferBatch

NO_SEAMS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class StagedTransfer:
    """One request in the staged form.

    Attributes:
        batches: What to read, into staging memory and straight into the cache.
        scatter: What to put where once all of that has arrived.
        staging_nbytes: Bytes of staging memory that it takes.
    """

    batches: list[TransferBatch]
    scatter: Rearrangement
    staging_nbytes: int


def lower_staged_plan(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    tokens: tuple[int, int],
    staging_address: int,
) -> StagedTransfer:
    """Lower a plan for one request; see ``EngineTransferPlan.lower_staged``."""
    segments_of = segments_for(binding, local_tables, remote_tables, *tokens)
    batches: list[TransferBatch] = []
    scattered: list[Pieces] = []
    used = 0
    for rank in binding.ranks:
        small = [stream for stream in rank.streams if _is_scattered(stream)]
        large = [stream for stream in rank.streams if not _is_scattered(stream)]
        direct, count = pieces_of(large, rank.partial, rank.whole, rank, segments_of)
        staged = _stage(small, segments_of, rank.seams[1], staging_address + used)
        reads = merged([direct, *staged.reads], rank.seams)
        batch = batch_of(rank, reads, count + sum(read[0].size for read in staged.reads))
        batches += [batch] if batch.nbytes.size else []
        scattered.append(merged(staged.scatter, (rank.seams[0], NO_SEAMS)))
        used += staged.nbytes
    if not scattered:
        return StagedTransfer(batches, Rearrangement.nothing(), used)
    cache, staging, nbytes = map(np.concatenate, zip(*scattered, strict=True))
    return StagedTransfer(
        batches, Rearrangement(*(a.view(np.uint64) for a in (staging, cache, nbytes))), used
    )


def _is_scattered(stream: Stream) -> bool:
    return not stream.pattern.row_bytes and not stream.pattern.page_bytes


class _Staged(NamedTuple):
    reads: list[Pieces]
    scatter: list[Pieces]
    nbytes: int


def _stage(
    streams: list[Stream], segments_of: SegmentsOf, seams: Int64Array, address: int
) -> _Staged:
    """Stage the scattered cells of one source, from an address on."""
    alike: dict[tuple[object, ...], list[Stream]] = defaultdict(list)
    for stream in streams:
        alike[stream.pattern.pagings, stream.pattern.remote.page_stride].append(stream)
    reads: list[Pieces] = []
    parts: list[Part] = []
    start = address
    for members in alike.values():
        there = members[0].pattern.remote
        segments = segments_of(members[0].pattern)
        pages, index = np.unique(segments.remote_page, return_inverse=True)
        if not pages.size:
            continue
        spans = _Spans(members, seams)
        slots = address + np.cumsum(spans.nbytes * pages.size) - spans.nbytes * pages.size
        slot_of_page = slots[:, None] + spans.nbytes[:, None] * np.arange(pages.size)
        reads.append(
            (
                slot_of_page.ravel(),
                (spans.start[:, None] + pages * there.page_stride).ravel(),
                np.repeat(spans.nbytes, pages.size),
            )
        )
        staged = replace(segments, remote_page=index.astype(np.int64))
        for stream in members:
            for part in spans.as_remote(stream, slots):
                extend(parts, part, staged)
        address += int(spans.nbytes.sum()) * pages.size
    scatter = [part.pieces() for part in parts if part.runs[0].size]
    return _Staged(reads, scatter, address - start)


class _Spans:
    """The parts of a remote page that some regions lie in; those that touch are one.

    Shape: start, nbytes [K] int64: where the parts of page 0 start, and their lengths.
    """

    def __init__(self, streams: list[Stream], seams: Int64Array) -> None:
        first = np.concatenate([stream.remote_base for stream in streams])
        end = np.concatenate([stream.remote_base + _span(stream) for stream in streams])
        order = np.argsort(first, kind="stable")
        first, reach = first[order], np.maximum.accumulate(end[order])
        gap = first[1:] - reach[:-1]
        apart = (gap > 0) | ((gap == 0) & np.isin(first[1:], seams))
        opens = np.flatnonzero(np.concatenate(([True], apart)))
        self.start: Int64Array = first[opens]
        self.nbytes: Int64Array = np.append(reach[opens[1:] - 1], reach[-1]) - self.start

    def as_remote(self, stream: Stream, slots: Int64Array) -> list[Stream]:
        """Return a stream that takes its cells from staging instead of the remote memory."""
        part: NDArray[np.intp] = np.searchsorted(self.start, stream.remote_base, side="right") - 1
        base = slots[part] + stream.remote_base - self.start[part]
        streams = []
        for nbytes in np.unique(self.nbytes[part]):
            same = self.nbytes[part] == nbytes
            remote = replace(stream.pattern.remote, page_stride=int(nbytes))
            pattern = replace(stream.pattern, remote=remote)
            streams.append(Stream(pattern, stream.local_base[same], base[same]))
        return streams


def _span(stream: Stream) -> int:
    """Return the bytes of a remote page from a region's first cell to the end of its last."""
    grid = stream.pattern.remote
    return (
        (stream.pattern.units - 1) * grid.unit_stride
        + (grid.cells - 1) * grid.token_stride
        + stream.pattern.cell_bytes
    )
