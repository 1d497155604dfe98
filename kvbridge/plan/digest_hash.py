"""A 64-bit hash of cells whose parts can be added up in any order.

Two well-understood steps. The content of a cell goes through multilinear hashing: 32-bit halves of
its words times odd 64-bit multipliers, one for each place, summed modulo 2**64 (Carter and Wegman,
"Universal classes of hash functions", 1979; Lemire and Kaser, "Strongly universal string hashing is
fast", 2014). The result meets the cell's position in the finaliser of splitmix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014, with Stafford's constants), a
bijection that turns every bit into a coin toss. Cells are then summed modulo 2**64, so memory may
be walked in whatever order it lies.

A change within four aligned bytes of one cell is always seen. Any other change of a cell goes
unseen with odds of at most 2**-32 over the choice of the multipliers, and near 2**-64 where low
bits change; changes of several cells, swaps and shifts with odds near 2**-64. The multipliers are
fixed, so that is no protection against somebody who wants two contents to have one digest.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.plan.values import UInt64Array

WORD = np.dtype("<u8")
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio: what splitmix64 counts by."""
_UNIT_STEP = np.uint64(0xD1342543DE82EF95)
_CELL_STEP = np.uint64(0xAF251AF3B0F025B5)


def mix64(values: UInt64Array) -> UInt64Array:
    """Return splitmix64's finaliser of some numbers, which it overwrites."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=32)
def _multipliers(words: int) -> tuple[UInt64Array, UInt64Array]:
    """Return odd multipliers for whole words, and more for their upper halves."""
    odd = mix64(np.arange(1, 2 * words + 1, dtype=np.uint64) * GOLDEN) | np.uint64(1)
    return odd[:words], odd[words:]


def content_hashes(cells: NDArray[np.void]) -> UInt64Array:
    """Hash the content of some cells of one size. Shape: cells [N], result [N]."""
    nbytes = cells.dtype.itemsize
    words = -(-nbytes // WORD.itemsize)
    if nbytes % WORD.itemsize:
        padded = np.zeros((cells.size, words * WORD.itemsize), np.uint8)
        padded[:, :nbytes] = cells.view(np.uint8).reshape(cells.size, nbytes)
        values: NDArray[Any] = padded.view(WORD)
    else:
        values = cells.view(WORD).reshape(cells.size, words)
    whole, upper = _multipliers(words)
    hashes: UInt64Array = values @ whole
    hashes += (values >> np.uint64(32)) @ upper
    return hashes


def positions(token: NDArray[np.int64], step: NDArray[np.int64]) -> UInt64Array:
    """Number cells of one unit: by token, and by place among the cells that have one token."""
    return token.astype(np.uint64) * GOLDEN + step.astype(np.uint64) * _CELL_STEP


def placed(contents: UInt64Array, position: UInt64Array, unit: NDArray[np.int64]) -> UInt64Array:
    """Return hashes of contents, which it overwrites, at their positions: ready to be summed."""
    contents += mix64(position + unit.astype(np.uint64) * _UNIT_STEP)
    return mix64(contents)


def finished(sums: UInt64Array, counts: NDArray[np.int64], cell_bytes: int) -> UInt64Array:
    """Return the digests of sums over some numbers of cells."""
    size = mix64(counts.astype(np.uint64) * GOLDEN + np.uint64(cell_bytes))
    return mix64(sums + size)
