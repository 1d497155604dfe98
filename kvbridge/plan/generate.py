"""From two engines' caches to the plan of one rank."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from kvbridge.errors import PlanError, UnsupportedLayoutError
from kvbridge.model import (
    CacheGroup,
    Geometry,
    LayerCache,
    LayerKey,
    Rank,
    RankCache,
    TransferTopology,
)
from kvbridge.plan.components import check_pair, component_of, grid_of, needs_of
from kvbridge.plan.ownership import (
    Edge,
    EdgeGroup,
    assumed_holdings,
    edges_between,
    holdings_of,
)
from kvbridge.plan.plan import EngineTransferPlan
from kvbridge.plan.shape import check_caches
from kvbridge.plan.values import Direction, Grid, Need, PlanOptions, RankPlan, RegionPlan

KNOWN_PLANS_MAX = 128
_known_plans: OrderedDict[tuple[object, ...], EngineTransferPlan] = OrderedDict()
"""Plans of late by the shapes that they are for: a fleet of equal engines needs one."""


def generate_engine_transfer_plan(
    topology: TransferTopology,
    local: RankCache,
    remotes: Mapping[Rank, RankCache],
    *,
    local_engine: Mapping[Rank, RankCache] | None = None,
    direction: Direction = "read",
    options: PlanOptions | None = None,
) -> EngineTransferPlan:
    """Work out what the local rank exchanges with every rank of another engine.

    The plan covers exactly: every byte that the consumer needs is written once, from a rank that
    holds it, and nothing else is touched. It comes bound to the caches it was made from. Engines
    of one shape share one plan: for the second of them, only its addresses are looked at.

    Args:
        topology: The local rank's place in its engine. Its engine id and ranks must be those of
            ``local``, its sizes those of ``local_engine`` or of the split that is assumed. The rest
            (``block_size``, ``total_num_kv_heads``, ``is_mla``, ``is_mamba``, ``dcp_size``) is
            neither used nor compared: what the caches announce counts, and in models with several
            kinds of layers no single number fits them all.
        local: What the local rank holds.
        remotes: Every rank of the other engine by ``(pp_rank, tp_rank)``.
        local_engine: Every rank of our own engine; without it an even contiguous split of our
            own shape is assumed, which needs a single stage.
        direction: ``"read"``: we are the consumer and read; ``"write"``: we are the producer and
            write into the consumer's ranks. Both give the same copies.
        options: How to plan.

    Raises:
        CoverageError: Something that the consumer needs is held by nobody.
        PlanError: The caches contradict each other, the options, or the ranks and sizes of the
            topology.
        UnsupportedLayoutError: The caches cannot be brought together.
    """
    options = PlanOptions() if options is None else options
    _check_inputs(topology, local, remotes, local_engine, direction, options)
    key = (
        topology.tp_size,
        topology.pp_size,
        _geometries({local.rank: local}),
        _geometries(local_engine or {}),
        _geometries(remotes),
        direction,
        options,
    )
    known = _known_plans.get(key)
    if known is None:
        plan = _generate(topology, local, remotes, local_engine, direction, options)
        known = _known_plans[key] = plan.bind(local, remotes)
        while len(_known_plans) > KNOWN_PLANS_MAX:
            _known_plans.popitem(last=False)
        return known
    return known.bind(local, remotes)


def _geometries(caches: Mapping[Rank, RankCache]) -> tuple[tuple[Rank, Geometry], ...]:
    return tuple((rank, caches[rank].geometry) for rank in sorted(caches))


def _generate(
    topology: TransferTopology,
    local: RankCache,
    remotes: Mapping[Rank, RankCache],
    local_engine: Mapping[Rank, RankCache] | None,
    direction: Direction,
    options: PlanOptions,
) -> EngineTransferPlan:
    ours = holdings_of(local_engine) if local_engine else assumed_holdings(topology, local)
    theirs = holdings_of(remotes)
    reading = direction == "read"
    groups, left_out = edges_between(
        *((ours, theirs) if reading else (theirs, ours)),
        require_all_layers=options.require_all_layers,
    )
    our_ranks = sorted(local_engine or {(0, t): local for t in range(topology.tp_size)})
    reporters = _reporters(groups, remotes, our_ranks, reading)
    plan = EngineTransferPlan(
        direction=direction,
        local_rank=local.rank,
        local_groups=local.groups,
        remote_groups=next(iter(remotes.values())).groups,
        sources=_sources(local, remotes, groups, reading),
        needs=_needs(local, groups, reading),
        notify_only=tuple(
            rank
            for rank, ranks in reporters.items()
            if local.rank in ranks and not _carries(groups, local.rank, rank, reading)
        ),
        readers={rank: len(ranks) for rank, ranks in reporters.items()},
        left_out=tuple(key for key in left_out if _is_ours(local, key, reading)),
        options=options,
    )
    plan.check()
    return plan


def _is_ours(local: RankCache, key: tuple[int, str], reading: bool) -> bool:
    return not reading or any(layer.key == key for layer in local.layers)


# --- inputs ----------------------------------------------------------------------------------


def _check_inputs(
    topology: TransferTopology,
    local: RankCache,
    remotes: Mapping[Rank, RankCache],
    local_engine: Mapping[Rank, RankCache] | None,
    direction: str,
    options: PlanOptions,
) -> None:
    _check_type("topology", topology, TransferTopology)
    _check_type("options", options, PlanOptions)
    engines = {"remotes": remotes, "local_engine": {} if local_engine is None else local_engine}
    check_caches(local, engines)
    if direction not in ("read", "write"):
        raise PlanError(f"direction {direction!r} is unknown; known: read, write")
    if (options.strategy, direction) == ("staged", "write"):
        raise UnsupportedLayoutError(
            "a plan that writes has no staged form: what arrives is rearranged by the consumer; "
            "use strategy 'auto' or 'direct'"
        )
    if local.rank != (topology.pp_rank, topology.tp_rank):
        raise PlanError(
            f"{local.where} is not the topology's rank "
            f"(pp {topology.pp_rank}, tp {topology.tp_rank}); pass the cache of this rank"
        )
    if local.engine_id != topology.engine_id:
        raise PlanError(
            f"the local cache belongs to engine {local.engine_id!r}, the topology to "
            f"{topology.engine_id!r}"
        )
    _check_engine("remote", remotes)
    if local_engine is not None:
        _check_engine("local", local_engine)
        if local_engine.get(local.rank) != local:
            raise PlanError(f"local_engine holds another cache for {local.where} than local is")
        expected = (topology.pp_size, topology.tp_size)
        if _shape(local_engine) != expected:
            raise PlanError(
                f"local_engine has (pp, tp) sizes {_shape(local_engine)}, the topology {expected}"
            )


def _check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise PlanError(f"{name} is {value!r:.80}; pass {wanted.__name__}(...)")


def _shape(caches: Mapping[Rank, RankCache]) -> tuple[int, int]:
    return (1 + max(pp for pp, _ in caches), 1 + max(tp for _, tp in caches))


def _check_engine(side: str, caches: Mapping[Rank, RankCache]) -> None:
    if not caches:
        raise PlanError(f"the {side} engine has no ranks; pass the cache of every rank")
    stages, ranks = _shape(caches)
    missing = [(p, t) for p in range(stages) for t in range(ranks) if (p, t) not in caches]
    if missing:
        raise PlanError(
            f"the {side} engine has {stages} stages of {ranks} ranks, but these are missing: "
            f"{missing[:8]}; pass every rank"
        )
    ids = {cache.engine_id for cache in caches.values()}
    if len(ids) > 1:
        raise PlanError(f"the {side} engine's ranks carry several engine ids: {sorted(ids)}")
    for rank, cache in caches.items():
        if cache.rank != rank:
            raise PlanError(f"the {side} engine lists {cache.where} under rank {rank}")
    tables = {cache.groups for cache in caches.values()}
    if len(tables) > 1:
        raise PlanError(
            f"the {side} engine's ranks list different cache groups: {sorted(map(str, tables))}; "
            "one set of block tables serves all ranks"
        )


# --- who must be told ------------------------------------------------------------------------


def _reporters(
    groups: list[EdgeGroup],
    remotes: Mapping[Rank, RankCache],
    our_ranks: list[Rank],
    reading: bool,
) -> dict[Rank, set[Rank]]:
    """Return, for every remote rank, which of our ranks will report to it.

    A rank that exchanges nothing is reported to by exactly one of ours, its neighbour by
    position, so that it never waits for a lease to expire (reports B03, B10, B30).
    """
    everyone = sorted(remotes)
    reporters: dict[Rank, set[Rank]] = {rank: set() for rank in everyone}
    for group in groups:
        for edge in group.edges:
            ours, theirs = _sides(edge, reading)
            reporters[theirs].add(ours)
    for i, rank in enumerate(everyone):
        if not reporters[rank]:
            reporters[rank].add(our_ranks[i * len(our_ranks) // len(everyone)])
    return reporters


def _sides(edge: Edge, reading: bool) -> tuple[Rank, Rank]:
    """Return the edge's ranks as (ours, theirs)."""
    return (edge.consumer, edge.producer) if reading else (edge.producer, edge.consumer)


