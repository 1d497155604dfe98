"""Which main memory of this process exists, and which of it may be written: the kernel knows."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import TransportError
from kvbridge.model.memory import Region

MAIN_MEMORY = "dram"

_MAPS = Path("/proc/self/maps")
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (r?)-?(w?)", re.MULTILINE)


class _Spans(NamedTuple):
    """Addresses without a gap between them. Shape: both [N] uint64, in order."""

    starts: NDArray[np.uint64]
    ends: NDArray[np.uint64]

    def ends_of(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return, for each address, where the span with it ends; where there is none, itself."""
        if not self.starts.size:
            return addresses
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        return np.where(index >= 0, np.maximum(self.ends[index], addresses), addresses)


def find_read_only(regions: Iterable[Region]) -> frozenset[Region]:
    """Return those regions of main memory that may not be written to.

    A library that is given memory which is not there notices when a peer uses it, and some then
    take the process with them. Where the kernel does not tell, all is taken to be there.

    Raises:
        TransportError: A part of a region is not mapped, or may not be read.
    """
    main = [region for region in regions if region.memory_kind == MAIN_MEMORY]
    if not main or not _MAPS.exists():
        return frozenset()
    readable, writable = _read_maps(_MAPS.read_bytes())
    starts = np.array([region.address for region in main], np.uint64)
    ends = np.array([region.end - 1 for region in main], np.uint64)  # the last byte, so it fits
    reached = readable.ends_of(starts)
    if (reached <= ends).any():
        at = int(np.argmax(reached <= ends))
        raise TransportError(
            f"region {main[at].address:#x}+{main[at].nbytes} is not all memory of this process "
            f"that can be read, the first byte that is not is at {int(reached[at]):#x}; allocate "
            "it before it is registered, and keep it until the transport is closed"
        )
    fixed = writable.ends_of(starts) <= ends
    return frozenset(region for region, is_fixed in zip(main, fixed, strict=True) if is_fixed)


def _read_maps(text: bytes) -> tuple[_Spans, _Spans]:
    """Return what can be read, and what of it can be written, too."""
    rows = _LINE.findall(text)
    starts, ends, may_read, may_write = zip(*rows, strict=True)
    bounds = np.empty((len(rows), 2), np.uint64)
    bounds[:, 0] = [int(start, 16) for start in starts]
    bounds[:, 1] = [int(end, 16) for end in ends]
    readable = np.array(may_read) == b"r"
    writable = readable & (np.array(may_write) == b"w")
    return _join(bounds[readable]), _join(bounds[writable])


def _join(bounds: NDArray[np.uint64]) -> _Spans:
    """Join mappings that touch. Shape: bounds [N, 2], each (start, end), in order."""
    apart = bounds[1:, 0] != bounds[:-1, 1]
    return _Spans(bounds[np.r_[True, apart], 0], bounds[np.r_[apart, True], 1])
