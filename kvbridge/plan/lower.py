"""Lowering: block tables and a bound plan become arrays of addresses."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.errors import BlockTableError
from kvbridge.plan.binding import Binding, RankBinding, Stream, WholePages, merge_runs, one_piece
from kvbridge.plan.segments import Segments, Side, segments_between
from kvbridge.plan.values import (
    BlockTable,
    Grid,
    Int64Array,
    RankPlan,
    ReadSpec,
    TransferBatch,
)

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

Pieces = tuple[Int64Array, Int64Array, Int64Array]
"""Local addresses, remote addresses and lengths, all [N] int64."""

_SegmentsOf = Callable[[Grid, Grid], Segments]


def lower_plan(
    binding: Binding,
    local_tables: Sequence[BlockTable],
    remote_tables: Sequence[BlockTable],
    start: int,
    end: int,
) -> list[TransferBatch]:
    """Lower a plan for one request; see ``EngineTransferPlan.lower``."""
    check_range(start, end)
    local = Side("local", local_tables, binding.local_blocks, binding.destination_is_local)
    remote = Side("remote", remote_tables, binding.remote_blocks, not binding.destination_is_local)
    for side in (local, remote):
        check_table_count(side.name, side.tables, side.blocks)
    if start == end:
        return []
    known: dict[tuple[int, ...], Segments] = {}

    def segments_of(here: Grid, there: Grid) -> Segments:
        key = (here.group, here.page_tokens, there.group, there.page_tokens)
        if key not in known:
            known[key] = segments_between(local, remote, here, there, start, end)
        return known[key]

    batches = (_lower_rank(rank, segments_of) for rank in binding.ranks)
    return [batch for batch in batches if batch.nbytes.size]


def check_range(start: int, end: int) -> None:
    """Refuse ranges of tokens that run backwards.

    Raises:
        BlockTableError: The range is none.
    """
    if not 0 <= start <= end:
        raise BlockTableError(
            f"tokens [{start}, {end}) are no range; give 0 <= start_token <= end_token"
        )


def check_table_count(name: str, tables: Sequence[BlockTable], groups: Iterable[int]) -> None:
    """Refuse a list of tables that lacks one for a group that moves.

    Raises:
        BlockTableError: It does.
    """
    missing = [group for group in groups if group >= len(tables)]
    if missing:
        raise BlockTableError(
            f"{len(tables)} {name} block tables given, none for cache groups {missing}; "
            "pass one table for each cache group, in their order"
        )


def _lower_rank(rank: RankBinding, segments_of: _SegmentsOf) -> TransferBatch:
    pieces: list[Pieces] = []
    count = 0
    for whole in rank.whole:
        segments = segments_of(whole.local, whole.remote)
        segments = segments.select(segments.tokens == whole.local.page_tokens)
        count += len(segments) * whole.region_count
        pieces.append(_whole(whole, segments))
    for stream in rank.partial:
        segments = segments_of(stream.local, stream.remote)
        segments = segments.select(segments.tokens != stream.local.page_tokens)
        count += _extend(pieces, stream, segments)
    for stream in rank.streams:
        count += _extend(pieces, stream, segments_of(stream.local, stream.remote))
    if not pieces:  # every block of the destination is null
        return TransferBatch(rank.rank, *np.empty((3, 0), np.uint64))
    local, remote, nbytes = (
        pieces[0] if len(pieces) == 1 else map(np.concatenate, zip(*pieces, strict=True))
    )
    # Neighbours may come from different streams, or from the two ends of neighbouring regions.
    address = local.view(np.uint64)
    if (address[1:] < address[:-1]).any():
        order = np.argsort(address, kind="stable")
        local, remote, nbytes = local[order], remote[order], nbytes[order]
    local, remote, nbytes = merge_runs(local, remote, nbytes, rank.seams)
    return TransferBatch(
        rank.rank,
        local.view(np.uint64),
        remote.view(np.uint64),
        nbytes.view(np.uint64),
        piece_count=count,
    )


def _extend(pieces: list[Pieces], stream: Stream, segments: Segments) -> int:
    """Add a stream's pieces; return their number before merging."""
    if stream.row_bytes:
        offsets = segments.offsets(stream.local, stream.remote)
        runs = merge_runs(*offsets, segments.tokens * stream.row_bytes)
        pieces.append(_outer(stream.local_base, stream.remote_base, runs))
        return stream.local_base.size * len(segments)
    count = 0
    for tokens in np.unique(segments.tokens):
        # Few values occur: whole pages, the two ends, and the steps between unequal page sizes.
        same = segments.select(segments.tokens == tokens)
        runs = _pattern(stream, same, int(tokens))
        pieces.append(_outer(stream.local_base, stream.remote_base, runs))
        count += pieces[-1][0].size
    return count


