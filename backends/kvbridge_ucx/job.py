"""What the worker works on."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.transport import Descriptors, Ended, Op
from kvbridge_ucx.connections import Route
from kvbridge_ucx.context import Context

UInt64Array = NDArray[np.uint64]

# What is posted by one call, which keeps the interpreter's lock if the pieces are small: so this
# bounds how long the engine's threads may have to wait for it.
PIECES_AT_ONCE = 512
SHORT_NBYTES = 64 << 10
# What UCX has been given cannot be taken back: to close, all of it has to be moved. So it never
# gets all at once, and larger pieces are cut; but a quarter of this costs 8 % over CMA.
NBYTES_AT_ONCE = 64 << 20


@dataclass(slots=True, eq=False)
class Job:
    """One operation on its way.

    Attributes:
        op: What to do.
        route: The peer, and its memory.
        local: Local pieces.
        remote: Remote pieces.
        message: What to send once the bytes are there; empty sends none.
        ended: Is told how it ended.
        served: The owner does it on request.
        posted: Pieces that UCX has been given.
        flushes: How many have not ended.
        reason: Why it will fail, once it is quiet.
        given_up: Nobody waits for it any more, so closing need not.
    """

    op: Op
    route: Route
    local: Descriptors
    remote: Descriptors
    message: bytes
    ended: Ended
    served: bool = False
    posted: int = 0
    flushes: int = 0
    reason: str = ""
    given_up: bool = False
    _rkeys: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Leave out what moves nothing, cut what is too large, and find the key of each piece.

        Raises:
            OutOfBoundsError: A remote piece is outside the peer's regions.
        """
        if not self.local.nbytes.all():
            self.local, self.remote = _without_empty(self.local), _without_empty(self.remote)
        if not self.served:
            if len(self.local) and self.local.nbytes.max() > NBYTES_AT_ONCE:
                self.local, self.remote = _cut(self.local), _cut(self.remote)
            self._rkeys = self.route.keys(self.remote)

    @property
    def all_posted(self) -> bool:
        """Whether UCX has been given all of it."""
        return self.posted == len(self.local) or bool(self.reason)

    def post(self, context: Context) -> "Batch":
        """Give UCX some more pieces; a flush has to follow."""
        sums = self.local.nbytes[self.posted : self.posted + PIECES_AT_ONCE].cumsum()
        count = max(int(np.searchsorted(sums, NBYTES_AT_ONCE, side="right")), 1)
        part = slice(self.posted, self.posted + count)
        nbytes = self.local.nbytes[part]
        requests, status = context.post(
            self.op,
            self.route.connection.endpoint,
            self.local.address[part].tolist(),
            nbytes.tolist(),
            self.remote.address[part].tolist(),
            self._rkeys[part],
            short=bool(nbytes.max() <= SHORT_NBYTES),
        )
        self.posted += count
        self.flushes += 1
        if status < 0:
            self.reason = f"posting a {self.op}: {context.text(status)}"
        return Batch(self, requests, count, int(sums[count - 1]))


class Batch(NamedTuple):
    """Pieces that were posted at once.

    Attributes:
        job: Of what.
        requests: UCX's; those that ended at once have none.
        pieces: How many pieces.
        nbytes: How many bytes.
    """

    job: Job
    requests: list[int]
    pieces: int
    nbytes: int


def _without_empty(pieces: Descriptors) -> Descriptors:
    some = pieces.nbytes > np.uint64(0)
    return _like(pieces, pieces.address[some], pieces.nbytes[some])


def _cut(pieces: Descriptors) -> Descriptors:
    most = np.uint64(NBYTES_AT_ONCE)
    parts = (pieces.nbytes + most - np.uint64(1)) // most
    first = np.repeat(parts.cumsum() - parts, parts.astype(np.intp))
    offset = (np.arange(first.size, dtype=np.uint64) - first) * most
    rest = np.repeat(pieces.nbytes, parts.astype(np.intp)) - offset
    address = np.repeat(pieces.address, parts.astype(np.intp)) + offset
    return _like(pieces, address, np.minimum(rest, most))


def _like(pieces: Descriptors, address: UInt64Array, nbytes: UInt64Array) -> Descriptors:
    return Descriptors(address, nbytes, pieces.memory_kind, pieces.device)
