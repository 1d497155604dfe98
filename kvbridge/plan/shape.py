"""What a plan knows of two engines' caches besides addresses: shared by all engines of one shape.

Regions that step through memory alike form a *pattern*. Where each region lies is kept as the
component that it belongs to and an offset from that component's first cell, so binding another
engine of the same shape takes its components' addresses and nothing else.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import CacheComponent, Geometry, LayerCache, LayerKey, Rank, RankCache
from kvbridge.plan.components import component_of, grid_of, needs_of
from kvbridge.plan.pieces import one_piece
from kvbridge.plan.values import Grid, Int64Array, Pagings, RankPlan, RegionPlan

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

IndexArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Regions of one remote rank that repeat the same pieces.

    Shape: regions [R] indices into the source's regions.

    Attributes:
        local: How the regions step through memory here.
        remote: How they step through memory there.
        pagings: How a sequence is laid over pages here and there; one object for all patterns of
            a plan that page alike.
        units: Units of each region.
        cell_bytes: Bytes of a cell.
        regions: Which regions.
        row_bytes: Bytes of a token where consecutive tokens are one piece on both sides, else 0.
        page_bytes: Bytes of a page where a whole page is one piece on both sides, else 0.
    """

    local: Grid
    remote: Grid
    pagings: Pagings
    units: int
    cell_bytes: int
    regions: IndexArray
    row_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the regions of one source lie in a rank's components.

    Shape: both [R], R regions in the order of the source.

    Attributes:
        component: Index of each region's component among those of all layers of the rank.
        offset: Bytes from that component's first cell on page 0 to the region's.
    """

    component: IndexArray
    offset: Int64Array

    def bases(self, cache: RankCache) -> Int64Array:
        """Return the address of each region's first cell on page 0, as int64 bit patterns."""
        # Sums with offsets wrap to the right uint64.
        base = np.array(
            [layer.base_address + c.offset for layer in cache.layers for c in layer.components],
            np.uint64,
        )
        return base.view(np.int64)[self.component] + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class SourceShape:
    """One source of a plan: its patterns, and where its regions lie on both sides."""

    rank: Rank
    patterns: tuple[Pattern, ...]
    local: Placement
    remote: Placement
    local_groups: frozenset[int]
    remote_groups: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class PlanShape:
    """All sources of a plan, and the geometries that they were worked out for."""

    local: Geometry
    remotes: Mapping[Rank, Geometry]
    sources: tuple[SourceShape, ...]

    def fits(self, local: RankCache, remotes: Mapping[Rank, RankCache]) -> bool:
        """Whether two engines' caches have this shape."""
        return local.geometry is self.local and all(
            rank in remotes and remotes[rank].geometry is geometry
            for rank, geometry in self.remotes.items()
        )


def check_caches(local: object, engines: Mapping[str, object]) -> None:
    """Refuse what is no cache of a rank, and no engine.

    Args:
        local: The local rank's cache.
        engines: Whole engines by the names of the arguments that they were given as.

    Raises:
        PlanError: Something else was given.
    """
    if not isinstance(local, RankCache):
        raise PlanError(f"local is {local!r:.80}; pass the RankCache of this rank")
    for name, caches in engines.items():
        if not isinstance(caches, Mapping) or not all(
            isinstance(cache, RankCache) for cache in caches.values()
        ):
            raise PlanError(
                f"{name} is {caches!r:.80}; pass a mapping from (pp_rank, tp_rank) to RankCache"
            )


def shape_of(
    plan: "EngineTransferPlan", local: RankCache, remotes: Mapping[Rank, RankCache]
) -> PlanShape:
    """Work out where a plan's regions lie, after checking that the caches are what it is for.

    Raises:
        PlanError: The caches have another shape than the plan.
        CoverageError: The plan moves units that a rank does not hold.
    """
    if local.rank != plan.local_rank:
        raise PlanError(f"the plan is for rank {plan.local_rank}, the cache is of {local.where}")
    for source in plan.sources:
        if source.rank not in remotes:
            raise PlanError(f"the plan needs remote rank {source.rank}; got {sorted(remotes)}")
    alike: dict[Pagings, Pagings] = {}
    sources = tuple(_source(source, local, remotes[source.rank], alike) for source in plan.sources)
    if plan.direction == "read":
        _check_filled(plan, local)
    return PlanShape(
        local=local.geometry,
        remotes={source.rank: remotes[source.rank].geometry for source in plan.sources},
        sources=sources,
    )