def _whole(whole: WholePages, segments: Segments) -> Pieces:
    """Return whole pages, each in as few pieces as its fused regions have."""
    here, there = segments.offsets(whole.local, whole.remote)
    if (whole.nbytes == whole.nbytes[0]).all():
        runs = merge_runs(here, there, np.full(here.size, whole.nbytes[0]))
        return _outer(whole.local_base, whole.remote_base, runs)
    return (
        (whole.local_base[:, None] + here).ravel(),
        (whole.remote_base[:, None] + there).ravel(),
        np.repeat(whole.nbytes, here.size),
    )


def _outer(local_base: Int64Array, remote_base: Int64Array, runs: Pieces) -> Pieces:
    """Repeat runs for every base address."""
    here, there, nbytes = runs
    return (
        (local_base[:, None] + here).ravel(),
        (remote_base[:, None] + there).ravel(),
        np.broadcast_to(nbytes, (local_base.size, nbytes.size)).ravel(),
    )


def _pattern(stream: Stream, segments: Segments, tokens: int) -> Pieces:
    """Return the pieces of segments of one length, for a region whose rows are not one piece."""
    here, there = segments.offsets(stream.local, stream.remote)
    unit_axis = (stream.units, stream.local.unit_stride, stream.remote.unit_stride)
    token_axis = (tokens, stream.local.token_stride, stream.remote.token_stride)
    all_axes = (unit_axis, token_axis)
    # Whichever axis joins cells into one piece, the other one is stepped.
    whole = one_piece(stream.cell_bytes, *all_axes)
    if whole:
        return here, there, np.full(here.size, whole, np.int64)
    for inner, outer in (all_axes, all_axes[::-1]):
        run = one_piece(stream.cell_bytes, inner)
        if run:
            return _cells(run, here, there, outer)
    return _cells(stream.cell_bytes, here, there, *all_axes)


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
    check_range(start, end)
    specs = []
    for source in plan.sources:
        ids = []
        for name, tables, groups, used in (
            ("local", local_tables, plan.local_groups, _grids(source, "local")),
            ("remote", remote_tables, plan.remote_groups, _grids(source, "remote")),
        ):
            check_table_count(name, tables, sorted(used))
            ids.append(
                tuple(
                    _ids_between(tables[g], groups[g].block_tokens, start, end) if g in used else ()
                    for g in range(len(groups))
                )
            )
        specs.append(ReadSpec(source.rank, *ids))
    return specs


def _grids(source: RankPlan, side: str) -> set[int]:
    return {getattr(region, side).group for region in source.regions}


def _ids_between(table: BlockTable, block_tokens: int, start: int, end: int) -> tuple[int, ...]:
    if start == end:
        return ()
    first = (start - table.start_token) // block_tokens
    last = -(-(end - table.start_token) // block_tokens)
    if first < 0 or last > len(table.block_ids):
        raise BlockTableError(
            f"block table from token {table.start_token} with {len(table.block_ids)} blocks of "
            f"{block_tokens} does not hold tokens [{start}, {end})"
        )
    ids = (int(block) for block in table.block_ids[first:last])
    return tuple(block for block in ids if block != table.null_block_id)
