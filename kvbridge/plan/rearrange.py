"""Putting cells in their places within this process's memory, by array assignment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import PlanError
from kvbridge.model import view_of
from kvbridge.plan.values import Int64Array, UInt64Array

BETWEEN_NBYTES = 256 << 10
"""Rows that are scattered on both sides go through so much memory, which a cache holds."""


@dataclass(frozen=True, slots=True, eq=False)
class Rearrangement:
    """Pieces of memory to copy within this process.

    Shape: source_address, target_address, nbytes [N] uint64.

    Attributes:
        source_address: Where each piece is.
        target_address: Where it belongs.
        nbytes: Its length.
    """

    source_address: UInt64Array
    target_address: UInt64Array
    nbytes: UInt64Array

    @classmethod
    def nothing(cls) -> "Rearrangement":
        """Return a rearrangement without pieces."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint64))

    @property
    def total_nbytes(self) -> int:
        """Sum over all pieces."""
        return int(self.nbytes.sum())

    def apply(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy every piece.

        All pieces between two buffers are one assignment of rows, in numpy or in torch, on the
        device that the buffers are on.

        Args:
            sources: Flat buffers of bytes that hold the pieces: numpy arrays of ``uint8`` or torch
                tensors of ``uint8``, all of one library.
            targets: Flat buffers of bytes that they belong in.

        Raises:
            PlanError: A buffer is not flat bytes, or a piece lies in none of them.
        """
        here, there = [_Buffer(s) for s in sources], [_Buffer(t) for t in targets]
        source = _locate(here, self.source_address, self.nbytes, "source")
        target = _locate(there, self.target_address, self.nbytes, "target")
        pair = source * len(there) + target
        order = np.argsort(pair, kind="stable")  # mostly they are in order, or all alike
        alike = np.split(order, np.flatnonzero(np.diff(pair[order])) + 1)
        for chosen in alike if pair.size else ():
            first = chosen[0]
            _assign(
                here[source[first]],
                there[target[first]],
                self.source_address[chosen].view(np.int64) - here[source[first]].address,
                self.target_address[chosen].view(np.int64) - there[target[first]].address,
                self.nbytes[chosen].view(np.int64),
            )


class _Buffer:
    """Flat bytes of numpy or torch, and where they lie."""

    def __init__(self, content: Any) -> None:
        view = view_of(content)
        if len(view.shape) != 1 or view.strides != (1,) or view.item_bytes != 1:
            raise PlanError(
                f"a buffer to rearrange is flat uint8, got {view.dtype} of shape {view.shape}; "
                "pass a flat view of its bytes"
            )
        self.content = content
        self.address = int(np.uint64(view.address).view(np.int64))
        self.nbytes = view.shape[0]

    def rows(self, width: int) -> Any:
        """Return the bytes as rows of some width; a rest that fills no row is left out."""
        count = self.nbytes // width
        if isinstance(self.content, np.ndarray):
            # One item a row: numpy then copies rows as it copies numbers.
            return self.content[: count * width].view(np.dtype((np.void, width)))
        return self.content[: count * width].view(count, width)


def _locate(
    buffers: Sequence[_Buffer], address: UInt64Array, nbytes: UInt64Array, what: str
) -> NDArray[np.intp]:
    """Return which buffer each piece lies in."""
    first, past = address.view(np.int64), address.view(np.int64) + nbytes.view(np.int64)
    start = np.array([buffer.address for buffer in buffers], np.int64)
    end = start + np.array([buffer.nbytes for buffer in buffers], np.int64)
    found = np.full(address.size, -1, np.intp)
    if start.size:
        order = np.argsort(start)
        found = order[np.searchsorted(start[order], first, side="right") - 1]
        found[(first < start[found]) | (past > end[found])] = -1
    for i in range(start.size) if (found < 0).any() else ():  # one before may reach further
        found[(found < 0) & (first >= start[i]) & (past <= end[i])] = i
    if (found < 0).any():
        at = int(np.argmax(found < 0))
        raise PlanError(
            f"piece {at} at {int(address[at]):#x} of {int(nbytes[at])} bytes lies in none of the "
            f"{len(buffers)} {what} buffers; pass all memory that the rearrangement touches"
        )
    return found


def _assign(
    source: _Buffer, target: _Buffer, here: Int64Array, there: Int64Array, nbytes: Int64Array
) -> None:
    """Copy pieces between two buffers, as rows of the widest size that all of them fit."""
    width = math.gcd(*(int(np.gcd.reduce(values)) for values in (here, there, nbytes)))
    if not width:
        return  # a single empty piece at the start of both
    counts = nbytes // width
    from_row, to_row = here // width, there // width
    if (counts != 1).any():
        # Row j of a piece lies j rows after its first: number the rows of all pieces through.
        row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        from_row = np.repeat(from_row, counts) + row
        to_row = np.repeat(to_row, counts) + row
    rows = source.rows(width)
    if isinstance(rows, np.ndarray):
        _copy_rows(rows, from_row, target.rows(width), to_row)
        return
    int64 = rows[:0].long().dtype
    taken = rows.index_select(0, rows.new_tensor(from_row, dtype=int64))
    target.rows(width).index_copy_(0, rows.new_tensor(to_row, dtype=int64), taken)


def _copy_rows(
    source: NDArray[Any], from_row: Int64Array, target: NDArray[Any], to_row: Int64Array
) -> None:
    """Copy rows in numpy, without an array for all of them in between."""
    if np.may_share_memory(source, target):
        target[to_row] = source[from_row]  # none is written before all have been read
        return
    count = from_row.size
    if not count:
        return
    if _is_run(from_row):
        target[to_row] = source[from_row[0] : from_row[0] + count]
    elif _is_run(to_row):
        # All rows are known to exist; looking for that once more would need a copy.
        np.take(source, from_row, out=target[to_row[0] : to_row[0] + count], mode="clip")
    else:
        step = max(BETWEEN_NBYTES // source.itemsize, 1)
        between = np.empty(min(step, count), source.dtype)
        for first in range(0, count, step):
            taken = between[: count - first]
            np.take(source, from_row[first : first + step], out=taken, mode="clip")
            target[to_row[first : first + step]] = taken


def _is_run(rows: Int64Array) -> bool:
    """Whether rows, of which there are some, lie one after the other."""
    return bool(rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all())
