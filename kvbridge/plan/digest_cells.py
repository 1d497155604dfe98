"""Cells that the two ranks of an edge have in common, and where each of them holds them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import PlanError
from kvbridge.model import CacheComponent, LayerCache, LayerKey, RankCache
from kvbridge.plan.binding import blocks_of
from kvbridge.plan.components import grid_of, part_of
from kvbridge.plan.lower import check_tables
from kvbridge.plan.segments import Side
from kvbridge.plan.shares import PERIOD_MAX_TOKENS, TokenShare
from kvbridge.plan.values import BlockTable, Grid, Int64Array, NotNegative, Positive, RegionPlan

Shares = tuple[TokenShare, ...]


@dataclass(frozen=True, slots=True)
class CellRange:
    """Cells that one producer rank gives to one consumer rank, told apart from where they lie.

    Attributes:
        layer: Global index of the layer.
        name: Name of the layer.
        component: Component, in the finer terms of the two sides: ``k`` and ``v`` where one side
            keeps them apart.
        unit_start: Global index of the first unit.
        unit_end: One past the last unit.
        cell_bytes: Bytes of a cell, in the finer terms of the two sides.
        shares: The tokens of the edge are those that all of these shares hold.

    Raises:
        PlanError: The numbers describe no cells.
    """

    layer: NotNegative
    name: str
    component: str
    unit_start: NotNegative
    unit_end: Positive
    cell_bytes: Positive
    shares: Shares = ()

    def __post_init__(self) -> None:
        """Refuse what may have come from a peer and describes no cells."""
        numbers = (
            self.layer,
            self.unit_start,
            self.unit_end - self.unit_start - 1,
            self.cell_bytes - 1,
        )
        if min(numbers) < 0:
            raise PlanError(
                f"layer {self.key}, component {self.component!r}: units [{self.unit_start}, "
                f"{self.unit_end}) of {self.cell_bytes} bytes are no cells; take those of a plan"
            )
        for share in self.shares:
            period = share.size * share.interleave
            if not 0 <= share.rank < share.size or not 0 < period <= PERIOD_MAX_TOKENS:
                raise PlanError(
                    f"layer {self.key}: rank {share.rank} of {share.size} (interleave "
                    f"{share.interleave}) is no share of tokens; take those of a plan"
                )

    @property
    def key(self) -> LayerKey:
        """What pairs layers across engines."""
        return (self.layer, self.name)

    @classmethod
    def of(cls, region: RegionPlan) -> "CellRange":
        """Return the cells of a plan's region; the same from both ends of the edge."""
        shares = {s for s in (region.local.share, region.remote.share) if not s.is_whole}
        return cls(
            region.layer,
            region.name,
            region.component,
            region.unit_start,
            region.unit_end,
            region.cell_bytes,
            tuple(sorted(shares, key=lambda s: (s.size, s.interleave, s.rank))),
        )

    def __str__(self) -> str:
        """Say which cells, for messages."""
        units = f"units [{self.unit_start}, {self.unit_end})"
        shares = "".join(map(str, self.shares))
        return f"layer {self.layer} {self.name!r}, component {self.component!r}, {units}{shares}"


class Target(NamedTuple):
    """Where a rank holds the cells of a range."""

    layer: LayerCache
    component: CacheComponent
    grid: Grid


def target_of(cache: RankCache, layer: LayerCache | None, cells: CellRange) -> Target:
    """Return where a rank holds some cells.

    Raises:
        PlanError: It does not hold them.
    """
    if layer is None:
        raise PlanError(f"{cache.where} does not hold layer {cells.key}; ask the rank that does")
    is_state = cache.groups[layer.group].kind == "state"
    part = part_of(layer, cells.component, cells.cell_bytes, is_state=is_state)
    grid = grid_of(cache, layer, part)
    if cells.unit_start < part.unit_start or part.unit_end < cells.unit_end:
        raise PlanError(
            f"{cache.where} holds units [{part.unit_start}, {part.unit_end}) of {cells}; ask for "
            "units that it holds"
        )
    if not grid.share.is_whole and grid.share not in cells.shares:
        raise PlanError(
            f"{cache.where} holds only the tokens{grid.share}, which {cells} does not say; take "
            "the cells of a plan for this rank"
        )
    return Target(layer, part, grid)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Cells of one unit that a rank holds, in order of their tokens.

    Shape: all [S], S cells.

    Attributes:
        token: Token of the sequence; of a page that counts as a whole its first, of state 0.
        page: Page that holds the cell.
        place: Place of the cell within the page.
        step: Place among the cells that have one token.
        is_null: Which lie in blocks that hold nothing.
    """

    token: Int64Array
    page: Int64Array
    place: Int64Array
    step: Int64Array
    is_null: NDArray[np.bool_]

    def select(self, which: NDArray[Any]) -> "Held":
        """Return some of the cells, by mask or index."""
        return Held(
            self.token[which],
            self.page[which],
            self.place[which],
            self.step[which],
            self.is_null[which],
        )


def held_between(side: Side, grid: Grid, shares: Shares, start: int, end: int) -> Held:
    """Return what a rank holds of the tokens ``[start, end)`` that all shares hold.

    Raises:
        BlockTableError: The table does not cover them, or lists impossible blocks.
    """
    if grid.moves == "state":
        block = side.state_block(grid, start, end)
        pages = np.arange(grid.pages_per_block if block is not None else 0)
        step = np.arange(pages.size * grid.cells)
        page, place = np.divmod(step, grid.cells)
        page += (block or 0) * grid.pages_per_block
        return Held(np.zeros_like(step), page, place, step, np.zeros(step.size, bool))
    whole = grid.moves == "pages"
    runs = side.runs(grid, start, end, packed=whole)
    if whole:
        first = grid.share.tokens(runs.first)
        opens = runs.token == 0  # a page counts for the chunk that its first token is in
        token, page = first[opens], runs.page[opens]
        place = np.tile(np.arange(grid.cells), token.size)
        token, page = np.repeat(token, grid.cells), np.repeat(page, grid.cells)
        step = place
    else:
        within = np.arange(runs.tokens.sum()) - np.repeat(
            np.cumsum(runs.tokens) - runs.tokens, runs.tokens
        )
        token = np.repeat(runs.first, runs.tokens) + within
        page = np.repeat(runs.page, runs.tokens)
        place = np.repeat(runs.token, runs.tokens) + within
        step = np.zeros_like(token)
    null = side.tables[grid.group].null_block_id
    is_null = np.zeros(token.size, bool) if null is None else page // grid.pages_per_block == null
    held = Held(token, page, place, step, is_null)
    for share in shares:
        held = held.select(share.holds(held.token))
    return held


def side_of(cache: RankCache, tables: Sequence[BlockTable], groups: Iterable[int]) -> Side:
    """Return a rank's tables, checked, to look cells up in.

    Raises:
        BlockTableError: There is not one table for each cache group.
    """
    used = frozenset(groups)
    check_tables("local", tables, sorted(used), len(cache.groups))
    return Side("local", tables, blocks_of([(cache, used)]), is_destination=False)
