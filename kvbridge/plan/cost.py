"""What a plan costs in its two forms, and which of them is chosen.

Where layouts differ, a direct plan may need thousands of copies of a few hundred bytes each, and
every copy between processes or machines costs as much as some 16 KiB do. The staged form reads the
pages that hold those cells as they are, few and large, and puts the cells in their places here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.plan.pieces import one_piece
from kvbridge.plan.values import RegionPlan

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

COPY_COST_BYTES = 16 << 10
"""What one copy costs on top of its bytes, in bytes: packing was measured to pay below this."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a form of a plan takes for some tokens.

    Attributes:
        copies: Copies between the engines.
        nbytes: Bytes that they move.
        rearranged_nbytes: Bytes that are put in their places afterwards.
    """

    copies: int = 0
    nbytes: int = 0
    rearranged_nbytes: int = 0

    @property
    def total(self) -> int:
        """The cost as a number of bytes."""
        return self.copies * COPY_COST_BYTES + self.nbytes + self.rearranged_nbytes

    def __add__(self, other: "Cost") -> "Cost":
        """Return what both take together."""
        return Cost(
            self.copies + other.copies,
            self.nbytes + other.nbytes,
            self.rearranged_nbytes + other.rearranged_nbytes,
        )

    def __str__(self) -> str:
        """Say it in words."""
        words = f"{self.copies} copies, {self.nbytes} bytes"
        return f"{words}, {self.rearranged_nbytes} rearranged" if self.rearranged_nbytes else words


def costs_of(plan: "EngineTransferPlan") -> tuple[Cost, Cost]:
    """Return what a page of every region takes: directly, and staged."""
    direct = staged = Cost()
    for source in plan.sources:
        for region in source.regions:
            copies, nbytes = copies_of(region)
            one = Cost(copies, copies * nbytes)
            direct += one
            staged += Cost(1, span_of(region), one.nbytes) if needs_staging(region) else one
    return direct, staged


def copies_of(region: RegionPlan) -> tuple[int, int]:
    """Return how many copies the smaller of two pages takes directly, and the bytes of each."""
    tokens = min(region.local.cells, region.remote.cells)
    unit_axis, token_axis = _axes(region, tokens)
    nbytes = region.unit_count * tokens * region.cell_bytes
    for joined, count in (
        ((unit_axis, token_axis), 1),
        ((token_axis,), region.unit_count),
        ((unit_axis,), tokens),
    ):
        if one_piece(region.cell_bytes, *joined):
            return count, nbytes // count
    return region.unit_count * tokens, region.cell_bytes


def needs_staging(region: RegionPlan) -> bool:
    """Whether a page of a region takes several copies, and consecutive tokens are no piece."""
    return copies_of(region)[0] > 1


def span_of(region: RegionPlan) -> int:
    """Return the bytes of a remote page from a region's first cell to the end of its last."""
    there = region.remote
    return (
        (region.unit_count - 1) * there.unit_stride
        + (there.cells - 1) * there.token_stride
        + region.cell_bytes
    )


def _axes(region: RegionPlan, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    here, there = region.local, region.remote
    return (
        (region.unit_count, here.unit_stride, there.unit_stride),
        (tokens, here.token_stride, there.token_stride),
    )


def form_of(region: RegionPlan) -> str:
    """Say in words what a copy of a region holds."""
    copies, _ = copies_of(region)
    tokens = min(region.local.cells, region.remote.cells)
    if copies == 1:
        return "pages are alike"
    unit_axis, token_axis = _axes(region, tokens)
    if copies == region.unit_count and one_piece(region.cell_bytes, token_axis):
        return "one run of tokens per unit"
    if copies == tokens and one_piece(region.cell_bytes, unit_axis):
        return "one run of units per token"
    return "cell by cell"
