"""The packed form of a write: all that goes to one rank as one stream, moved in large pieces.

Who writes gathers cells into staging memory of its own, one after the other in the order of the
addresses where they belong, and writes that to staging memory of the reader, who puts each cell in
its place. Both sides work the order out by themselves: the pieces of a batch may be merged
differently there, but their bytes, by the address where they go, are the same. A digest of those
addresses shows it before anything is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.values import Int64Array, UInt64Array

DIGEST_NBYTES = 8
ALIGN_NBYTES = 64
"""A piece that must be cut is cut at a multiple of this, so that wide cells stay whole."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedStream:
    """The bytes of a batch in the order of the addresses where they go.

    Shape: address [N] uint64; end [N] int64.

    Attributes:
        address: Where each piece is in this process: before packing, or after unpacking.
        end: Where in the stream it ends.
        digest: Equal on both sides if they mean the same bytes.
    """

    address: UInt64Array
    end: Int64Array
    digest: bytes

    @classmethod
    def of(cls, here: UInt64Array, goes_to: UInt64Array, nbytes: UInt64Array) -> "PackedStream":
        """Bring the pieces of a batch into order.

        Args:
            here: Where each is in this process.
            goes_to: Where each goes, in the reader's process: the same as ``here`` there.
            nbytes: Its length.
        """
        order = np.argsort(goes_to)
        first, length = goes_to[order], nbytes[order]
        past = first + length
        # Pieces that touch are one: how they were merged is each side's own business.
        begins = np.flatnonzero(np.append(True, first[1:] != past[:-1])[: first.size])
        lasts = np.append(begins[1:], first.size)[: begins.size] - 1
        runs = np.concatenate((first[begins], past[lasts]))
        digest = blake2b(runs.astype("<u8").tobytes(), digest_size=DIGEST_NBYTES).digest()
        return cls(here[order], np.cumsum(length.view(np.int64)), digest)

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return int(self.end[-1]) if self.end.size else 0

    def cut(self, most_nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield parts of the stream, each as long as it may be without cutting a piece.

        Args:
            most_nbytes: Length that none exceeds; a longer piece is cut.
        """
        start = 0
        while start < self.nbytes:
            whole = int(np.searchsorted(self.end, start + most_nbytes, side="right"))
            stop = int(self.end[whole - 1]) if whole else 0
            if stop <= start:
                stop = start + (most_nbytes // ALIGN_NBYTES * ALIGN_NBYTES or most_nbytes)
            yield start, stop
            start = stop

    def gather(self, start: int, stop: int, staging_address: int) -> Rearrangement:
        """Return what brings a part of the stream into staging memory."""
        cells, staging, nbytes = self._pieces(start, stop, staging_address)
        return Rearrangement(cells, staging, nbytes)

    def scatter(self, start: int, stop: int, staging_address: int) -> Rearrangement:
        """Return what puts a part of the stream, which is in staging memory, in its place."""
        cells, staging, nbytes = self._pieces(start, stop, staging_address)
        return Rearrangement(staging, cells, nbytes)

    def count(self, start: int, stop: int) -> int:
        """Return how many pieces a part of the stream has."""
        first, last = self._within(start, stop)
        return last - first

    def _within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first piece of a part, and the one after its last."""
        first = int(np.searchsorted(self.end, start, side="right"))
        return first, int(np.searchsorted(self.end, stop, side="left")) + 1

    def _pieces(
        self, start: int, stop: int, staging_address: int
    ) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
        """Return addresses of cells and of staging memory, and lengths, of a part of the stream."""
        first, last = self._within(start, stop)
        end = np.minimum(self.end[first:last], stop)
        whole_start = np.append(0 if not first else self.end[first - 1], self.end[first : last - 1])
        begin = np.maximum(whole_start, start)
        cells = self.address[first:last] + (begin - whole_start).view(np.uint64)
        staging = (begin - start + staging_address).view(np.uint64)
        return cells, staging, (end - begin).view(np.uint64)
