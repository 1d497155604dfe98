"""Lowering: block tables and a bound plan become arrays of addresses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.errors import BlockTableError
from kvbridge.plan.binding import Binding, RankBinding, Stream, WholePages
from kvbridge.plan.pieces import Pieces, Seams, constant, merge_runs, one_piece
from kvbridge.plan.segments import Segments, Side, first_token_needed, segments_between
from kvbridge.plan.shape import Pattern
from kvbridge.plan.values import (
    BlockTable,
    Grid,
    Int64Array,
    RankPlan,
    ReadSpec,
    TransferBatch,
    whole_number,
)

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

SegmentsOf = Callable[[Pattern | WholePages], Segments]


def lower_plan(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    start: int,
    end: int,
) -> list[TransferBatch]:
    """Lower a plan for one request; see ``EngineTransferPlan.lower``."""
    segments_of = segments_for(binding, local_tables, remote_tables, start, end)
    batches = (
        batch_of(rank, *pieces_of(rank.streams, rank.partial, rank.whole, rank, segments_of))
        for rank in binding.ranks
    )
    return [batch for batch in batches if batch.nbytes.size]


def segments_for(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    start: int,
    end: int,
) -> SegmentsOf:
    """Check a request, and return what finds the segments of a pattern; each is worked out once.

    Raises:
        BlockTableError: The range runs backwards, or there is not one table for each cache group.
    """
    start, end = checked_range(start, end)
    local = Side("local", local_tables, binding.local_blocks, binding.destination_is_local)
    remote = Side("remote", remote_tables, binding.remote_blocks, not binding.destination_is_local)
    for side, groups in ((local, binding.local_groups), (remote, binding.remote_groups)):
        check_tables(side.name, side.tables, side.blocks, len(groups))
    known: dict[int, Segments] = {}

    def segments_of(pattern: Pattern | WholePages) -> Segments:
        key = id(pattern.pagings)  # one object where they are equal
        if key not in known:
            here = pattern.local
            first = first_token_needed(binding.local_groups[here.group], start, end)
            if here.moves == "pages":  # a window may begin within one, which then moves whole
                first = max(start, local.page_start(here, first, end))
            known[key] = segments_between(local, remote, here, pattern.remote, first, end)
        return known[key]

    return segments_of


def checked_range(start: int, end: int) -> tuple[int, int]:
    """Return a range of tokens as Python's numbers.

    Raises:
        BlockTableError: The range is none, or runs backwards.
    """
    start, end = whole_number("start_token", start), whole_number("end_token", end)
    if not 0 <= start <= end:
        raise BlockTableError(
            f"tokens [{start}, {end}) are no range; give 0 <= start_token <= end_token"
        )
    return start, end


def check_tables(name: str, tables: object, moving: Iterable[int], groups: int) -> None:
    """Refuse lists that are not one table for each cache group.

    Args:
        name: Which side's tables they are, for messages.
        tables: The list; only tables of groups at its end that do not move may be left out.
        moving: Cache groups that move.
        groups: Number of cache groups.

    Raises:
        BlockTableError: Something else is listed, too much, or too little.
    """
    listed = tables if isinstance(tables, Sequence) else (None,)
    for table in listed:
        if not isinstance(table, BlockTable):
            raise BlockTableError(
                f"the {name} block tables are {tables!r:.80}; pass a list with one "
                "BlockTable(block_ids) for each cache group, such as [BlockTable([3, 1])]"
            )
    if len(listed) > groups:
        raise BlockTableError(
            f"{len(listed)} {name} block tables given, the {name} engine has {groups} cache "
            "groups; pass one table for each cache group, in their order"
        )
    missing = [group for group in moving if group >= len(listed)]
    if missing:
        raise BlockTableError(
            f"{len(listed)} {name} block tables given, none for cache groups {missing}; "
            "pass one table for each cache group, in their order"
        )


def pieces_of(
    streams: Iterable[Stream],
    partial: Iterable[Stream],
    whole: Iterable[WholePages],
    rank: RankBinding,
    segments_of: SegmentsOf,
) -> tuple[Pieces, int]:
    """Return the pieces of one source, merged, and their number before merging.

    Args:
        streams: Patterns that move every page by themselves.
        partial: Patterns that move only parts of pages.
        whole: Whole pages that are one piece or less.
        rank: The source.
        segments_of: Finds segments.
    """
    parts: list[Part] = []
    count = 0
    for pages in whole:
        segments = segments_of(pages)
        segments = segments.of_length(pages.local.cells)
        nbytes = constant(pages.nbytes, len(segments))
        runs = segments.runs(pages.local, pages.remote, nbytes)
        parts.append(Part(pages.local_base, pages.remote_base, runs, True))
        count += len(segments) * pages.region_count
    for stream in partial:
        pattern = stream.pattern
        segments = segments_of(pattern)
        count += extend(parts, stream, segments.of_length(pattern.local.cells, but=True))
    for stream in streams:
        segments = segments_of(stream.pattern)
        count += extend(parts, stream, segments)
    parts = [part for part in parts if part.runs[0].size]
    if len(parts) == 1 and parts[0].is_merged():
        return parts[0].pieces(), count
    return merged([part.pieces() for part in parts], rank.seams), count


def batch_of(rank: RankBinding, pieces: Pieces, piece_count: int) -> TransferBatch:
    """Return pieces as what goes to a transport."""
    local, remote, nbytes = pieces
    return TransferBatch(
        rank.rank,
        local.view(np.uint64),
        remote.view(np.uint64),
        nbytes.view(np.uint64),
        piece_count,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Runs that repeat for every base address.

    Shape: bases [R] int64; runs [N] int64 each: local and remote offsets, lengths.

    Attributes:
        local_base: Addresses here.
        remote_base: Addresses there.
        runs: What repeats.
        runs_are_merged: Whether no two runs touch.
    """

    local_base: Int64Array
    remote_base: Int64Array
    runs: Pieces
    runs_are_merged: bool

    def pieces(self) -> Pieces:
        """Return the runs at every base address."""
        here, there, nbytes = self.runs
        # One block of memory, not three: the allocator keeps it for the next request.
        pieces = np.empty((3, self.local_base.size, nbytes.size), np.int64)
        # With buffers of several rows, numpy first copies what it broadcasts into them (measured
        # with 2.4: half of the time of the sum).
        buffer_size = np.setbufsize(1024)
        try:
            np.add(self.local_base[:, None], here, out=pieces[0])
            np.add(self.remote_base[:, None], there, out=pieces[1])
        finally:
            np.setbufsize(buffer_size)
        pieces[2] = nbytes
        local, remote, lengths = pieces.reshape(3, -1)
        return local, remote, lengths

    def is_merged(self) -> bool:
        """Whether no two pieces touch.

        Bases are mostly further apart than their runs reach; then only the last run of one can
        touch the first run of the next.
        """
        if not self.runs_are_merged:
            return False
        here, there, nbytes = self.runs
        reach = here[-1] + nbytes[-1] - here[0]
        step = np.minimum.reduce(self.local_base[1:] - self.local_base[:-1], initial=reach + 1)
        if step != reach:
            return bool(step > reach)
        touch = self.local_base[1:] - self.local_base[:-1] == reach
        touch &= self.remote_base[1:] - self.remote_base[:-1] == there[-1] + nbytes[-1] - there[0]
        return not touch.any()


