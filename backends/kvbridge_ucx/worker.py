"""The thread that owns UCX: it alone posts, progresses, and hears what arrives."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvbridge.errors import PeerLostError
from kvbridge.transport import (
    Events,
    LocalMemory,
    Region,
    ServedReads,
    State,
    open_notification,
)
from kvbridge_ucx.connections import SETTLE_S, Connection, Connections, Route
from kvbridge_ucx.context import Context
from kvbridge_ucx.job import Batch, Job
from kvbridge_ucx.mailbox import Mailbox
from kvbridge_ucx.memory import MappedMemory
from kvbridge_ucx.peering import AgentCard, path_of
from kvbridge_ucx.serving import UcxCarrier
from kvbridge_ucx.translate import UcxError, translate

logger = logging.getLogger(__name__)

# More than this would only make UCX's queue for a peer longer, and closing slower.
PIECES_IN_FLIGHT_MAX, NBYTES_IN_FLIGHT_MAX = 8192, 64 << 20
# New pieces are posted for this long before those in flight are moved on again.
POST_SLICE_S = 0.001
# Looks that find nothing new before the thread sleeps; and how long, if it waits for a time.
EAGER_LOOKS = 20
TICK_S, IDLE_S = 0.02, 1.0
CLOSE_S = 2.0
# Over these nothing can be written here once UCX has been closed. On others an owner that serves a
# read may copy without any help of this process.
QUIET_ONCE_CLOSED = frozenset({"tcp", "rdma"})


class Worker:
    """Owns the context. Other threads tell it what to do; it does one thing after the other.

    Attributes:
        memory: What UCX knows of this agent's memory.
        tell: Has something done soon, in the order of telling; see :class:`Mailbox`.
        call: Has something done, and returns what it returns.
        crash: Why the thread ended by itself; empty unless it did.
    """

    def __init__(
        self,
        make_context: Callable[[Callable[[str, bytes], None], Callable[[int, int], None]], Context],
        card: AgentCard,
        events: Events,
        memory: LocalMemory,
        memory_kinds: frozenset[str],
    ) -> None:
        """Start UCX and the thread.

        Raises:
            UcxError: UCX refuses to start.
        """
        self._context = make_context(self._receive, self._lose)
        self.memory = MappedMemory(self._context, card.at(self._context.address))
        self.crash = ""
        self._name = card.agent.encode()
        self._connections = Connections(self._context)
        self._served = ServedReads[Route](
            card.agent, UcxCarrier(self), memory, memory_kinds, settle_s=SETTLE_S
        )
        self._backlog: deque[Connection] = deque()  # those that have jobs to post
        self._complete: list[Job] = []
        self._stop_at: float | None = None
        self._events = events
        self._mailbox = Mailbox(self._context.event_fd)
        self.tell, self.call = self._mailbox.tell, self._mailbox.call
        self._thread = threading.Thread(target=self._run, name="kvbridge-ucx", daemon=True)
        self._thread.start()

    # For other threads.

    def start(self, job: Job) -> None:
        """Start an operation soon."""
        self.tell(partial(self.begin, job))

    def stop(self, timeout_s: float) -> bool:
        """End the thread once all is done, or the time is over; say whether it has ended."""
        self._stop_at = time.monotonic() + timeout_s
        self.tell(lambda: None)
        self._thread.join(timeout_s + CLOSE_S + 1.0)
        return not self._thread.is_alive()

    # To be told or called, in the thread.

    def unregister(self, regions: Sequence[Region]) -> None:
        """Retire memory, and unmap it once no peer can touch it any more."""
        self.memory.retire(regions)
        self._unmap_if_alone()

    def join(self, card: AgentCard, rkeys: Sequence[tuple[Region, bytes]]) -> Route:
        """Connect to an agent.

        Raises:
            PeerLostError: UCX knows no way to it.
        """
        try:
            return self._connections.join(card.agent, card.address, rkeys)
        except UcxError as error:  # the card is as its owner made it: only the way is left
            raise PeerLostError(
                f"{translate(error, f'connecting to agent {card.agent}')}; is it alive, and does "
                f"device {card.device!r} there lead here?"
            ) from error

    def begin(self, job: Job) -> None:
        """Start an operation."""
        connection = job.route.connection
        if connection.lost:
            job.ended(State.FAILED, connection.lost)
            return
        connection.jobs.add(job)
        if job.served:
            ended = partial(self._end, job)
            self._served.ask(job.route, job.local, job.remote, job.message, ended)
        elif job.all_posted:  # there is nothing to move
            self._complete.append(job)
        else:
            if not connection.unposted:
                self._backlog.append(connection)
            connection.unposted.append(job)

    def send(self, route: Route, message: bytes) -> None:
        """Send a message.

        Raises:
            PeerLostError: It was not sent.
        """
        if route.lost:
            raise PeerLostError(f"agent {route.agent} is gone: {route.lost}")
        status = self._context.send(route.connection.endpoint, self._name, message)
        if status < 0:
            raise PeerLostError(f"sending to agent {route.agent}: {self._context.text(status)}")

    def notify(self, route: Route, message: bytes) -> None:
        """Send a message that may get lost."""
        try:
            self.send(route, message)
        except PeerLostError as error:
            logger.debug("a message was lost: %s", error)

    def look_at_lanes(self, connection: Connection) -> None:
        """Find out what carries the bytes."""
        connection.path = path_of(self._context.lanes(connection.endpoint))

    def give_up(self, connection: Connection, reason: str) -> None:
        """Close the connection with an agent that has never been heard of."""
        if not connection.met:
            self._connections.lose(connection, reason)

    # The thread.

    def _run(self) -> None:
        looks = 0
        try:
            while not self._may_stop():
                moved = self._mailbox.obey() + self._post() + self._look()
                looks = 0 if moved else looks + 1
                if looks > EAGER_LOOKS:
                    self._sleep()
        except Exception as error:  # a bug of ours: say so in poll, not only on stderr
            logger.exception("the UCX worker thread failed")
            self.crash = f"the worker thread failed: {type(error).__name__}: {error}"
        finally:
            self._mailbox.refuse()
            self._shut_down()
            self._mailbox.close()

    def _may_stop(self) -> bool:
        if self._stop_at is None:
            return False
        jobs = (job for connection in self._connections for job in connection.jobs)
        busy = self._mailbox or not all(job.given_up for job in jobs)
        return not busy or time.monotonic() >= self._stop_at

    def _sleep(self) -> None:
        """Wait until UCX or another thread has something to do."""
        watching = self._served.waiting or self._connections.settling
        self._mailbox.sleep(self._context.arm, TICK_S if watching else IDLE_S)

    def _post(self) -> int:
        posted, until = 0, time.monotonic() + POST_SLICE_S
        for _ in range(len(self._backlog)):
            connection = self._backlog.popleft()
            posted += self._post_some(connection)
            if connection.unposted:
                self._backlog.append(connection)
            if time.monotonic() >= until:
                break
        return posted

    def _post_some(self, connection: Connection) -> int:
        if connection.lost:  # its jobs end once it is quiet
            connection.unposted.clear()
            return 0
        if (
            connection.pieces_in_flight >= PIECES_IN_FLIGHT_MAX
            or connection.nbytes_in_flight >= NBYTES_IN_FLIGHT_MAX
        ):
            return 0
        job = connection.unposted[0]
        batch = job.post(self._context)
        connection.pieces_in_flight += batch.pieces
        connection.nbytes_in_flight += batch.nbytes
        self._context.flush(connection.endpoint, partial(self._flushed, batch))
        if job.all_posted:
            connection.unposted.popleft()
        return batch.pieces

    def _flushed(self, batch: Batch, status: int) -> None:
        job, connection = batch.job, batch.job.route.connection
        connection.pieces_in_flight -= batch.pieces
        connection.nbytes_in_flight -= batch.nbytes
        job.flushes -= 1
        if status < 0:  # UCX gives up the flush at once, but not what it was to wait for
            connection.doubtful += batch.requests
            self._connections.lose(connection, self._said(status))
            return
        self._context.free(batch.requests)
        if job.all_posted and not job.flushes:
            self._complete.append(job)

    def _look(self) -> int:
        # Where a peer died a flush may say OK although nothing was moved. The endpoint fails
        # then, at the latest in the progress that follows: only after that is a job done.
        complete, self._complete = self._complete, []
        moved = self._context.progress() + len(complete)
        for job in complete:
            if not job.route.lost:
                self._end(job, State.FAILED if job.reason else State.DONE, job.reason)
        if self._served.waiting:
            self._served.tick()
        if self._connections.settling:
            for connection in self._connections.settled():
                self._bury(connection)
        return moved

    def _end(self, job: Job, state: State, reason: str) -> None:
        job.route.connection.jobs.discard(job)
        if state is State.DONE and job.message and not job.served:
            self.notify(job.route, job.message)
        job.ended(state, reason)

    def _lose(self, endpoint: int, status: int) -> None:
        self._connections.fail(endpoint, self._said(status))

    def _said(self, status: int) -> str:
        return f"UCX says {self._context.text(status)!r} ({status})"

    def _bury(self, connection: Connection) -> None:
        for job in list(connection.jobs):
            if not job.served:  # those are looked after by the one who asks
                self._end(job, State.FAILED, connection.lost)
        self._unmap_if_alone()

    def _receive(self, sender: str, message: bytes) -> None:
        connection = self._connections.find(sender)
        if connection is not None:
            connection.met = True
        payload = open_notification(message)
        if payload is None:
            self._served.receive(sender, message)
        else:
            self._events.heard(sender, payload)

    def _unmap_if_alone(self) -> None:
        if not any(True for _ in self._connections):
            self.memory.unmap_retired()

    def _shut_down(self) -> None:
        jobs = [job for connection in self._connections for job in connection.jobs]
        try:
            closed = self._connections.close_all(CLOSE_S)
            if closed:
                self.memory.unmap_all()
                self._context.close()
        except UcxError:
            logger.exception("UCX could not be closed")
            closed = False
        for job in jobs if closed else ():
            if not job.served or job.route.connection.path in QUIET_ONCE_CLOSED:
                self._end(job, State.FAILED, "the transport was closed")
