"""Which memory may be touched: bounds of both sides, and what is in use right now."""

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import MemoryBusyError, OutOfBoundsError, TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.mappings import find_read_only


class RegionTable:
    """An immutable set of regions that descriptors can be checked against, without a loop."""

    __slots__ = ("_ends", "_spaces", "_starts", "regions")

    def __init__(self, regions: Iterable[Region]) -> None:
        """Sort the regions by address.

        Raises:
            OutOfBoundsError: Two regions of one kind and device overlap.
        """
        self.regions: tuple[Region, ...] = tuple(
            sorted(regions, key=lambda r: (r.memory_kind, r.device, r.address))
        )
        for left, right in zip(self.regions, self.regions[1:], strict=False):
            same_space = (left.memory_kind, left.device) == (right.memory_kind, right.device)
            if same_space and right.address < left.end:
                raise OutOfBoundsError(
                    f"regions {left.address:#x}+{left.nbytes} and "
                    f"{right.address:#x}+{right.nbytes} overlap; register each byte once"
                )
        self._starts = np.array([r.address for r in self.regions], np.uint64)
        self._ends = np.array([r.end for r in self.regions], np.uint64)
        self._spaces: dict[tuple[str, int], slice] = {}
        for i, region in enumerate(self.regions):
            space = (region.memory_kind, region.device)
            first = self._spaces[space].start if space in self._spaces else i
            self._spaces[space] = slice(first, i + 1)

    def locate(self, descriptors: Descriptors, owner: str) -> NDArray[np.intp]:
        """Return, for every descriptor, the index of the region that holds all of it.

        Args:
            descriptors: What is about to be touched.
            owner: Whose memory it is, for the error message.

        Raises:
            OutOfBoundsError: A descriptor is not inside a single region of its memory kind.
        """
        space = self._spaces.get((descriptors.memory_kind, descriptors.device), slice(0, 0))
        starts, ends = self._starts[space], self._ends[space]
        if not starts.size:
            inside = np.zeros(len(descriptors), bool)
            index = np.zeros(len(descriptors), np.intp)
        else:
            index = np.searchsorted(starts, descriptors.address, side="right") - 1
            # The room wraps where an address is beyond the end; the next line masks that.
            room = ends[index] - descriptors.address
            inside = (index >= 0) & (descriptors.address <= ends[index])
            inside &= descriptors.nbytes <= room
        if not inside.all():
            at = int(np.argmin(inside))
            raise OutOfBoundsError(
                f"descriptor {at} of {len(descriptors)} ({int(descriptors.address[at]):#x} + "
                f"{int(descriptors.nbytes[at])} bytes of {descriptors.memory_kind}:"
                f"{descriptors.device}) is outside the {starts.size} registered regions of "
                f"{owner}; register the memory, or lower the plan from current addresses"
            )
        located: NDArray[np.intp] = index + space.start
        return located


class LocalMemory:
    """The registered memory of one agent, and how many operations use each region.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        """Start with nothing registered."""
        self._lock = threading.Lock()
        self._table = RegionTable(())
        self._users: dict[Region, int] = {}
        self._read_only: frozenset[Region] = frozenset()

    @property
    def regions(self) -> tuple[Region, ...]:
        """Everything registered at the moment."""
        return self._table.regions

    def add(self, regions: Sequence[Region]) -> None:
        """Note regions as registered.

        Raises:
            OutOfBoundsError: One of them overlaps another.
            TransportError: One of them is not all there.
        """
        read_only = find_read_only(regions)
        with self._lock:
            self._table = RegionTable([*self._table.regions, *regions])
            self._read_only |= read_only

    def remove(self, regions: Sequence[Region]) -> None:
        """Forget regions.

        Raises:
            MemoryBusyError: An operation in flight uses one of them; nothing was removed.
            OutOfBoundsError: One of them is not registered; nothing was removed.
        """
        with self._lock:
            known = set(self._table.regions)
            for region in regions:
                if region not in known:
                    raise OutOfBoundsError(
                        f"region {region.address:#x}+{region.nbytes} is not registered; "
                        f"unregister exactly what was registered ({len(known)} regions)"
                    )
                if self._users.get(region):
                    raise MemoryBusyError(
                        f"region {region.address:#x}+{region.nbytes} is used by "
                        f"{self._users[region]} operations in flight; poll until they have ended"
                    )
            self._table = RegionTable(known - set(regions))
            self._read_only -= set(regions)

    def pin(self, descriptors: Descriptors, *, changes: bool = False) -> frozenset[Region]:
        """Check descriptors and mark the regions under them as used by one operation.

        Args:
            descriptors: The memory that it uses.
            changes: Whether it writes there.

        Raises:
            OutOfBoundsError: A descriptor lies outside the registered memory.
            TransportError: The operation would write to memory that can only be read.
        """
        with self._lock:
            # Counting is several times as fast as sorting, and there are few regions.
            uses = np.bincount(self._table.locate(descriptors, "this agent"))
            regions = frozenset(self._table.regions[i] for i in uses.nonzero()[0].tolist())
            if changes and self._read_only and not self._read_only.isdisjoint(regions):
                region = min(self._read_only & regions, key=lambda region: region.address)
                raise TransportError(
                    f"cannot read into region {region.address:#x}+{region.nbytes}: it could not be "
                    "written when it was registered; read into memory that can"
                )
            for region in regions:
                self._users[region] = self._users.get(region, 0) + 1
            return regions

    def unpin(self, regions: Iterable[Region]) -> None:
        """Take back one :meth:`pin`, once its operation is quiet."""
        with self._lock:
            for region in regions:
                left = self._users[region] - 1
                if left:
                    self._users[region] = left
                else:
                    del self._users[region]

    @property
    def busy(self) -> tuple[Region, ...]:
        """Regions that operations in flight still use."""
        with self._lock:
            return tuple(self._users)