def merged(parts: list[Pieces], seams: Seams) -> Pieces:
    """Put pieces in order of local addresses, and join those that touch."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    local, remote, nbytes = map(np.concatenate, zip(*parts, strict=True))
    address = local.view(np.uint64)
    if (address[1:] < address[:-1]).any():
        order = np.argsort(address, kind="stable")
        local, remote, nbytes = local[order], remote[order], nbytes[order]
    return merge_runs(local, remote, nbytes, seams)


def extend(parts: list[Part], stream: Stream, segments: Segments) -> int:
    """Add a stream's pieces; return their number before merging."""
    if not len(segments):
        return 0
    pattern = stream.pattern
    if pattern.row_bytes:
        runs = segments.runs(pattern.local, pattern.remote, segments.tokens * pattern.row_bytes)
        parts.append(Part(stream.local_base, stream.remote_base, runs, True))
        return stream.local_base.size * len(segments)
    count = 0
    for tokens in np.unique(segments.tokens):
        # Few values occur: whole pages, the two ends, and the steps between unequal page sizes.
        same = segments.of_length(int(tokens))
        runs = _runs(pattern, same, int(tokens))
        parts.append(Part(stream.local_base, stream.remote_base, runs, False))
        count += stream.local_base.size * runs[0].size
    return count