def _check_filled(plan: "EngineTransferPlan", local: RankCache) -> None:
    """Refuse a consumer that holds more than the plan fills: it would decode from stale bytes."""
    parts: dict[LayerKey, set[str]] = defaultdict(set)
    for need in plan.needs:
        parts[need.layer, need.name].add(need.component)
    more = [
        layer.key
        for layer in local.layers
        if layer.key not in parts and layer.key not in plan.left_out
    ]
    if more:
        raise PlanError(
            f"the plan fills {len(parts)} layers, {local.where} also holds {more[:4]}; make a new "
            "plan for this cache"
        )
    planned = set(plan.needs)
    for need in needs_of(local, parts):
        if need not in planned:
            raise PlanError(
                f"{local.where}, layer {(need.layer, need.name)}: the cache holds units "
                f"[{need.unit_start}, {need.unit_end}) of component {need.component!r}, which the "
                "plan does not fill, or not all of them; make a new plan for this cache"
            )


def _source(
    source: RankPlan, local: RankCache, remote: RankCache, alike: dict[Pagings, Pagings]
) -> SourceShape:
    ours, theirs = _Places(local), _Places(remote)
    regions: dict[tuple[Grid, Grid, int, int], list[int]] = defaultdict(list)
    for i, region in enumerate(source.regions):
        pair = ours.layer(region.key), theirs.layer(region.key)
        is_state = region.local.moves == "state"
        components = component_of(region.component, *pair, is_state=is_state)
        ours.add(region, components[0], region.local)
        theirs.add(region, components[1], region.remote)
        regions[region.local, region.remote, region.unit_count, region.cell_bytes].append(i)
    return SourceShape(
        rank=source.rank,
        patterns=tuple(_pattern(*key, found, alike) for key, found in regions.items()),
        local=ours.placement(),
        remote=theirs.placement(),
        local_groups=frozenset(region.local.group for region in source.regions),
        remote_groups=frozenset(region.remote.group for region in source.regions),
    )


def _pattern(
    local: Grid,
    remote: Grid,
    units: int,
    cell_bytes: int,
    regions: list[int],
    alike: dict[Pagings, Pagings],
) -> Pattern:
    pagings = (local.paging, remote.paging)
    unit_axis = (units, local.unit_stride, remote.unit_stride)
    row_bytes = one_piece(cell_bytes, unit_axis)
    if row_bytes != local.token_stride or row_bytes != remote.token_stride:
        row_bytes = 0
    page_bytes = 0
    if local.cells == remote.cells:
        token_axis = (local.cells, local.token_stride, remote.token_stride)
        page_bytes = one_piece(cell_bytes, unit_axis, token_axis)
    return Pattern(
        local,
        remote,
        alike.setdefault(pagings, pagings),
        units,
        cell_bytes,
        np.array(regions, np.intp),
        row_bytes,
        page_bytes,
    )


class _Places:
    """Collects where regions lie in one rank."""

    def __init__(self, cache: RankCache) -> None:
        self._cache = cache
        self._layers = {layer.key: layer for layer in cache.layers}
        held = ((layer.key, c) for layer in cache.layers for c in layer.components)
        self._index = {(key, c.name): (i, c.offset) for i, (key, c) in enumerate(held)}
        self._components: list[int] = []
        self._offsets: list[int] = []

    def layer(self, key: LayerKey) -> LayerCache:
        if key not in self._layers:
            raise PlanError(f"{self._cache.where} does not hold layer {key} of the plan")
        return self._layers[key]

    def add(self, region: RegionPlan, component: CacheComponent, planned: Grid) -> None:
        layer = self.layer(region.key)
        what = f"{self._cache.where}, layer {region.key}, component {region.component!r}"
        held = grid_of(self._cache, layer, component)
        if (held, component.cell_bytes) != (planned, region.cell_bytes):
            numbers = [("cell_bytes", component.cell_bytes, region.cell_bytes)]
            numbers += [
                (field.name, getattr(held, field.name), getattr(planned, field.name))
                for field in fields(Grid)
            ]
            words = ", ".join(
                f"{name} is {ours} in the cache and {theirs} in the plan"
                for name, ours, theirs in numbers
                if ours != theirs
            )
            raise PlanError(f"{what}: {words}; make a new plan for these caches")
        if region.unit_start < component.unit_start or component.unit_end < region.unit_end:
            raise CoverageError(
                f"{what}: the plan moves units [{region.unit_start}, {region.unit_end}), the rank "
                f"holds [{component.unit_start}, {component.unit_end})"
            )
        first_unit = (region.unit_start - component.unit_start) * component.unit_stride
        whole = (region.key, component.name)
        index, offset = self._index[whole if whole in self._index else (region.key, "kv")]
        self._components.append(index)
        self._offsets.append(component.offset - offset + first_unit)

    def placement(self) -> Placement:
        return Placement(np.array(self._components, np.intp), np.array(self._offsets, np.int64))
