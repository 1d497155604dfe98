"""From two engines on paper to the figures of their plans.

All figures come from plans that were made and lowered: each cache group of a request is lowered
alone, once with scattered and once with neighbouring blocks. Tensors on paper never touch, so no
copy belongs to two groups, and their sums are those of the request. Of a long request only the ends
are lowered; what lies between repeats, block for block.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import lcm

import msgspec
from rich.console import Console
from rich.progress import track

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
from kvbridge.plan.segments import first_token_needed
from kvbridge.plan.values import Direction

PIECES_AT_ONCE = 1 << 20
"""Copies of a long request that are lowered at a time; each takes some 100 bytes."""
PIECES_MAX = 1 << 24
"""More than these are not lowered even if they do not repeat before."""


def make_report(
    prefill: PaperEngine, decode: PaperEngine, direction: Direction, only: Rank | None = None
) -> PlanReport:
    """Plan for every rank of the acting engine, or for one, and count.

    Raises:
        ConfigError: There is no such rank, or too many copies to count.
        KVBridgeError: The planner refuses this pair of shapes.
    """
    local, remote = (decode, prefill) if direction == "read" else (prefill, decode)
    if only is not None and only not in local.caches:
        raise ConfigError(
            f"there is no rank {only[0]},{only[1]} in {local.name}, which has "
            f"pp={local.shape.pp}, tp={local.shape.tp}"
        )
    acting = [only] if only else sorted(local.caches)
    screen = Console(stderr=True)
    ranks = []
    for rank in track(
        acting, "ranks", console=screen, transient=True, disable=not screen.is_terminal
    ):
        plan = generate_engine_transfer_plan(
            local.topology(rank),
            local.caches[rank],
            remote.caches,
            local_engine=local.caches,
            direction=direction,
        )
        ranks.append(_Counting(plan, local, remote, decode).report())  # fmt: skip
    return PlanReport(
        version=REPORT_VERSION,
        model=local.model.name,
        source=local.model.source,
        direction=direction,
        tokens=local.tokens,
        layers=local.model.layers,
        prefill=_side(prefill),
        decode=_side(decode),
        ranks=tuple(ranks),
        readers=tuple(Reader(rank, count) for rank, count in sorted(plan.readers.items())),
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

        # Tokens after which the pages of both sides, and who holds them, begin anew together.
        self._period = lcm(
            *(lcm(e.shape.page, e.shape.interleave) * e.shape.dcp for e in (local, remote))
        )

    def _count(self, index: int, end: int, *, scattered: bool) -> Mapping[Rank, Copies]:
        """Return what the first ``end`` tokens take of each remote rank in a cache group.

        Raises:
            ConfigError: They take too many copies before anything repeats.
        """
        group = self._plan.local_groups[index]
        if group.kind == "state":
            return self._lower(index, 0, end, scattered=scattered)
        first = first_token_needed(group, 0, end)
        step, repeats = self._steps(index, end - first)
        if repeats < 1:
            return self._lower(index, first, end, scattered=scattered)
        one, two, rest = (
            self._lower(index, first, last, scattered=scattered)
            for last in (first + step, first + 2 * step, end - repeats * step)
        )
        return {rank: _more(rest[rank], one[rank], two[rank], repeats) for rank in rest}

    def _steps(self, index: int, tokens: int) -> tuple[int, int]:
        """Return a number of tokens that repeat, and how many times need not be lowered."""
        regions = [r for s in self._plan.sources for r in s.regions if r.local.group == index]
        per_token = sum(copies_of(r).number / min(r.local.cells, r.remote.cells) for r in regions)
        step = self._period * max(1, int(PIECES_AT_ONCE / (per_token * self._period)))
        at_once = int(per_token * min(tokens, 2 * step))
        if at_once > PIECES_MAX:
            raise ConfigError(
                f"{at_once:,} copies do not repeat before token {min(tokens, 2 * step):,}, and no "
                f"more than {PIECES_MAX:,} are counted; ask about fewer --tokens, or choose pages "
                f"of which one divides the other"
            )
        return step, tokens // step - 1

    def _lower(
        self, index: int, start: int, end: int, *, scattered: bool
    ) -> defaultdict[Rank, Copies]:
        tables = (e.tables(index, scattered=scattered) for e in (self._local, self._remote))
        batches = self._plan.lower(*tables, start_token=start, end_token=end)
        return defaultdict(Copies, {batch.remote_rank: _copies(batch) for batch in batches})

    def report(self) -> RankReport:
        """Return the plan in figures."""
        moves: dict[Rank, list[Move]] = {source.rank: [] for source in self._plan.sources}
        for index, group in enumerate(self._plan.local_groups):
            if not any(r.local.group == index for s in self._plan.sources for r in s.regions):
                continue
            block = self._count(index, self._block_tokens, scattered=True)
            ways = [self._count(index, self._local.tokens, scattered=way) for way in (True, False)]
            for source in self._plan.sources:
                regions = [r for r in source.regions if r.local.group == index]
                if regions:
                    counts = [block[source.rank], *(way[source.rank] for way in ways)]
                    moves[source.rank].append(self._move(group, regions, counts))
        every = [move for found in moves.values() for move in found]
        return RankReport(
            rank=self._plan.local_rank,
            links=tuple(Link(rank, tuple(found)) for rank, found in moves.items()),
            notify_only=self._plan.notify_only,
            scattered=_sum(move.scattered for move in every),
            contiguous=_sum(move.contiguous for move in every),
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


def _more(copies: Copies, one: Copies, two: Copies, times: int) -> Copies:
    """Add what a second step takes on top of one, some times over."""
    figures = zip(*map(msgspec.structs.astuple, (copies, one, two)), strict=True)
    return Copies(*(all_ + times * (second - first) for all_, first, second in figures))


def _sum(parts: Iterable[Copies]) -> Copies:
    found = list(parts)
    return Copies(
        sum(c.pieces for c in found), sum(c.merged for c in found), sum(c.nbytes for c in found)
    )