def _runs(pattern: Pattern, segments: Segments, tokens: int) -> Pieces:
    """Return the pieces of segments of one length, for a region whose rows are not one piece."""
    local, remote = pattern.local, pattern.remote
    here, there = segments.offsets(local, remote)
    unit_axis = (pattern.units, local.unit_stride, remote.unit_stride)
    token_axis = (tokens, local.token_stride, remote.token_stride)
    all_axes = (unit_axis, token_axis)
    whole = one_piece(pattern.cell_bytes, *all_axes)
    if whole:
        return here, there, np.full(here.size, whole, np.int64)
    # Whichever axis joins cells into one piece, the other one is stepped.
    for inner, outer in (all_axes, all_axes[::-1]):
        run = one_piece(pattern.cell_bytes, inner)
        if run:
            return _cells(run, here, there, outer)
    return _cells(pattern.cell_bytes, here, there, *all_axes)


def _cells(nbytes: int, here: Int64Array, there: Int64Array, *axes: tuple[int, int, int]) -> Pieces:
    """Step every offset along the axes; each step is a piece of ``nbytes``."""
    for count, local_stride, remote_stride in axes:
        steps = np.arange(count, dtype=np.int64)
        here = (here[:, None] + steps * local_stride).ravel()
        there = (there[:, None] + steps * remote_stride).ravel()
    return here, there, np.full(here.size, nbytes, np.int64)


# --- the same in block ids -------------------------------------------------------------------


def read_specs(
    plan: "EngineTransferPlan",
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    start: int,
    end: int,
) -> list[ReadSpec]:
    """List which blocks of each remote rank meet which of ours."""
    start, end = checked_range(start, end)
    specs = []
    for source in plan.sources:
        ids = []
        for name, tables, groups, used in (
            ("local", local_tables, plan.local_groups, _grids(source, "local")),
            ("remote", remote_tables, plan.remote_groups, _grids(source, "remote")),
        ):
            check_tables(name, tables, sorted(used), len(groups))
            ids.append(
                tuple(
                    _ids_between(tables[g], used[g], first_token_needed(group, start, end), end)
                    if g in used
                    else ()
                    for g, group in enumerate(groups)
                )
            )
        specs.append(ReadSpec(source.rank, *ids))
    return specs


def _grids(source: RankPlan, side: str) -> dict[int, Grid]:
    """Return a grid of each cache group; all of them page alike."""
    return {grid.group: grid for grid in (getattr(region, side) for region in source.regions)}


def _ids_between(table: BlockTable, grid: Grid, start: int, end: int) -> tuple[int, ...]:
    first, last = 0, len(table.block_ids)
    if grid.moves != "state":
        block_tokens = grid.page_tokens * grid.pages_per_block
        origin = grid.share.before(table.start_token)
        place, past = grid.share.before(start) - origin, grid.share.before(end) - origin
        if place == past:
            return ()
        first, last = place // block_tokens, -(-past // block_tokens)
        if first < 0 or last > len(table.block_ids):
            raise BlockTableError(
                f"block table from token {table.start_token} with {len(table.block_ids)} blocks of "
                f"{block_tokens * grid.share.size} does not hold tokens [{start}, {end})"
            )
    ids = (int(block) for block in table.block_ids[first:last])
    return tuple(block for block in ids if block != table.null_block_id)
