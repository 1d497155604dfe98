"""What is to be done with one peer, in order, and the thread that does it."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import Descriptors, Handle, State
from kvbridge_sockets.link import Link

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """An operation with all it needs."""

    handle: Handle
    local: Descriptors
    remote: Descriptors
    notification: bytes


class Line:
    """Runs jobs one by one, so a job that has ended is quiet, and a job not begun ends at once."""

    def __init__(self, link: Link, end: Callable[[Handle, State, str], object]) -> None:
        """Start the thread; ``end`` is told how each job ended, and why where it failed."""
        self.over = ""
        self._link = link
        self._end = end
        self._queue: queue.SimpleQueue[Job | bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sockets-line", daemon=True)
        self._thread.start()

    def put(self, job: Job | bytes) -> None:
        """Queue an operation, or a notification alone."""
        self._queue.put(job)

    def stop(self, why: str) -> None:
        """Begin no further job; close the link when the one that runs has ended."""
        self.over = self.over or why
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def is_running(self) -> bool:
        """Say whether the thread has not ended yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            why = self.over or self._try(job)
            if isinstance(job, Job):
                self._end(job.handle, State.FAILED if why else State.DONE, why)
            elif why:
                log.warning("a notification was lost: %s", why)
        self._link.close()

    def _try(self, job: Job | bytes) -> str:
        """Do a job; return why it failed, or nothing."""
        try:
            if isinstance(job, bytes):
                self._link.notify(job)
            else:
                self._transfer(job)
        except PeerLostError as error:
            self.over = self.over or str(error)
            return str(error)
        except TransportError as error:
            return str(error)
        except Exception as error:
            # A thread that dies here would leave every later operation pending for ever.
            log.exception("transport 'sockets' has a mistake")
            return f"internal error: {error!r}"
        return ""

    def _transfer(self, job: Job) -> None:
        if job.handle.nbytes:
            self._link.transfer(job.handle.op, job.local, job.remote)
        if job.notification:
            self._link.notify(job.notification)
