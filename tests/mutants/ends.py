"""Operations whose end is reported wrongly, or not at all."""

import contextlib
import ctypes
import time
from pathlib import Path

from kvbridge.transport import Descriptors, Finished, Handle, Op, Peer, Poll, State
from kvbridge.transport.local.worker import Job
from tests.mutants.base import CapabilityMutant, Copy, CopyMutant, Mutant, later, reason_of


class ReportsTwice(Mutant):
    """Each end is reported by two polls."""

    killed_by = "READ-09"
    says = "twice"
    _before: tuple[Finished, ...] = ()

    def poll(self) -> Poll:
        polled = super().poll()
        before, self._before = self._before, polled.finished
        return Poll(before + polled.finished, polled.notifications)


class ReportsAForeignHandle(Mutant):
    """What poll reports is equal to what submit returned, but not the same."""

    killed_by = "READ-09"
    says = "a handle that submit has not returned"

    def poll(self) -> Poll:
        polled = super().poll()
        ended = [end._replace(handle=_copy_of(end.handle)) for end in polled.finished]
        return Poll(tuple(ended), polled.notifications)


def _copy_of(handle: Handle) -> Handle:
    return Handle(handle.op, handle.peer, handle.nbytes, handle.pinned, handle.id)


class LosesEveryTenthEnd(Mutant):
    """One end of ten is not reported."""

    killed_by = "WRITE-09"
    says = "is pending after"
    _count = 0

    def poll(self) -> Poll:
        polled = super().poll()
        kept = []
        for end in polled.finished:
            self._count += 1
            if self._count % 10:
                kept.append(end)
        return Poll(tuple(kept), polled.notifications)


class ForgetsTheAbandoned(Mutant):
    """An abandoned operation is never reported."""

    killed_by = "ABANDON-01"
    says = "is pending after"

    def __init__(self) -> None:
        super().__init__()
        self._abandoned: set[Handle] = set()

    def abandon(self, handle: Handle) -> None:
        super().abandon(handle)
        self._abandoned.add(handle)

    def poll(self) -> Poll:
        polled = super().poll()
        ended = [end for end in polled.finished if end.handle not in self._abandoned]
        return Poll(tuple(ended), polled.notifications)


class AbandonIsRefused(Mutant):
    """An operation that is on its way cannot be abandoned."""

    killed_by = "ABANDON-04"
    says = "NotImplementedError"

    def abandon(self, handle: Handle) -> None:
        raise NotImplementedError


class EndsWhatIsAbandoned(Mutant):
    """An abandoned operation is reported at once, while its bytes are still on their way."""

    killed_by = "ABANDON-02"
    says = "bytes came after the end"

    def __init__(self) -> None:
        super().__init__()
        self._abandoned: dict[Handle, bool] = {}  # whether it was reported

    def abandon(self, handle: Handle) -> None:
        self._abandoned.setdefault(handle, False)

    def poll(self) -> Poll:
        polled = super().poll()
        ended = [end for end in polled.finished if not self._abandoned.get(end.handle)]
        at_once = [h for h, reported in self._abandoned.items() if not reported]
        at_once = [h for h in at_once if h not in {end.handle for end in ended}]
        self._abandoned = dict.fromkeys(self._abandoned, True)
        given_up = tuple(Finished(handle, State.FAILED, "abandoned") for handle in at_once)
        return Poll((*ended, *given_up), polled.notifications)


class FreesWhatIsAbandoned(Mutant):
    """Memory of an abandoned operation may be taken back although bytes still come."""

    killed_by = "ABANDON-03"
    says = "still pending"

    def abandon(self, handle: Handle) -> None:
        pinned, handle.pinned = handle.pinned, frozenset()
        with contextlib.suppress(KeyError):  # it may have ended just now
            self.memory.unpin(pinned)


class SwallowsErrors(CopyMutant):
    """Whatever goes wrong, the operation is done."""

    killed_by = "FAIL-01"
    says = "is reported as done, although the owner was killed"

    def copy(self, job: Job, sound: Copy) -> str:
        with contextlib.suppress(OSError):
            sound(job)
        return ""


class WritesAfterAFailure(CopyMutant):
    """Some bytes of a failed read come later."""

    killed_by = "FAIL-01"
    says = "destination of reads that have ended"

    def copy(self, job: Job, sound: Copy) -> str:
        why = reason_of(job, sound)
        if why and job.handle.op == "read":
            address = int(job.copy._local[0, 0])
            later(0.05, lambda: ctypes.memset(address, 0x66, 100))
        return why


class FailsDirtily(CapabilityMutant, CopyMutant):
    """A failure that is declared clean leaves something behind."""

    killed_by = "FAIL-09"
    says = "destination of a failed"
    changes = {"failure_is_clean": True}
    declares_a_lie = True

    def copy(self, job: Job, sound: Copy) -> str:
        why = reason_of(job, sound)
        if why and job.handle.op == "read":
            ctypes.memset(int(job.copy._local[0, 0]), 0x66, 100)
        return why


class LosesAllPeersAtOnce(CopyMutant):
    """When one peer is lost, the operations with all others fail."""

    killed_by = "FAIL-04"
    says = "with a peer that lives failed"
    _lost = ""

    def copy(self, job: Job, sound: Copy) -> str:
        self._lost = self._lost or reason_of(job, sound)
        return self._lost


class WaitsForTheOwner(CopyMutant):
    """A copy begins when the owner's process runs, although that is declared passive."""

    killed_by = "FAIL-07"
    says = "is pending after"

    def copy(self, job: Job, sound: Copy) -> str:
        status = Path(f"/proc/{job.peer.pid}/status")
        while "T (stopped)" in status.read_text():
            time.sleep(0.01)
        return sound(job)


class GivesNoReason(Mutant):
    """A failed operation does not say why."""

    killed_by = "FAIL-02"
    says = "gives no reason"

    def poll(self) -> Poll:
        polled = super().poll()
        return Poll(tuple(e._replace(reason="") for e in polled.finished), polled.notifications)


class PollRaises(Mutant):
    """A failed operation makes poll raise."""

    killed_by = "FAIL-01"
    says = "ZeroDivisionError"

    def poll(self) -> Poll:
        polled = super().poll()
        if any(end.state is State.FAILED for end in polled.finished):
            raise ZeroDivisionError
        return polled


class LosesWhatIsBeyondItsQueue(CapabilityMutant):
    """The ninth operation in flight is lost, though eight are declared as the most."""

    killed_by = "LIMIT-06"
    says = "is pending after"
    changes = {"inflight_max": 8}
    _flying = 0

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if self._flying == 8:
            return Handle(op, peer, local.total_nbytes)
        self._flying += 1
        return super().submit(op, peer, local, remote, notification)

    def poll(self) -> Poll:
        polled = super().poll()
        self._flying -= len(polled.finished)
        return polled


class DropLeavesOperations(Mutant):
    """The operations of a dropped peer are never reported."""

    killed_by = "PEER-08"
    says = "is pending after"

    def __init__(self) -> None:
        super().__init__()
        self._gone: set[Peer] = set()

    def drop_peer(self, peer: Peer) -> None:
        super().drop_peer(peer)
        self._gone.add(peer)

    def poll(self) -> Poll:
        polled = super().poll()
        ended = [end for end in polled.finished if end.handle.peer not in self._gone]
        return Poll(tuple(ended), polled.notifications)
