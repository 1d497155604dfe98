"""Who holds what, and which producer rank serves which units to which consumer rank.

Both engines are partitions of the same index space, layer x component x unit x token. An *edge*
is one cell of their common refinement: units that one producer rank gives to one consumer rank,
of the tokens that both hold. Edges are worked out once for all layers that are held in the same
way, for whole engines, so pull and push, and every rank of either side, come to the same answer.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import LayerKey, Rank, RankCache, TransferTopology
from kvbridge.plan.shares import ALL_TOKENS, TokenShare, shares_meet

Units = tuple[int, int]


class LayerShard(NamedTuple):
    """What a rank holds of a layer.

    Attributes:
        parts: ``(component, unit_start, unit_end)`` of each component.
        tokens: Which tokens of a sequence.
    """

    parts: tuple[tuple[str, int, int], ...]
    tokens: TokenShare


class Holding(NamedTuple):
    """What a rank holds of a component."""

    units: Units
    tokens: TokenShare


Holdings = dict[LayerKey, dict[Rank, LayerShard]]
"""For every layer of an engine, the ranks that hold it and their shares."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Units of one component that a producer rank gives to a consumer rank."""

    consumer: Rank
    producer: Rank
    component: str
    unit_start: int
    unit_end: int


@dataclass(frozen=True, slots=True)
class EdgeGroup:
    """Edges that hold for several layers alike."""

    layers: tuple[LayerKey, ...]
    edges: tuple[Edge, ...]


def token_share(cache: RankCache, group: int) -> TokenShare:
    """Return which tokens a rank holds in one of its cache groups; state is never shared out."""
    if cache.groups[group].kind == "state" or cache.dcp_size == 1:
        return ALL_TOKENS
    return TokenShare(cache.dcp_rank, cache.dcp_size, cache.dcp_interleave_tokens)


def holdings_of(caches: Mapping[Rank, RankCache]) -> Holdings:
    """Return who holds what in an engine that has announced all its ranks."""
    holdings: Holdings = defaultdict(dict)
    for rank, cache in caches.items():
        for layer in cache.layers:
            parts = tuple((c.name, c.unit_start, c.unit_end) for c in layer.components)
            holdings[layer.key][rank] = LayerShard(parts, token_share(cache, layer.group))
    return dict(holdings)


def assumed_holdings(topology: TransferTopology, local: RankCache) -> Holdings:
    """Return who holds what in our own engine if it splits every component evenly.

    Raises:
        PlanError: Our engine has several stages or shares out tokens, or this rank's share is no
            even one.
    """
    if topology.pp_size > 1 or local.dcp_size > 1:
        raise PlanError(
            f"{local.where}: our engine has {topology.pp_size} stages and token shares of "
            f"{local.dcp_size} ranks, so what its other ranks hold cannot be assumed; pass "
            "local_engine, every rank's cache"
        )
    holdings: Holdings = {layer.key: {} for layer in local.layers}
    for layer in local.layers:
        for tp_rank in range(topology.tp_size):
            parts = tuple(
                (c.name, *_even_units(c.unit_total, c.unit_count, topology.tp_size, tp_rank))
                for c in layer.components
            )
            holdings[layer.key][0, tp_rank] = LayerShard(parts, ALL_TOKENS)
        held = tuple((c.name, c.unit_start, c.unit_end) for c in layer.components)
        assumed = holdings[layer.key][local.rank].parts
        if assumed != held:
            raise PlanError(
                f"{local.where}: layer {layer.key} holds {held}, an even split over "
                f"{topology.tp_size} ranks would be {assumed}; pass local_engine, every "
                "rank's cache"
            )
    return holdings


