"""From two engines on paper to the figures of their plans.

All figures come from plans that were made and lowered, none from a formula: each cache group of a
request is lowered alone, once with scattered and once with neighbouring blocks, then all together.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvbridge.cli.paper_engines import PaperEngine
from kvbridge.cli.plan_values import (
    REPORT_VERSION,
    Copies,
    Link,
    Move,
    PlanReport,
    RankHolding,
    RankReport,
    Reader,
    Share,
    Side,
    Units,
)
from kvbridge.errors import ConfigError
from kvbridge.model import CacheComponent, CacheGroup, Rank, RankCache
from kvbridge.plan import (
    EngineTransferPlan,
    RegionPlan,
    TransferBatch,
    generate_engine_transfer_plan,
)
from kvbridge.plan.cost import copies_of
from kvbridge.plan.values import Direction


def make_report(
    prefill: PaperEngine, decode: PaperEngine, direction: Direction, only: Rank | None = None
) -> PlanReport:
    """Plan for every rank of the acting engine, or for one, and count.

    Raises:
        ConfigError: There is no such rank.
        KVBridgeError: The planner refuses this pair of shapes.
    """
    local, remote = (decode, prefill) if direction == "read" else (prefill, decode)
    if only is not None and only not in local.caches:
        raise ConfigError(
            f"there is no rank {only[0]},{only[1]} in {local.name}, which has "
            f"pp={local.shape.pp}, tp={local.shape.tp}"
        )
    plans = [
        generate_engine_transfer_plan(
            local.topology(rank), local.caches[rank], remote.caches,
            local_engine=local.caches, direction=direction,
        )
        for rank in ([only] if only else sorted(local.caches))
    ]  # fmt: skip
    ranks = tuple(_Counting(plan, local, remote, decode).report() for plan in plans)
    return PlanReport(
        version=REPORT_VERSION,
        model=local.model.name,
        source=local.model.source,
        direction=direction,
        tokens=local.tokens,
        layers=local.model.layers,
        prefill=_side(prefill),
        decode=_side(decode),
        ranks=ranks,
        readers=tuple(Reader(rank, count) for rank, count in sorted(plans[0].readers.items())),
        scattered=_sum(rank.scattered for rank in ranks),
        contiguous=_sum(rank.contiguous for rank in ranks),
    )


# --- who holds what --------------------------------------------------------------------------


def _side(engine: PaperEngine) -> Side:
    return Side(
        str(engine.shape),
        tuple(RankHolding(rank, _shares(cache)) for rank, cache in sorted(engine.caches.items())),
    )


def _shares(cache: RankCache) -> tuple[Share, ...]:
    layers: dict[tuple[int, tuple[Units, ...]], list[int]] = defaultdict(list)
    for layer in cache.layers:
        units = tuple(map(_units, layer.components))
        layers[layer.group, units].append(layer.layer)
    return tuple(
        Share(cache.groups[group].kind, tuple(held), units)
        for (group, units), held in sorted(layers.items(), key=lambda item: item[0][0])
    )


def _units(c: CacheComponent) -> Units:
    return Units(c.name, c.unit_start, c.unit_end, c.unit_total)


# --- what moves ------------------------------------------------------------------------------


class _Counting:
    """Lowers one rank's plan in several ways, and counts."""

    def __init__(
        self, plan: EngineTransferPlan, local: PaperEngine, remote: PaperEngine, decode: PaperEngine
    ) -> None:
        self._plan, self._local, self._remote = plan, local, remote
        self._block_tokens = min(decode.shape.page, decode.tokens)
        self._totals: dict[tuple[int, str], int] = {
            (layer.group, c.name): c.unit_total
            for cache in (local.caches[plan.local_rank], *remote.caches.values())
            for layer in cache.layers
            for c in layer.components
        }

    def _lower(
        self, *, scattered: bool, only: int | None = None, tokens: int = 0
    ) -> Mapping[Rank, Copies]:
        tables = (e.tables(scattered=scattered, only=only) for e in (self._local, self._remote))
        batches = self._plan.lower(*tables, end_token=tokens or self._local.tokens)
        return defaultdict(Copies, {batch.remote_rank: _copies(batch) for batch in batches})

    def report(self) -> RankReport:
        """Return the plan in figures."""
        moves: dict[Rank, list[Move]] = {source.rank: [] for source in self._plan.sources}
        for index, group in enumerate(self._plan.local_groups):
            block = self._lower(scattered=True, only=index, tokens=self._block_tokens)
            ways = [self._lower(scattered=way, only=index) for way in (True, False)]
            for source in self._plan.sources:
                regions = [r for r in source.regions if r.local.group == index]
                if regions:
                    counts = [block[source.rank], *(way[source.rank] for way in ways)]
                    moves[source.rank].append(self._move(group, regions, counts))
        return RankReport(
            rank=self._plan.local_rank,
            links=tuple(Link(rank, tuple(found)) for rank, found in moves.items()),
            notify_only=self._plan.notify_only,
            scattered=_sum(self._lower(scattered=True).values()),
            contiguous=_sum(self._lower(scattered=False).values()),
        )

    def _move(
        self, group: CacheGroup, regions: Sequence[RegionPlan], counts: Sequence[Copies]
    ) -> Move:
        block, scattered, contiguous = counts
        piece = block.nbytes // block.pieces if block.pieces else 0
        units = dict.fromkeys((r.component, r.unit_start, r.unit_end) for r in regions)
        index = regions[0].local.group
        return Move(
            kind=group.kind,
            layers=tuple(sorted({r.layer for r in regions})),
            units=tuple(Units(*held, self._total(index, held[0])) for held in units),
            form="state" if group.kind == "state" else copies_of(regions[0]).form,
            piece_nbytes=piece,
            block=block,
            scattered=scattered,
            contiguous=contiguous,
        )

    def _total(self, group: int, component: str) -> int:
        """Return the units of a component; K or V may be a part of a joint one on both sides."""
        return self._totals.get((group, component)) or self._totals[group, "kv"]


def _copies(batch: TransferBatch) -> Copies:
    return Copies(batch.piece_count, batch.nbytes.size, batch.total_nbytes)


def _sum(parts: Iterable[Copies]) -> Copies:
    found = list(parts)
    return Copies(
        sum(c.pieces for c in found), sum(c.merged for c in found), sum(c.nbytes for c in found)
    )
