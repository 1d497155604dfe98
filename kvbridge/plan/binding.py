"""Addresses for a plan, arranged so that lowering is array arithmetic.

An engine that a plan is bound to costs a few small arrays of base addresses. They are arranged
when the first request of that engine is lowered: where whole pages move and the pieces of
neighbouring regions touch on both sides, as layers do in caches that keep a block's layers
together, they are fused once, here.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.errors import PlanError
from kvbridge.model import CacheGroup, Rank, RankCache
from kvbridge.plan.pieces import Seams, merge_runs
from kvbridge.plan.shape import Pattern, PlanShape, SourceShape, check_caches, shape_of
from kvbridge.plan.values import Grid, Int64Array, Pagings

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A pattern and the addresses that it repeats at.

    Shape: local_base, remote_base [R] int64, in order of local addresses.
    """

    pattern: Pattern
    local_base: Int64Array
    remote_base: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class WholePages:
    """Pieces of one length that the whole pages of several streams are made of.

    Shape: local_base, remote_base [F] int64, F pieces of a page, with neighbours fused.

    Attributes:
        local: A grid that steps from page to page as all of them do here.
        remote: The same there.
        pagings: How both lay a sequence over pages.
        local_base: Address here of each piece on page 0.
        remote_base: The same there.
        nbytes: Length of each piece.
        region_count: Number of regions that they were fused from.
    """

    local: Grid
    remote: Grid
    pagings: Pagings
    local_base: Int64Array
    remote_base: Int64Array
    nbytes: int
    region_count: int


@dataclass(frozen=True, slots=True, eq=False)
class RankBinding:
    """What lowering needs for one remote rank.

    Attributes:
        rank: The remote rank.
        seams: Addresses that no piece crosses.
        streams: Patterns that move every page by themselves.
        partial: Patterns that move only parts of pages; their whole pages are in ``whole``.
        whole: Whole pages that are one piece or less.
    """

    rank: Rank
    seams: Seams
    streams: tuple[Stream, ...]
    partial: tuple[Stream, ...]
    whole: tuple[WholePages, ...]


@dataclass(frozen=True, eq=False)
class Binding:
    """A plan's addresses.

    Attributes:
        shape: What the plan shares with all engines of this shape.
        bases: For each source, the addresses of its regions here and there.
        seams: For each source, addresses that no piece crosses.
        local_blocks: Logical blocks that this rank has, for each local cache group.
        remote_blocks: Logical blocks that every source has, for each remote cache group.
        destination_is_local: Whether this rank's memory is written.
        local_groups: The cache groups of this engine.
        remote_groups: The cache groups of the other engine.
    """

    shape: PlanShape
    bases: tuple[tuple[Int64Array, Int64Array], ...]
    seams: tuple[Seams, ...]
    local_blocks: Mapping[int, int]
    remote_blocks: Mapping[int, int]
    destination_is_local: bool
    local_groups: tuple[CacheGroup, ...]
    remote_groups: tuple[CacheGroup, ...]

    @cached_property
    def ranks(self) -> tuple[RankBinding, ...]:
        """One entry for each source; arranged when first asked for."""
        return tuple(map(_arrange, self.shape.sources, self.bases, self.seams))


def bind_plan(
    plan: "EngineTransferPlan", local: RankCache, remotes: Mapping[Rank, RankCache]
) -> Binding:
    """Attach addresses to a plan.

    Raises:
        PlanError: The caches have another shape than the plan.
        CoverageError: The plan moves units that a rank does not hold.
    """
    check_caches(local, {"remotes": remotes})
    unknown = sorted(remotes.keys() - plan.readers.keys())
    if unknown:
        raise PlanError(
            f"the plan knows remote ranks {sorted(plan.readers)}, got also {unknown[:8]}; make a "
            "new plan for this engine"
        )
    shape = plan.binding.shape if plan.binding else None
    if shape is None or not shape.fits(local, remotes):
        shape = shape_of(plan, local, remotes)
    seams_here = _seams(local)
    return Binding(
        shape=shape,
        bases=tuple(
            (source.local.bases(local), source.remote.bases(remotes[source.rank]))
            for source in shape.sources
        ),
        seams=tuple((seams_here, _seams(remotes[source.rank])) for source in shape.sources),
        local_blocks=blocks_of((local, source.local_groups) for source in shape.sources),
        remote_blocks=blocks_of(
            (remotes[source.rank], source.remote_groups) for source in shape.sources
        ),
        destination_is_local=plan.direction == "read",
        local_groups=plan.local_groups,
        remote_groups=plan.remote_groups,
    )


