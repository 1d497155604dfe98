"""The thread that copies, one operation after the other.

The kernel's call is synchronous: when it has returned, nothing is under way any more. So an
operation can be given up between two slices, and is quiet at once.
"""

import contextlib
import logging
import os
import queue
import select
import threading
from dataclasses import dataclass
from typing import NamedTuple

from kvbridge.errors import PeerLostError
from kvbridge.transport import Events, Handle, Peer, State
from kvbridge.transport.local.channel import Channel
from kvbridge.transport.local.hub import Hub
from kvbridge.transport.local.library import ScatterCopy
from kvbridge.transport.local.translate import reason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LocalPeer(Peer):
    """A peer with its process and its connection.

    Attributes:
        pid: The process, as its number is here.
        pidfd: Becomes readable when the process ends; its number alone may be given out again.
        channel: Carries our notifications, and ends when the peer closes its transport.
        life: Both, to be asked at once.
    """

    pid: int
    pidfd: int
    channel: Channel
    life: select.poll

    def is_alive(self) -> bool:
        """Ask the kernel. Only in the thread that copies: two at once would raise."""
        # Nothing is ever sent back on the connection, so whatever there is to read is its end.
        return not self.life.poll(0)


class Job(NamedTuple):
    """An operation with all it needs."""

    handle: Handle
    peer: LocalPeer
    copy: ScatterCopy
    notification: bytes


class Copier:
    """Runs jobs in order, and lets go of dropped peers once no job can use them."""

    def __init__(self, hub: Hub, events: Events, slice_nbytes: int) -> None:
        """Start the thread."""
        self._hub = hub
        self._events = events
        self._slice_nbytes = slice_nbytes
        self._closing = False
        self._dropped: set[LocalPeer] = set()
        self._queue: queue.SimpleQueue[Job | LocalPeer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvbridge-local-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; one without bytes is done at once."""
        if job.copy.nbytes:
            self._queue.put(job)
        else:
            self._finish(job)

    def drop(self, peer: LocalPeer) -> None:
        """End the jobs with a peer, then close what belongs to it."""
        self._dropped.add(peer)
        self._queue.put(peer)
        if not self._thread.is_alive():
            self._let_go_of_the_rest()

    def stop(self, timeout_s: float) -> bool:
        """End all jobs; say whether that was possible in time."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._let_go_of_the_rest()
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, LocalPeer):
                self._let_go(item)
            else:
                self._finish(item)

    def _let_go_of_the_rest(self) -> None:
        """Close what came after the end: a peer may be added while all is stopped."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, LocalPeer):
                    self._let_go(item)
                    item.channel.sock.close()

    def _let_go(self, peer: LocalPeer) -> None:
        if not self._closing:  # the hub then sends what is queued before it closes all
            self._hub.release(peer.channel)
        os.close(peer.pidfd)
        self._dropped.discard(peer)

    def _finish(self, job: Job) -> None:
        try:
            why = self._copy(job)
            if not why and job.notification:
                job.peer.channel.send(job.notification)
        except PeerLostError as error:
            why = str(error)
        except OSError as error:
            why = reason(error) if job.peer.is_alive() else "peer gone: its process has ended"
        except Exception as error:
            # A thread that dies here would leave every later operation pending for ever.
            log.exception("operation %d failed", job.handle.id)
            why = f"internal error: {error!r}"
        self._events.ended(job.handle, State.FAILED if why else State.DONE, why)

    def _copy(self, job: Job) -> str:
        copy = job.copy
        while copy.done_nbytes < copy.nbytes:
            why = self._given_up(job)
            if why:
                return f"{why} after {copy.done_nbytes} of {copy.nbytes} bytes"
            copy.advance(self._slice_nbytes)
        # Bytes count only if the process was still the peer when they were copied.
        return "" if not copy.nbytes or job.peer.is_alive() else "peer gone during the copy"

    def _given_up(self, job: Job) -> str:
        if self._closing:
            return "the transport was closed"
        if job.peer in self._dropped:
            return "the peer was dropped"
        if not job.peer.is_alive():
            return "peer gone"
        return "abandoned" if job.handle.abandoned else ""
