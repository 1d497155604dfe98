"""Promises to keep blocks, where readers can see for themselves whether they still hold.

A reader reads blocks one-sidedly: nobody on the other side notices when it begins, or whether it
is done in time. So after the bytes it reads one word more, from the same rank: the *lease* of the
request. If that word is still the request's own, the blocks had not been given to anybody else by
then, and all that was read before is what the request's owner wrote. If it is over, the read has
failed, whatever arrived. If it has not begun, the reader was faster than the owner's next step: the
blocks are kept from the moment when the request finished, so it looks again. No clock is compared
with another one, and the owner's process has no part in it.
"""

from typing import Literal, NamedTuple

import numpy as np

from kvbridge.model import Region, memory_region

SLOTS = 4096
WORD_NBYTES = 8
EPOCH_BITS = 52
"""Epochs come through proxies that take every number for a float."""
_OVER = np.uint64(1 << 63)
"""Beside an epoch: that promise is over."""

Standing = Literal["kept", "not yet", "over"]


class Lease(NamedTuple):
    """A promise to keep a request's blocks, the same on all ranks of an engine.

    Attributes:
        slot: Which word of a rank's table says that it holds.
        epoch: What that word is while it does; no two promises have the same.
    """

    slot: int
    epoch: int

    def standing(self, word: int) -> Standing:
        """Return what a word of that slot says of this promise.

        A slot is given away only when its last promise is over on every rank. So until this one
        begins the slot shows none, or one that is over; the same may be seen once it was given
        away again, for which no more than the reader's own deadline is lost.
        """
        if word == self.epoch:
            return "kept"
        is_own_or_newer = word == self.epoch | int(_OVER) or 0 < word < int(_OVER)
        return "over" if is_own_or_newer else "not yet"


class LeaseTable:
    """One rank's promises, and the words in which others' land.

    Attributes:
        region: Where both are, to be registered.
    """

    def __init__(self) -> None:
        """Start without a promise."""
        self._words = np.zeros(2 * SLOTS, np.uint64)
        self.region: Region = memory_region(self._words)
        self._next = 0

    @property
    def address(self) -> int:
        """Where the word of slot 0 is."""
        return self.region.address

    def grant(self, lease: Lease) -> None:
        """Promise."""
        self._words[lease.slot] = lease.epoch

    def revoke(self, lease: Lease) -> None:
        """Promise no longer; before the blocks are given to anybody else."""
        if self._words[lease.slot] == lease.epoch:
            self._words[lease.slot] |= _OVER

    def refuse(self, lease: Lease) -> None:
        """Let readers see that a promise is over which was never made."""
        self._words[lease.slot] = lease.epoch | int(_OVER)

    def revoke_all(self) -> None:
        """Promise nothing any more."""
        self._words[:SLOTS] |= _OVER

    def landing(self) -> int:
        """Return a word for somebody else's lease to land in, as its index.

        Words are used in turn. A read that nobody waits for any more may come late, into a word
        that serves another request by then; what it brings is no epoch of that one.
        """
        self._next = (self._next + 1) % SLOTS
        self._words[SLOTS + self._next] = 0
        return SLOTS + self._next

    def word(self, index: int) -> int:
        """Return what has landed."""
        return int(self._words[index])

    def address_of(self, index: int) -> int:
        """Return where a word is."""
        return self.region.address + index * WORD_NBYTES
