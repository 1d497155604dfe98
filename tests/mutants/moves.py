"""Bytes that are wrong, late, or not alone."""

import time
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from kvbridge.transport import Descriptors, Handle, Op, Peer, Poll
from kvbridge.transport.local.worker import Job
from tests.mutants.base import Copy, CopyMutant, Mutant, PieceMutant, later

MIB = 1 << 20


class LosesTheLastByte(PieceMutant):
    """The last byte of each list is not moved."""

    killed_by = "READ-01"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        nbytes = local.nbytes.copy()
        nbytes[-1:] -= np.minimum(nbytes[-1:], 1)
        return replace(local, nbytes=nbytes), replace(remote, nbytes=nbytes)


class WritesOneByteFurther(PieceMutant):
    """Writes land one byte behind where they belong."""

    killed_by = "WRITE-01"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        shift = np.uint64(op == "write" and remote.total_nbytes > 0)
        return local, replace(remote, address=remote.address + shift)


class SwapsPieces(PieceMutant):
    """The remote pieces are taken in the opposite order."""

    killed_by = "READ-04"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        return local, replace(remote, address=remote.address[::-1])


class MovesTheFirst1024(PieceMutant):
    """What is beyond one vector call of the kernel is forgotten."""

    killed_by = "WRITE-04"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        return tuple(  # type: ignore[return-value]
            replace(side, address=side.address[:1024], nbytes=side.nbytes[:1024])
            for side in (local, remote)
        )


class MovesTheFirst32MiB(PieceMutant):
    """A piece is cut at 32 MiB."""

    killed_by = "READ-03"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        nbytes = np.minimum(local.nbytes, np.uint64(32 * MIB))
        return replace(local, nbytes=nbytes), replace(remote, nbytes=nbytes)


class MergesAcrossGaps(PieceMutant):
    """Neighbours that are less than 64 bytes apart on both sides are moved as one."""

    killed_by = "WRITE-02"
    says = "bytes differ"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        nbytes = local.nbytes.copy()
        gaps = [
            side.address[1:].astype(np.int64) - (side.address + side.nbytes)[:-1].astype(np.int64)
            for side in (local, remote)
        ]
        near = (gaps[0] == gaps[1]) & (gaps[0] > 0) & (gaps[0] < 64)
        nbytes[:-1][near] += gaps[0][near].astype(np.uint64)
        return replace(local, nbytes=nbytes), replace(remote, nbytes=nbytes)


class RoundsUpTo64(CopyMutant):
    """Lengths are rounded up to what the hardware likes, after all checks."""

    killed_by = "READ-05"
    says = "guard bytes"

    def copy(self, job: Job, sound: Copy) -> str:
        copy = job.copy
        for side in (copy._local, copy._remote):
            side[:, 1] = (side[:, 1] + np.uint64(63)) // np.uint64(64) * np.uint64(64)
        copy._ends = np.cumsum(copy._local[:, 1])
        copy.nbytes = int(copy._ends[-1])
        return sound(job)


class IsDoneBeforeTheBytes(CopyMutant):
    """The end is reported when the copy begins."""

    killed_by = "READ-07"
    says = "when poll reported the read"

    def copy(self, job: Job, sound: Copy) -> str:
        later(0.02, lambda: sound(job))
        return ""


class IsDoneWhenItIsPosted(CopyMutant):
    """A write is reported as done while its second half is still on its way."""

    killed_by = "WRITE-07"
    says = "when poll reported the write"

    def copy(self, job: Job, sound: Copy) -> str:
        if job.handle.op == "read":
            return sound(job)
        job.copy.advance(job.copy.nbytes // 2)
        later(0.05, lambda: sound(job))
        return ""


class WritesAgainAfterTheEnd(CopyMutant):
    """A retry that nobody stopped copies once more after the end."""

    killed_by = "READ-08"
    says = "after the end of a read"

    def copy(self, job: Job, sound: Copy) -> str:
        why = sound(job)

        def again() -> None:
            job.copy.done_nbytes = 0
            sound(job)

        later(0.02, again)
        return why


class NeverEndsWhatIsEmpty(Mutant):
    """An operation without bytes is forgotten."""

    killed_by = "WRITE-06"
    says = "is pending after"

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if local.total_nbytes:
            return super().submit(op, peer, local, remote, notification)
        return Handle(op, peer, 0)


class SendsOnceMore(Mutant):
    """What has been written is sent again a little later, as no acknowledgement was looked at."""

    killed_by = "WRITE-08"
    says = "after the end of a write"

    def __init__(self) -> None:
        super().__init__()
        self._unacknowledged: dict[Handle, tuple[Descriptors, Descriptors]] = {}
        self._again: set[Handle] = set()

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        handle = super().submit(op, peer, local, remote, notification)
        if op == "write":
            self._unacknowledged[handle] = local, remote
        return handle

    def poll(self) -> Poll:
        polled = super().poll()
        for handle in {end.handle for end in polled.finished} & set(self._unacknowledged):
            later(0.02, partial(self._send_again, handle.peer, *self._unacknowledged.pop(handle)))
        ended = [end for end in polled.finished if end.handle not in self._again]
        return Poll(tuple(ended), polled.notifications)

    def _send_again(self, peer: Peer, local: Descriptors, remote: Descriptors) -> None:
        self._again.add(super().submit("write", peer, local, remote))


class SubmitWaits(Mutant):
    """Submit returns when the bytes are there."""

    waits: ClassVar[Op]
    _early = Poll()

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        handle = super().submit(op, peer, local, remote, notification)
        while op == self.waits and handle not in {end.handle for end in self._early.finished}:
            self._early = self.poll()
            time.sleep(0.0002)
        return handle

    def poll(self) -> Poll:
        (ended, heard), self._early = self._early, Poll()
        polled = super().poll()
        return Poll(ended + polled.finished, heard + polled.notifications)


class SubmitWaitsForTheAnswer(SubmitWaits):
    """A read is asked for and answered before submit returns."""

    killed_by = "READ-10"
    says = "submit took"
    waits = "read"


class SubmitSends(SubmitWaits):
    """A write is sent by the thread that submits it."""

    killed_by = "WRITE-10"
    says = "submit took"
    waits = "write"
