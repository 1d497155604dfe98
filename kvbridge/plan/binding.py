"""Addresses for a plan, arranged so that lowering is array arithmetic.

Regions that step through memory alike form a *stream*: one pattern of pieces, many base
addresses. Where whole pages move and the pieces of neighbouring regions touch on both sides, as
layers do in caches that keep a block's layers together, they are fused once, here.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import CacheGroup, LayerCache, Rank, RankCache
from kvbridge.plan.components import component_of, grid_of
from kvbridge.plan.values import Grid, Int64Array, RegionPlan

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan


Seams = tuple[Int64Array, Int64Array]


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Regions of one remote rank that repeat one pattern.

    Shape: local_base, remote_base [R] int64, R regions.

    Attributes:
        local: How the regions step through memory here.
        remote: How they step through memory there.
        units: Units of each region.
        cell_bytes: Bytes of a cell.
        local_base: Address here of the first unit's first token on page 0.
        remote_base: The same there.
        row_bytes: Bytes of a token where consecutive tokens are one piece on both sides, else 0.
        page_bytes: Bytes of a page where a whole page is one piece on both sides, else 0.
    """

    local: Grid
    remote: Grid
    units: int
    cell_bytes: int
    local_base: Int64Array
    remote_base: Int64Array
    row_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WholePages:
    """What the whole pages of several streams are, with neighbours fused.

    Shape: local_base, remote_base, nbytes [F] int64, F pieces of a page.

    Attributes:
        local: A grid that steps from page to page as all of them do here.
        remote: The same there.
        local_base: Address here of each piece on page 0.
        remote_base: The same there.
        nbytes: Length of each piece.
        region_count: Number of regions before they were fused.
    """

    local: Grid
    remote: Grid
    local_base: Int64Array
    remote_base: Int64Array
    nbytes: Int64Array
    region_count: int