def _carries(groups: list[EdgeGroup], ours: Rank, theirs: Rank, reading: bool) -> bool:
    return any(_sides(edge, reading) == (ours, theirs) for group in groups for edge in group.edges)


# --- what is copied --------------------------------------------------------------------------


def _local_edges(
    groups: list[EdgeGroup], local: RankCache, reading: bool
) -> Iterator[tuple[EdgeGroup, Edge]]:
    for group in groups:
        for edge in group.edges:
            if _sides(edge, reading)[0] == local.rank:
                yield group, edge


def _needs(local: RankCache, groups: list[EdgeGroup], reading: bool) -> tuple[Need, ...]:
    """Return what must be written, told apart from how the edges came about.

    Reading, it is all that the local rank announces of the layers that have a producer. Writing,
    it is this producer's share of every consumer rank.
    """
    needs: list[Need] = []
    if reading:
        parts: dict[LayerKey, set[str]] = {key: set() for group in groups for key in group.layers}
        for group, edge in _local_edges(groups, local, reading):
            for key in group.layers:
                parts[key].add(edge.component)
        needs += needs_of(local, parts)
    else:
        for group, edge in _local_edges(groups, local, reading):
            needs += (
                Need(edge.consumer, *key, edge.component, edge.unit_start, edge.unit_end)
                for key in group.layers
            )
    return tuple(sorted(needs, key=lambda n: (n.rank, n.layer, n.name, n.component, n.unit_start)))


