"""When neighbouring bytes are one piece."""

from functools import lru_cache

import numpy as np

from kvbridge.plan.values import Int64Array

Pieces = tuple[Int64Array, Int64Array, Int64Array]
"""Addresses or offsets here, the same there, and lengths: all [N] int64."""

Seams = tuple[Int64Array, Int64Array]
"""Addresses, here and there, where one registered region begins at another's end."""


CONSTANT_SIZE = 4096
"""Requests of more segments than this make their constants anew."""


def constant(value: int, count: int) -> Int64Array:
    """Return an array that repeats a value; it may be shared, so it is only read."""
    if count > CONSTANT_SIZE:
        return np.full(count, value, np.int64)
    return _constants(value)[:count]


@lru_cache(maxsize=32)
def _constants(value: int) -> Int64Array:
    values = np.full(CONSTANT_SIZE, value, np.int64)
    values.flags.writeable = False
    return values


def one_piece(cell_bytes: int, *axes: tuple[int, int, int]) -> int:
    """Return the bytes of a grid of cells if it is one piece on both sides, else 0.

    Args:
        cell_bytes: Bytes of a cell.
        axes: ``(count, stride here, stride there)`` of each axis.
    """
    nbytes = cell_bytes
    for count, here, there in sorted(axes, key=lambda axis: axis[1]):
        if count == 1:
            continue
        if here != nbytes or there != nbytes:
            return 0
        nbytes *= count
    return nbytes


def merge_runs(
    local: Int64Array, remote: Int64Array, nbytes: Int64Array, seams: Seams | None = None
) -> Pieces:
    """Join neighbouring pieces that touch on both sides, except across seams.

    Shape: all [N] int64, in the order in which they should be joined.
    """
    if local.size < 2:
        return local, remote, nbytes
    touch = local[1:] - local[:-1] == nbytes[:-1]
    if not np.logical_or.reduce(touch):
        return local, remote, nbytes
    touch &= remote[1:] - remote[:-1] == nbytes[:-1]
    for side, seam in zip((local, remote), seams or (), strict=False):
        if seam.size:
            touch &= ~np.isin(side[1:], seam)
    starts = np.flatnonzero(np.concatenate(([True], ~touch)))
    return local[starts], remote[starts], np.add.reduceat(nbytes, starts)
