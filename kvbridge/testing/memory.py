"""Memory that the agents move, and that everybody can place and inspect bytes in directly.

One anonymous file is mapped by the suite and by every agent's process, each at an address of its
own. So bytes are seen without the transport, at any moment, even after a process was killed.
"""

import mmap
import os
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

GUARD_NBYTES = 4096
GUARD_VALUE = 0xA5
SHARED_NBYTES = 1 << 35  # of address space: pages take memory when they are first touched
_PATTERN_NBYTES = 40 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the shared file that one agent may call its own; guards lie on both sides."""

    offset: int
    nbytes: int


class SharedMemory:
    """The file as this process sees it."""

    def __init__(self, descriptor: int) -> None:
        """Map the file."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SHARED_NBYTES)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._next = 0

    @classmethod
    def make(cls) -> Self:
        """Make a new file; its descriptor is to be inherited by the agents' processes."""
        descriptor = os.memfd_create("kvbridge-conformance")
        os.ftruncate(descriptor, SHARED_NBYTES)
        return cls(descriptor)

    def take(self, nbytes: int) -> Extent:
        """Return an extent that nobody has yet, between two intact guards."""
        pages = -(-nbytes // GUARD_NBYTES) * GUARD_NBYTES
        extent = Extent(self._next + GUARD_NBYTES, nbytes)
        self._next += pages + 2 * GUARD_NBYTES
        if self._next > SHARED_NBYTES:
            raise MemoryError(f"the suite's {SHARED_NBYTES} bytes of shared memory are used up")
        for guard in self._guards(extent):
            guard[:] = GUARD_VALUE
        return extent

    def give_back(self, extent: Extent) -> None:
        """Free the pages of an extent; its place is not used again."""
        first = extent.offset - GUARD_NBYTES
        pages = -(-extent.nbytes // GUARD_NBYTES) * GUARD_NBYTES
        self._map.madvise(mmap.MADV_REMOVE, first, pages + 2 * GUARD_NBYTES)

    def view(self, extent: Extent) -> Bytes:
        """Return the bytes of an extent, to read and to write."""
        return self.bytes[extent.offset : extent.offset + extent.nbytes]

    def guards_intact(self, extent: Extent) -> bool:
        """Say whether nobody wrote around an extent."""
        return all(bool((guard == GUARD_VALUE).all()) for guard in self._guards(extent))

    def _guards(self, extent: Extent) -> tuple[Bytes, Bytes]:
        end = extent.offset + extent.nbytes
        after = -(-extent.nbytes // GUARD_NBYTES) * GUARD_NBYTES + GUARD_NBYTES
        return (
            self.bytes[extent.offset - GUARD_NBYTES : extent.offset],
            self.bytes[end : extent.offset + after],
        )

    def close(self) -> None:
        """Close the file; the mapping goes with the last view of it."""
        os.close(self.descriptor)


@cache
def _noise() -> Bytes:
    return np.frombuffer(np.random.default_rng(0).bytes(_PATTERN_NBYTES), np.uint8)


def pattern(seed: int, nbytes: int) -> Bytes:
    """Return bytes that look random and are the same for everyone; not to be written to."""
    start = seed * 65_537 % (1 << 20)
    return _noise()[start : start + nbytes]