def _sources(
    local: RankCache, remotes: Mapping[Rank, RankCache], groups: list[EdgeGroup], reading: bool
) -> tuple[RankPlan, ...]:
    regions: dict[Rank, list[RegionPlan]] = {}
    pairing = _Pairing(local)
    layers_of: dict[Rank, dict[tuple[int, str], LayerCache]] = {}
    for group, edge in _local_edges(groups, local, reading):
        theirs = _sides(edge, reading)[1]
        remote = remotes[theirs]
        layers = layers_of.setdefault(theirs, {layer.key: layer for layer in remote.layers})
        regions.setdefault(theirs, []).extend(
            pairing.region(layers[key], remote, edge) for key in group.layers
        )
    return tuple(
        RankPlan(
            rank,
            tuple(sorted(found, key=lambda r: (r.layer, r.name, r.component, r.unit_start))),
        )
        for rank, found in sorted(regions.items())
    )


class _Pairing:
    """Makes regions; equal grids become one object, so that a plan of many layers stays small."""

    def __init__(self, local: RankCache) -> None:
        self._local = local
        self._layers = {layer.key: layer for layer in local.layers}
        self._grids: dict[Grid, Grid] = {}

    def region(self, remote_layer: LayerCache, remote: RankCache, edge: Edge) -> RegionPlan:
        layer = self._layers[remote_layer.key]
        ours = self._local.groups[layer.group]
        _check_groups(layer, ours, remote.groups[remote_layer.group])
        pair = component_of(edge.component, layer, remote_layer, is_state=ours.kind == "state")
        here = grid_of(self._local, layer, pair[0])
        there = grid_of(remote, remote_layer, pair[1])
        check_pair(layer, pair, here, there)
        return RegionPlan(
            layer=layer.layer,
            name=layer.name,
            component=edge.component,
            unit_start=edge.unit_start,
            unit_end=edge.unit_end,
            cell_bytes=pair[0].cell_bytes,
            local=self._grids.setdefault(here, here),
            remote=self._grids.setdefault(there, there),
        )


def _check_groups(layer: LayerCache, ours: CacheGroup, theirs: CacheGroup) -> None:
    mine, other = (ours.kind, ours.window_tokens), (theirs.kind, theirs.window_tokens)
    if mine != other:
        raise PlanError(
            f"layer {layer.key}: its cache group (kind, window) is {mine} here and {other} there"
        )