def _even_units(total: int, held: int, size: int, rank: int) -> Units:
    """Return a rank's share of an even contiguous split, whole units replicated beyond them."""
    if held == total:
        return (0, total)
    start = rank * total // size
    return (start, max(start + 1, (rank + 1) * total // size))


def edges_between(
    consumers: Holdings, producers: Holdings, *, require_all_layers: bool
) -> tuple[list[EdgeGroup], list[LayerKey]]:
    """Match two engines.

    Args:
        consumers: Who needs what.
        producers: Who holds what.
        require_all_layers: Refuse consumer layers that no producer holds.

    Returns:
        Edges by groups of layers, and the consumer layers that no producer holds.

    Raises:
        CoverageError: A layer, or some units or tokens of a component, have no producer.
        PlanError: The two sides name different components.
    """
    alike: dict[tuple[object, object], list[LayerKey]] = defaultdict(list)
    left_out: list[LayerKey] = []
    for key, wanted in sorted(consumers.items()):
        held = producers.get(key)
        if held is None:
            left_out.append(key)
        else:
            alike[tuple(wanted.items()), tuple(held.items())].append(key)
    if left_out and require_all_layers:
        raise CoverageError(
            f"{len(left_out)} layers of the consumer are held by no producer rank, first "
            f"{left_out[0]}; the producer has {len(producers)} layers {_some(producers)}; run the "
            "same model with the same layer names, or set require_all_layers=False"
        )
    groups = []
    for layers in alike.values():
        edges = _edges_of_layer(layers[0], consumers[layers[0]], producers[layers[0]])
        groups.append(EdgeGroup(tuple(layers), tuple(edges)))
    return groups, left_out


def _edges_of_layer(
    key: LayerKey, consumers: Mapping[Rank, LayerShard], producers: Mapping[Rank, LayerShard]
) -> list[Edge]:
    split = _splits_kv(consumers.values()) or _splits_kv(producers.values())
    wanted = _by_component(consumers, split)
    held = _by_component(producers, split)
    if not wanted.keys() <= held.keys():
        raise PlanError(
            f"layer {key}: the consumer has components {sorted(wanted)}, the producer "
            f"{sorted(held)}; both engines must cache the same things"
        )
    edges = []
    for component, claims in wanted.items():
        edges += _edges_of_component(key, component, claims, held[component])
    return edges


def _splits_kv(shards: Iterable[LayerShard]) -> bool:
    return any(name in ("k", "v") for shard in shards for name, _, _ in shard.parts)


def _by_component(
    shards: Mapping[Rank, LayerShard], split_kv: bool
) -> dict[str, dict[Rank, Holding]]:
    """Turn shares around: for each component, who holds which units and tokens."""
    result: dict[str, dict[Rank, Holding]] = defaultdict(dict)
    for rank, shard in shards.items():
        for name, start, end in shard.parts:
            for part in ("k", "v") if split_kv and name == "kv" else (name,):
                result[part][rank] = Holding((start, end), shard.tokens)
    return dict(result)


def _edges_of_component(
    key: LayerKey, component: str, claims: Mapping[Rank, Holding], held: Mapping[Rank, Holding]
) -> list[Edge]:
    """Cut every claim where some rank's units begin or end, and find producers for each piece."""
    cuts = sorted({cut for each in (*claims.values(), *held.values()) for cut in each.units})
    shares = sorted({each.tokens for each in held.values()}, key=lambda share: share.rank)
    _check_shares(key, shares)
    edges: list[Edge] = []
    for start, end in itertools.pairwise(cuts):
        claimants, owners = _holders(claims, start, end), _holders(held, start, end)
        for i, claimant in enumerate(claimants):
            for share in _all_shares(shares):
                if not shares_meet(claims[claimant].tokens, share):
                    continue
                fitting = [owner for owner in owners if held[owner].tokens == share]
                if not fitting:
                    raise CoverageError(
                        f"layer {key}, component {component!r}: units [{start}, {end}){share} are "
                        f"needed by consumer ranks {claimants} and held by none of the producer "
                        f"ranks {_units_of(held)}; everything must have an owner"
                    )
                # Replicas on both sides pair up evenly: neighbours share an owner only if they
                # must.
                owner = fitting[i * len(fitting) // len(claimants)]
                edges.append(Edge(claimant, owner, component, start, end))
    return _joined(edges)


def _holders(holdings: Mapping[Rank, Holding], start: int, end: int) -> list[Rank]:
    return sorted(r for r, ((a, b), _) in holdings.items() if a <= start and end <= b)


def _all_shares(shares: Sequence[TokenShare]) -> Iterable[TokenShare]:
    """Return every share of the split that the given ones belong to, held or not."""
    one = shares[0]
    return (TokenShare(rank, one.size, one.interleave) for rank in range(one.size))


def _check_shares(key: LayerKey, shares: Sequence[TokenShare]) -> None:
    splits = sorted({(share.size, share.interleave) for share in shares})
    if len(splits) > 1:
        raise PlanError(
            f"layer {key}: the producer's ranks share out tokens in several ways, as (ranks, "
            f"interleave) {splits}; one engine must have one way"
        )


def _units_of(held: Mapping[Rank, Holding]) -> dict[Rank, Units]:
    return {rank: holding.units for rank, holding in sorted(held.items())}


def _joined(edges: list[Edge]) -> list[Edge]:
    """Join neighbouring units that the same pair of ranks exchanges."""
    joined: dict[tuple[Rank, Rank, int], Edge] = {}
    for edge in edges:  # in order of units
        before = joined.pop((edge.consumer, edge.producer, edge.unit_start), None)
        start = before.unit_start if before else edge.unit_start
        joined[edge.consumer, edge.producer, edge.unit_end] = Edge(
            edge.consumer, edge.producer, edge.component, start, edge.unit_end
        )
    return list(joined.values())


def _some(holdings: Holdings) -> str:
    keys = sorted(holdings)
    return f"{keys[0]} ... {keys[-1]}" if keys else "(none)"