def blocks_of(caches: Iterable[tuple[RankCache, frozenset[int]]]) -> dict[int, int]:
    """Return how many blocks of each group every layer of every rank has."""
    blocks: dict[int, int] = {}
    for cache, groups in caches:
        for layer in cache.layers:
            if layer.group in groups:
                held = layer.page_count // cache.groups[layer.group].pages_per_block
                blocks[layer.group] = min(held, blocks.get(layer.group, held))
    return blocks


def _seams(cache: RankCache) -> Int64Array:
    """Return where one region begins at another's end: memory that touches, registered apart."""
    if len(cache.regions) == 1:
        return np.empty(0, np.int64)
    ends = {region.end for region in cache.regions}
    starts = sorted(region.address for region in cache.regions if region.address in ends)
    return np.array(starts, np.uint64).view(np.int64)


def _arrange(
    source: SourceShape, bases: tuple[Int64Array, Int64Array], seams: Seams
) -> RankBinding:
    """Find whole pages that are one piece, and fuse across patterns the regions that touch."""
    alike: dict[tuple[object, ...], list[Stream]] = defaultdict(list)
    alone: list[Stream] = []
    for pattern in source.patterns:
        stream = _stream(pattern, bases)
        here, there = pattern.local, pattern.remote
        if pattern.page_bytes:
            alike[pattern.pagings, here.page_stride, there.page_stride].append(stream)
        else:
            alone.append(stream)
    partial: list[Stream] = []
    whole: list[WholePages] = []
    for members in alike.values():
        together = _fused(members, seams)
        if sum(each.local_base.size for each in together) == _region_count(members):
            # Nothing touches. Rows of tokens then do better alone: a part of a page joins the
            # whole page before it.
            alone += [stream for stream in members if stream.pattern.row_bytes]
            rest = [stream for stream in members if not stream.pattern.row_bytes]
        else:
            rest = members
        if rest:
            partial += rest
            whole += _fused(rest, seams)
    return RankBinding(source.rank, seams, tuple(alone), tuple(partial), tuple(whole))


def _stream(pattern: Pattern, bases: tuple[Int64Array, Int64Array]) -> Stream:
    local, remote = (side[pattern.regions] for side in bases)
    order = np.argsort(local.view(np.uint64), kind="stable")
    return Stream(pattern, local[order], remote[order])


def _region_count(streams: list[Stream]) -> int:
    return sum(stream.local_base.size for stream in streams)


def _fused(members: list[Stream], seams: Seams) -> list[WholePages]:
    """Fuse the regions of streams that use the same pages; pieces of one length stay together."""
    local = np.concatenate([stream.local_base for stream in members])
    remote = np.concatenate([stream.remote_base for stream in members])
    nbytes = np.concatenate(
        [np.full(stream.local_base.size, stream.pattern.page_bytes) for stream in members]
    )
    order = np.argsort(local, kind="stable")
    runs = merge_runs(local[order], remote[order], nbytes[order], seams)
    pages = []
    for length in np.unique(runs[2]):
        same = runs[2] == length
        regions = np.isin(np.searchsorted(runs[0], local, side="right") - 1, np.flatnonzero(same))
        pages.append(
            WholePages(
                members[0].pattern.local,
                members[0].pattern.remote,
                members[0].pattern.pagings,
                runs[0][same],
                runs[1][same],
                int(length),
                int(regions.sum()),
            )
        )
    return pages
