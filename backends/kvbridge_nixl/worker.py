"""The thread that posts and polls: on one host NIXL copies inside its post call."""

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from kvbridge.transport import Events, ServedReads, State, open_notification
from kvbridge_nixl.connections import Connection, Connections
from kvbridge_nixl.job import MEMORY_TYPES, Job, rows
from kvbridge_nixl.library import Agent
from kvbridge_nixl.translate import is_disconnect, translate

logger = logging.getLogger(__name__)

# Once a peer is lost NIXL answers no more questions about its operations, while UCX still ends
# them in a thread of its own. That takes milliseconds; nothing is called quiet before this. It
# holds for what the peer writes, too: both directions share one connection, and that has ended.
SETTLE_S = 0.1
# New operations are posted for this long before those in flight are looked at again.
POST_SLICE_S = 0.001
# How long the end of the process may wait for a call into NIXL that copies.
EXIT_S = 5.0
# Looks that find nothing new before the thread starts to sleep.
EAGER_LOOKS = 20
# It sleeps for this part of the time that nothing has happened, so that what comes next waits no
# more than that much longer; but not longer than this while operations are in flight, or idle.
SLEEP_SHARE = 1 / 16
SLEEP_MIN_S, SLEEP_BUSY_MAX_S, SLEEP_IDLE_MAX_S = 50e-6, 1e-3, 5e-3


