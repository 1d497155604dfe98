"""Lists of pieces that are taken for others, which are simpler."""

from dataclasses import replace

import numpy as np

from kvbridge.errors import OutOfBoundsError
from kvbridge.transport import Descriptors, Op
from kvbridge.transport.descriptors import UInt64Array
from tests.mutants.base import PieceMutant

CHUNK_NBYTES = 16 << 20


class JoinsWhatTouchesThere(PieceMutant):
    """Pieces that touch at the owner are read as one, wherever they belong here."""

    killed_by = "READ-02"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        if op == "write" or not len(remote):
            return local, remote
        touches = remote.address[1:] == (remote.address + remote.nbytes)[:-1]
        first = np.flatnonzero(np.concatenate(([True], ~touches)))
        nbytes = np.add.reduceat(remote.nbytes, first)
        return (
            replace(local, address=local.address[first], nbytes=nbytes),
            replace(remote, address=remote.address[first], nbytes=nbytes),
        )


class RefusesEmptyLists(PieceMutant):
    """A list without pieces is taken for a mistake of the caller."""

    killed_by = "READ-06"
    says = "nothing to move"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        if not len(local):
            raise OutOfBoundsError("there is nothing to move")
        return local, remote


class TakesZeroForOne(PieceMutant):
    """The hardware moves one byte at least, and nobody keeps empty pieces from it."""

    killed_by = "READ-06"
    says = "bytes moved by operations without bytes"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        nbytes = np.maximum(local.nbytes, np.uint64(1))
        return replace(local, nbytes=nbytes), replace(remote, nbytes=nbytes)


class RepeatsTheFirstChunk(PieceMutant):
    """A large piece is written in chunks, each of which is taken from where the piece begins."""

    killed_by = "WRITE-03"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        if op == "read":
            return local, remote
        count = np.maximum(-(-local.nbytes.astype(np.int64) // CHUNK_NBYTES), 1)
        piece = np.repeat(np.arange(len(local)), count)
        start = (np.arange(len(piece)) - (count.cumsum() - count)[piece]) * CHUNK_NBYTES
        start = start.astype(np.uint64)
        nbytes = np.minimum(local.nbytes[piece] - start, np.uint64(CHUNK_NBYTES))
        return (
            replace(local, address=local.address[piece], nbytes=nbytes),
            replace(remote, address=remote.address[piece] + start, nbytes=nbytes),
        )


class TakesEveryPageForFull(PieceMutant):
    """A list that begins with a run of equal steps is read as runs that are all as long."""

    killed_by = "PLAN-01"
    says = "caches of the consumer"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        if op == "write" or len(np.unique(remote.nbytes)) != 1:
            return local, remote
        return local, replace(remote, address=_as_runs(remote.address))


def _as_runs(address: UInt64Array) -> UInt64Array:
    step = np.diff(address)  # modulo 2**64, as is all that follows
    jump = np.flatnonzero(step != step[:1])
    if not len(jump) or jump[0] < 3:
        return address  # too short a run to be worth it
    length = int(jump[0]) + 1
    within = np.arange(length, dtype=np.uint64) * step[0]
    runs: UInt64Array = (address[::length, None] + within).ravel()[: len(address)]
    return runs


class TrustsTheFirstPieces(PieceMutant):
    """A list whose first eight pieces alternate evenly between two heads is taken to go on so."""

    killed_by = "PLAN-02"
    says = "caches of the consumer"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        step = remote.address[2:] - remote.address[:-2]
        if op == "read" or len(np.unique(remote.nbytes)) != 1 or len(np.unique(step[:6])) != 1:
            return local, remote
        turn = np.arange(len(remote), dtype=np.uint64)
        head = remote.address[(turn % np.uint64(2)).astype(np.intp)]
        return local, replace(remote, address=head + turn // np.uint64(2) * step[0])