@dataclass(frozen=True, slots=True, eq=False)
class RankBinding:
    """What lowering needs for one remote rank.

    Attributes:
        rank: The remote rank.
        seams: Addresses where regions abut, here and there; no piece crosses one.
        streams: Patterns that move every page by themselves.
        partial: Patterns that move only parts of pages; their whole pages are in ``whole``.
        whole: Whole pages that are one piece or less.
    """

    rank: Rank
    seams: Seams
    streams: tuple[Stream, ...]
    partial: tuple[Stream, ...]
    whole: tuple[WholePages, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A plan's addresses.

    Attributes:
        ranks: One entry for each source of the plan.
        local_blocks: Logical blocks that this rank has, for each local cache group.
        remote_blocks: Logical blocks that every source has, for each remote cache group.
        destination_is_local: Whether this rank's memory is written.
        groups: The cache groups of this engine.
    """

    ranks: tuple[RankBinding, ...]
    local_blocks: Mapping[int, int]
    remote_blocks: Mapping[int, int]
    destination_is_local: bool
    groups: tuple[CacheGroup, ...]


def bind_plan(
    plan: "EngineTransferPlan", local: RankCache, remotes: Mapping[Rank, RankCache]
) -> Binding:
    """Attach addresses to a plan.

    Raises:
        PlanError: The caches have another shape than the plan.
        CoverageError: A piece lies outside the regions that a rank announced.
    """
    if local.rank != plan.local_rank:
        raise PlanError(f"the plan is for rank {plan.local_rank}, the cache is of {local.where}")
    ours = {layer.key: layer for layer in local.layers}
    blocks: tuple[dict[int, int], dict[int, int]] = ({}, {})
    ranks = []
    for source in plan.sources:
        remote = remotes.get(source.rank)
        if remote is None:
            raise PlanError(f"the plan needs remote rank {source.rank}; got {sorted(remotes)}")
        theirs = {layer.key: layer for layer in remote.layers}
        bases: dict[tuple[Grid, Grid, int, int], list[tuple[int, int]]] = defaultdict(list)
        for region in source.regions:
            pair = _pair(region, ours, theirs, local, remote)
            for count, grid, layer in zip(blocks, (region.local, region.remote), pair, strict=True):
                held = layer.page_count // grid.pages_per_block
                count[grid.group] = min(held, count.get(grid.group, held))
            key = (region.local, region.remote, region.unit_count, region.cell_bytes)
            bases[key].append(_bases(region, pair, (local, remote)))
        streams = [_stream(key, pairs) for key, pairs in bases.items()]
        ranks.append(_arrange(source.rank, streams, (_seams(local), _seams(remote))))
    return Binding(
        tuple(ranks),
        *blocks,
        destination_is_local=plan.direction == "read",
        groups=plan.local_groups,
    )


def _pair(
    region: RegionPlan,
    ours: Mapping[tuple[int, str], LayerCache],
    theirs: Mapping[tuple[int, str], LayerCache],
    local: RankCache,
    remote: RankCache,
) -> tuple[LayerCache, LayerCache]:
    for layers, cache in ((ours, local), (theirs, remote)):
        if region.key not in layers:
            raise PlanError(f"{cache.where} does not hold layer {region.key} of the plan")
    return ours[region.key], theirs[region.key]


def _bases(
    region: RegionPlan, layers: tuple[LayerCache, LayerCache], caches: tuple[RankCache, RankCache]
) -> tuple[int, int]:
    """Return the addresses of a region's first cell, after checking that the shapes agree."""
    result = []
    pair = component_of(region.component, *layers, is_state=region.local.moves == "state")
    for cache, layer, component, planned in zip(
        caches, layers, pair, (region.local, region.remote), strict=True
    ):
        what = f"{cache.where}, layer {region.key}, component {region.component!r}"
        held = grid_of(cache, layer, component)
        if (held, component.cell_bytes) != (planned, region.cell_bytes):
            raise PlanError(
                f"{what}: cells of {component.cell_bytes} bytes lie as {held}; the plan has cells "
                f"of {region.cell_bytes} bytes as {planned}; make a new plan for these caches"
            )
        if region.unit_start < component.unit_start or component.unit_end < region.unit_end:
            raise CoverageError(
                f"{what}: the plan moves units [{region.unit_start}, {region.unit_end}), the rank "
                f"holds [{component.unit_start}, {component.unit_end})"
            )
        first_unit = (region.unit_start - component.unit_start) * component.unit_stride
        result.append(layer.base_address + component.offset + first_unit)
    return result[0], result[1]


def _stream(key: tuple[Grid, Grid, int, int], pairs: list[tuple[int, int]]) -> Stream:
    local, remote, units, cell_bytes = key
    # Addresses are kept as int64 bit patterns: sums with offsets wrap to the right uint64.
    bases = np.array(pairs, np.uint64).view(np.int64)
    order = np.argsort(bases[:, 0], kind="stable")
    unit_axis = (units, local.unit_stride, remote.unit_stride)
    row_bytes = one_piece(cell_bytes, unit_axis)
    if row_bytes != local.token_stride or row_bytes != remote.token_stride:
        row_bytes = 0
    page_bytes = 0
    if local.cells == remote.cells:
        token_axis = (local.cells, local.token_stride, remote.token_stride)
        page_bytes = one_piece(cell_bytes, unit_axis, token_axis)
    return Stream(
        local, remote, units, cell_bytes, bases[order, 0], bases[order, 1], row_bytes, page_bytes
    )


def one_piece(cell_bytes: int, *axes: tuple[int, int, int]) -> int:
    """Return the bytes of a grid of cells if it is one piece on both sides, else 0.

    Args:
        cell_bytes: Bytes of a cell.
        axes: ``(count, stride here, stride there)`` of each axis.
    """
    nbytes = cell_bytes
    for count, here, there in sorted(axes, key=lambda axis: axis[1]):
        if count == 1:
            continue
        if here != nbytes or there != nbytes:
            return 0
        nbytes *= count
    return nbytes


def _seams(cache: RankCache) -> Int64Array:
    """Return where one region begins at another's end: memory that touches, registered apart."""
    ends = {region.end for region in cache.regions}
    starts = sorted(region.address for region in cache.regions if region.address in ends)
    return np.array(starts, np.uint64).view(np.int64)


def _arrange(rank: Rank, streams: list[Stream], seams: Seams) -> RankBinding:
    """Find whole pages that are one piece, and fuse across streams the regions that touch."""
    alike: dict[tuple[object, ...], list[Stream]] = defaultdict(list)
    alone = [stream for stream in streams if not stream.page_bytes]
    for stream in streams:
        here, there = stream.local, stream.remote
        if stream.page_bytes:
            alike[here.paging, there.paging, here.page_stride, there.page_stride].append(stream)
    partial: list[Stream] = []
    whole: list[WholePages] = []
    for members in alike.values():
        together = _fused(members, seams)
        if together.local_base.size == together.region_count:
            # Nothing touches. Rows of tokens then do better alone: a part of a page joins the
            # whole page before it.
            alone += [stream for stream in members if stream.row_bytes]
            rest = [stream for stream in members if not stream.row_bytes]
        else:
            rest = members
        if rest:
            partial += rest
            whole.append(_fused(rest, seams))
    return RankBinding(rank, seams, tuple(alone), tuple(partial), tuple(whole))


def _fused(members: list[Stream], seams: Seams) -> WholePages:
    local = np.concatenate([stream.local_base for stream in members])
    remote = np.concatenate([stream.remote_base for stream in members])
    nbytes = np.concatenate(
        [np.full(stream.local_base.size, stream.page_bytes, np.int64) for stream in members]
    )
    order = np.argsort(local, kind="stable")
    runs = merge_runs(local[order], remote[order], nbytes[order], seams)
    return WholePages(members[0].local, members[0].remote, *runs, region_count=local.size)


def merge_runs(
    local: Int64Array,
    remote: Int64Array,
    nbytes: Int64Array,
    seams: Seams | None = None,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join neighbouring pieces that touch on both sides, except across seams.

    Shape: all [N] int64, in the order in which they should be joined.
    """
    if local.size < 2:
        return local, remote, nbytes
    apart = (local[1:] - local[:-1] != nbytes[:-1]) | (remote[1:] - remote[:-1] != nbytes[:-1])
    for side, seam in zip((local, remote), seams or (), strict=False):
        if seam.size:
            apart |= np.isin(side[1:], seam)
    starts = np.flatnonzero(apart)
    if starts.size == local.size - 1:
        return local, remote, nbytes
    starts = np.concatenate((np.zeros(1, np.intp), starts + 1))
    return local[starts], remote[starts], np.add.reduceat(nbytes, starts)
