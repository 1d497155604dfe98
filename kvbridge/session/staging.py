"""Registered memory that staged loads are read into before their cells are put in their places."""

import logging
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import TransportError
from kvbridge.model import Region, memory_region
from kvbridge.session.local_rank import LocalRank
from kvbridge.transport import Transport
from kvbridge.transport.mappings import find_read_only

_log = logging.getLogger(__name__)

STAGING_NBYTES = 64 << 20
"""As much as an engine has if it says nothing."""
ALIGN_NBYTES = 64
"""Reservations begin at multiples of this, so that wide cells are copied as such."""

_kept: list[NDArray[np.uint8]] = []
"""What may still be written to when its agent is closed: mapped until the process ends."""


class Staging:
    """One rank's pool of staging memory, made and registered when it is first needed.

    A reservation is whole or not at all, and whoever has one waits for nobody else's: so whatever
    is reserved is given back, and any one reservation that fits an empty pool succeeds in the end.

    Attributes:
        nbytes: How much there is, or would be; 0 where nothing is staged.
        used_nbytes: How much is reserved; read from any thread.
    """

    def __init__(self, transport: Transport, local: LocalRank, nbytes: int) -> None:
        """Make nothing yet.

        Args:
            transport: Where it is registered; open.
            local: The rank, in memory of the kind of whose cache it is described.
            nbytes: How much there may be.
        """
        self._transport, self._local = transport, local
        self.nbytes, self.used_nbytes = nbytes, 0
        self.content: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.region: Region | None = None
        self._taken: list[tuple[int, int]] = []  # from where to where, in order
        self._is_refused = False

    @property
    def is_possible(self) -> bool:
        """Whether there is any, or could be: the host must be able to put cells in their places."""
        return self.nbytes > 0 and self._local.memory[0] == "dram" and not self._is_refused

    @property
    def regions(self) -> tuple[Region, ...]:
        """What of it is registered."""
        return () if self.region is None else (self.region,)

    def open(self) -> bool:
        """Make it, unless that has been done; False if that cannot be, which is said once."""
        if self.region is not None or not self.is_possible:
            return self.region is not None
        # A transport refuses to read into memory that can only be read; the host would crash.
        self._is_refused = bool(find_read_only(self._local.cache.regions))
        if self._is_refused:
            return False
        try:
            content = np.empty(self.nbytes, np.uint8)
            region = Region(memory_region(content).address, self.nbytes, *self._local.memory)
            self._transport.register([region])
        except (TransportError, MemoryError) as error:
            _log.warning(
                "%d bytes of staging memory cannot be had, so what could be read in large pieces "
                "is read in small ones: %s; set staging_nbytes to what can be registered, or to 0",
                self.nbytes,
                error,
            )
            self._is_refused = True
            return False
        self.content, self.region = content, region
        return True

    def reserve(self, nbytes: int) -> int | None:
        """Return the address of so many bytes that nobody else has; None if they are not free."""
        if self.region is None:
            return None
        start, place = 0, 0
        for first, end in self._taken:
            if first - start >= nbytes:
                break
            start = -(-end // ALIGN_NBYTES) * ALIGN_NBYTES
            place += 1
        if self.nbytes - start < nbytes:
            return None
        self._taken.insert(place, (start, start + nbytes))
        self.used_nbytes += nbytes
        return self.region.address + start

    def release(self, address: int) -> None:
        """Give back what starts at an address: nothing touches it any more."""
        if self.region is None:
            return
        place = [first for first, _ in self._taken].index(address - self.region.address)
        first, end = self._taken.pop(place)
        self.used_nbytes -= end - first

    def forget(self) -> None:
        """Have none, once it is not registered any more; made anew when it is needed again."""
        self.content, self.region, self._taken = np.empty(0, np.uint8), None, []
        self.used_nbytes, self._is_refused = 0, False

    def close(self, busy: Collection[Region]) -> None:
        """Keep it mapped for ever if it is among what is not proven quiet."""
        if self.region in busy:
            _kept.append(self.content)
        self.forget()