class Worker:
    """Owns the agent: posts, polls, collects notifications, and serves the reads of peers.

    Attributes:
        errors: The exceptions of NIXL.
        connections: The remote agents.
        crash: Why the thread ended by itself; empty unless it did.
        kept: Memory of the driver's own that peers may write to; it lives as long as the agent.
    """

    def __init__(self, agent: Agent, errors: tuple[type[Exception], ...], events: Events) -> None:
        """Prepare everything but the thread."""
        self.errors = errors
        self.crash = ""
        self.kept: list[Any] = []
        self._agent = agent
        self._events = events
        self._library = threading.Lock()  # held around calls into NIXL
        self._guests = 0  # other threads that wait for it
        self._change = threading.Condition(threading.RLock())  # guards all that follows
        self.connections = Connections(self._change)
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self._questions: deque[tuple[str, bytes]] = deque()  # and answers, with who sent them
        self._stopping = False
        self._served: ServedReads[Connection]
        self._thread = threading.Thread(target=self._run, name="kvbridge-nixl", daemon=True)

    def start(self, served: ServedReads[Connection]) -> None:
        """Start the thread, which alone uses ``served``."""
        self._served = served
        self._thread.start()
        atexit.register(self._end_before_the_interpreter, os.getpid())

    @contextlib.contextmanager
    def library(self) -> Iterator[Agent]:
        """Have the agent alone. Some of its calls keep the GIL while they wait for a post."""
        with self._change:
            self._guests += 1
        with self._library:
            with self._change:
                self._guests -= 1
            yield self._agent

    def enqueue(self, job: Job) -> None:
        """Take an operation; it will be posted soon."""
        with self._change:
            self.connections.begin(job.connection)
            self._queue.append(job)
            self._change.notify_all()

    def join(self, name: str, metadata: bytes) -> Connection:
        """Make a remote agent known to NIXL, from within the thread."""
        return self.connections.join(self._agent, name, metadata)

    def send(self, connection: Connection, message: bytes) -> None:
        """Send a message at once; NIXL lets this happen beside a post."""
        try:
            self._agent.send_notif(connection.agent, message)
        except self.errors as error:
            translated = translate(error, f"notifying {connection.agent}")
            if is_disconnect(error):
                self.connections.lose(connection, str(translated))
            raise translated from error

    def collect(self) -> None:
        """Fetch what has arrived."""
        # While the thread works it collects the notifications itself; nobody waits for it here.
        if not self._stopping and self._library.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._library.release()

    def stop(self, timeout_s: float) -> bool:
        """End the thread once all is done, or the time is over; say whether it ended."""
        deadline = time.monotonic() + timeout_s
        with self._change:
            self._change.wait_for(lambda: self.crash or not self._busy(), timeout_s)
        self._ask_to_end()
        # A post call cannot be interrupted, but it copies at memory speed.
        self._thread.join(max(deadline - time.monotonic(), 0) + 1.0)
        if self._thread.is_alive():
            return False
        atexit.unregister(self._end_before_the_interpreter)
        while self._queue:
            self._end(self._queue.popleft(), State.FAILED, "the transport was closed before it")
        return True

    def let_go(self, registered: Iterable[Any]) -> None:
        """Drop the agent, after :meth:`stop`: NIXL has no call to close it."""
        for job in self._running:  # a request keeps the agent alive
            job.release(self.errors)
        try:
            self.connections.remove_all(self._agent)
            for handle in registered:
                self._agent.deregister_memory(handle)
        except self.errors as error:
            logger.debug("%s", translate(error, "closing"))
        del self._agent
        self.kept.clear()

    def _ask_to_end(self) -> None:
        with self._change:
            self._stopping = True
            self._change.notify_all()

    def _end_before_the_interpreter(self, pid: int) -> None:
        """End the thread at the end of the process, if nobody has closed the transport.

        A thread that comes back from a C++ call to an interpreter that has ended aborts it.
        """
        if os.getpid() == pid:
            self._ask_to_end()
            self._thread.join(EXIT_S)

    def _busy(self) -> bool:
        return bool(self._queue or self._running or self._served.waiting)

    def _run(self) -> None:
        looks, moved_at = 0, time.monotonic()
        try:
            while not self._stopping:
                with self._library:
                    moved = self._post_queued() + self._look() + self._collect() + self._serve()
                    self.connections.remove_unused(self._agent)
                if moved:
                    looks, moved_at = 0, time.monotonic()
                looks += 1
                self._pause(looks, moved_at)
        except Exception as error:  # a bug of ours: say so in poll, not only on stderr
            logger.exception("the NIXL worker thread failed")
            self.crash = f"the worker thread failed: {type(error).__name__}: {error}"

    def _pause(self, looks: int, moved_at: float) -> None:
        if looks <= EAGER_LOOKS and not self._guests:
            time.sleep(0)
            return
        share_s = max((time.monotonic() - moved_at) * SLEEP_SHARE, SLEEP_MIN_S)
        with self._change:
            if not (self._queue or self._questions or self._stopping) or self._guests:
                most_s = SLEEP_BUSY_MAX_S if self._busy() else SLEEP_IDLE_MAX_S
                self._change.wait(min(share_s, most_s))

    def _post_queued(self) -> int:
        posted, until = 0, time.monotonic() + POST_SLICE_S
        while self._queue and not self._guests and (not posted or time.monotonic() < until):
            with self._change:
                job = self._queue.popleft()
                self._running.append(job)
            if not self._post(job):
                with self._change:
                    self._running.remove(job)
            posted += 1
        return posted

    def _look(self) -> int:
        still = [job for job in self._running if self._check(job)]
        ended = len(self._running) - len(still)
        with self._change:
            self._running = still
            self._change.notify_all()  # stop() may wait for this
        return ended

    def _post(self, job: Job) -> bool:
        """Start a job; say whether it is now in flight."""
        if job.connection.lost:
            return self._end(job, State.FAILED, job.connection.lost)
        if job.served:
            ended = partial(self._end, job)
            self._served.ask(job.connection, job.local, job.remote, job.message, ended)
            return False
        try:
            local = rows(job.local)
            if not len(local):  # NIXL knows no empty list
                if job.message:
                    self._agent.send_notif(job.connection.agent, job.message)
                return self._end(job, State.DONE)
            job.request = self._agent.initialize_xfer(
                job.op.upper(),
                self._agent.get_xfer_descs(local, MEMORY_TYPES[job.local.memory_kind]),
                self._agent.get_xfer_descs(rows(job.remote), MEMORY_TYPES[job.remote.memory_kind]),
                job.connection.agent,
                job.message,
            )
        except self.errors as error:  # nothing was posted, so nothing moves
            if is_disconnect(error):
                self.connections.lose(job.connection, str(translate(error, "the peer is gone")))
            return self._end(job, State.FAILED, str(translate(error, f"cannot start {job.op}")))
        try:
            done = self._agent.transfer(job.request) == "DONE"
        except self.errors as error:
            self._judge(job, error)
            return True
        return not done or self._end(job, State.DONE)

    def _check(self, job: Job) -> bool:
        """Look at a job in flight; say whether it still is."""
        connection = job.connection
        if connection.lost:
            if time.monotonic() < connection.lost_at + SETTLE_S:
                return True
            return self._end(job, State.FAILED, connection.lost)
        if job.doubt or job.request is None:
            return True
        try:
            if self._agent.check_xfer_state(job.request) != "DONE":
                return True
        except self.errors as error:
            self._judge(job, error)
            return True
        return self._end(job, State.DONE)

    def _judge(self, job: Job, error: Exception) -> None:
        """A job in flight failed: is its peer gone, or may it still move bytes?"""
        if is_disconnect(error):
            # The kernel's refusal to copy, as into a read-only mapping, looks the same here.
            gone = "the peer is gone, or memory of one side cannot be accessed"
            self.connections.lose(job.connection, str(translate(error, gone)))
        elif not job.connection.lost:
            job.doubt = str(translate(error, f"{job.op} with {job.connection.agent}"))
            logger.warning("%s; it may still move bytes, so it stays pending", job.doubt)

    def _end(self, job: Job, state: State, reason: str = "") -> bool:
        job.release(self.errors)
        job.state, job.reason = state, reason
        with self._change:
            self.connections.end(job.connection)
        if job.then is not None:
            job.then(state, reason)
        job.ended.set()
        return False

    def _collect(self) -> int:
        try:
            arrived = self._agent.get_new_notifs()
        except self.errors as error:
            logger.warning("%s", translate(error, "collecting notifications"))
            return 0
        with self._change:
            for sender, messages in arrived.items():
                for message in messages:
                    payload = open_notification(message)
                    if payload is None:
                        self._questions.append((sender, message))
                    else:
                        self._events.heard(sender, payload)
            if self._questions:
                self._change.notify_all()  # it may be another thread that has collected them
        return len(arrived)

    def _serve(self) -> int:
        handled = 0
        while self._questions and not self._guests:
            self._served.receive(*self._questions.popleft())
            handled += 1
        self._served.tick()
        return handled
