"""What a plan costs in its two forms, and packed where it is written; what is cheaper is chosen.

Where layouts differ, a direct plan may need thousands of copies of a few hundred bytes each, and
every copy between processes or machines costs as much as some 16 KiB do. The staged form reads the
pages that hold those cells as they are, few and large, and puts the cells in their places here.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
        ordered_nbytes: Bytes whose pieces are put in order before. Without these, cells of 8 KiB
            would be packed, which was measured to be slower than to write them.
    """

    copies: int = 0
    nbytes: int = 0
    rearranged_nbytes: int = 0
    ordered_nbytes: int = 0

    @property
    def total(self) -> int:
        """The cost as a number of bytes."""
        moved = self.copies * COPY_COST_BYTES + self.nbytes
        return moved + self.rearranged_nbytes + self.ordered_nbytes

    def __add__(self, other: "Cost") -> "Cost":
        """Return what both take together."""
        return Cost(
            self.copies + other.copies,
            self.nbytes + other.nbytes,
            self.rearranged_nbytes + other.rearranged_nbytes,
            self.ordered_nbytes + other.ordered_nbytes,
        )

    def __str__(self) -> str:
        """Say it in words."""
        words = f"{self.copies} copies, {self.nbytes} bytes"
        return f"{words}, {self.rearranged_nbytes} rearranged" if self.rearranged_nbytes else words


def costs_of(plan: "EngineTransferPlan") -> tuple[Cost, Cost]:
    """Return what a remote page of every region takes: directly, and staged."""
    direct = staged = Cost()
    for source in plan.sources:
        for region in source.regions:
            copies = copies_of(region)
            pages = -(-region.remote.cells // region.local.cells)
            one = Cost(copies.number * pages, copies.number * pages * copies.nbytes)
            direct += one
            staged += one if copies.number == 1 else Cost(1, span_of(region), one.nbytes)
    return direct, staged


def cost_packed(plan: "EngineTransferPlan") -> Cost:
    """Return what the same takes packed: all of it put in order there, and in its place here.

    Its parts are so few and large that they are not counted as copies.
    """
    nbytes = costs_of(plan)[0].nbytes
    return Cost(0, nbytes, 2 * nbytes, 2 * nbytes)


class Copies(NamedTuple):
    """How the smaller of two pages is copied directly.

    Attributes:
        form: What one copy holds: ``"pages"``, ``"runs"`` of tokens of a unit, ``"rows"`` of units
            of a token, or single ``"cells"``.
        number: How many copies.
        nbytes: Bytes of each.
    """

    form: str
    number: int
    nbytes: int


def copies_of(region: RegionPlan) -> Copies:
    """Return how the cells of a region that two pages have in common are copied directly."""
    here, there = region.local, region.remote
    tokens = min(here.cells, there.cells)
    unit_axis = (region.unit_count, here.unit_stride, there.unit_stride)
    token_axis = (tokens, here.token_stride, there.token_stride)
    nbytes = region.unit_count * tokens * region.cell_bytes
    for form, joined, count in (
        ("pages", (unit_axis, token_axis), 1),
        ("runs", (token_axis,), region.unit_count),
        ("rows", (unit_axis,), tokens),
    ):
        if one_piece(region.cell_bytes, *joined):
            return Copies(form, count, nbytes // count)
    return Copies("cells", region.unit_count * tokens, region.cell_bytes)


def span_of(region: RegionPlan) -> int:
    """Return the bytes of a remote page from a region's first cell to the end of its last."""
    there = region.remote
    return (
        (region.unit_count - 1) * there.unit_stride
        + (there.cells - 1) * there.token_stride
        + region.cell_bytes
    )
