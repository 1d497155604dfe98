"""What is measured, and what came out."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import default_rng

from kvbridge.errors import ConfigError
from kvbridge.transport import Descriptors, Op

Layout = Literal["contiguous", "scattered"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "scattered")

TOTAL_MAX_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of transfer.

    Attributes:
        op: What this process does with the memory of the other.
        block_nbytes: Length of each piece.
        layout: Whether the pieces follow one another, on both sides, or lie in another order on
            either side with gaps between them. Neighbours are one piece each, as a planner that
            does not merge would hand them on.
        total_nbytes: Bytes of a transfer, rounded down to whole pieces, but at least one.
    """

    op: Op
    block_nbytes: int
    layout: Layout
    total_nbytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if not 1 <= self.block_nbytes <= TOTAL_MAX_NBYTES:
            raise ConfigError(
                f"a block of {self.block_nbytes} bytes cannot be measured; "
                f"give 1 to {TOTAL_MAX_NBYTES}"
            )
        if not 1 <= self.total_nbytes <= TOTAL_MAX_NBYTES:
            raise ConfigError(
                f"a transfer of {self.total_nbytes} bytes cannot be measured; "
                f"give 1 to {TOTAL_MAX_NBYTES}"
            )

    @property
    def blocks(self) -> int:
        """Number of pieces."""
        return max(self.total_nbytes // self.block_nbytes, 1)

    @property
    def nbytes(self) -> int:
        """Bytes that really move."""
        return self.blocks * self.block_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Memory that it takes on either side."""
        return self.nbytes if self.layout == "contiguous" else 2 * self.nbytes

    def pieces(self, address: int, seed: int) -> Descriptors:
        """Return the pieces within the memory at an address; seeds differ from side to side."""
        order = np.arange(self.blocks, dtype=np.uint64)
        if self.layout == "scattered":
            order = 2 * default_rng(seed).permutation(order)
        starts = order * np.uint64(self.block_nbytes) + np.uint64(address)
        return Descriptors(starts, np.full(self.blocks, self.block_nbytes, np.uint64))


class Quartiles(NamedTuple):
    """Median, and the quartiles around it."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of some values; a single one is all three."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one case took on one transport.

    Attributes:
        transport: Name of the transport.
        case: What was measured.
        path: What carried the bytes.
        seconds: Time of each run.
        memcpy_seconds: Time that numpy took, in the same run, to copy as many bytes.
    """

    transport: str
    case: Case
    path: str
    seconds: tuple[float, ...]
    memcpy_seconds: tuple[float, ...]

    @property
    def gbps(self) -> Quartiles:
        """Gigabytes per second."""
        return quartiles([self.case.nbytes / s / 1e9 for s in self.seconds])

    @property
    def of_memcpy(self) -> Quartiles:
        """Throughput as a share of that of a copy within one process, from run to run."""
        pairs = zip(self.memcpy_seconds, self.seconds, strict=True)
        return quartiles([reference / own for reference, own in pairs])
