"""The thread that posts copies and looks for their ends.

Each piece is a batch of its own. Mooncake's calls for whole batches keep a core busy until all
has ended, or the peer has timed out, and its status of a batch is that of the first piece. Single
pieces are as fast: the copying is done by a thread of Mooncake's, which has some hundred queued.
"""

import contextlib
import logging
import threading
import time

import numpy as np

from kvbridge.errors import TransportError
from kvbridge.transport import Events, State
from kvbridge_mooncake.job import Connection, Job
from kvbridge_mooncake.library import Engine
from kvbridge_mooncake.translate import DONE, FAILED, translate

logger = logging.getLogger(__name__)

# Pieces of one peer in flight: 15 ms of work even if they have 4 KiB each.
WINDOW = 512
# Pieces that are posted to a peer before the others, and what has ended, have their turn.
PIECES_PER_TURN = 128
# With so many in flight there is no hurry to see one end: the core is better used for copying.
DEEP = 32
# Otherwise: turns in which nothing happens before the thread starts to sleep, and how long.
EAGER_TURNS = 20
SLEEP_MIN_S, SLEEP_MAX_S = 20e-6, 500e-6
# Operations in doubt are decided by messages, which wake the thread; this is for those missed.
DOUBT_SLEEP_S = 0.05


class Worker:
    """Owns the engine's transfers.

    Attributes:
        crash: Why the thread ended by itself; empty unless it did.
        kept: Memory of the driver's own that peers may read; it lives as long as the thread.
    """

    def __init__(self, engine: Engine, lanes: int, events: Events) -> None:
        """Start the thread; ``lanes`` is how many sockets the engine opens to each peer."""
        self.crash = ""
        self.kept: list[object] = []
        self._engine = engine
        self._lanes = lanes
        self._events = events
        self._change = threading.Condition()  # guards what follows
        self._known: set[Connection] = set()  # one of each engine is watched until that ends
        self._active: dict[Connection, None] = {}  # those with operations
        self._news = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvbridge-mooncake", daemon=True)
        self._thread.start()

    def enqueue(self, job: Job) -> None:
        """Take an operation; it will be posted soon."""
        with self._change:
            if not len(job.nbytes) and not job.connection.busy:
                self._end(job)
                return
            job.connection.queue.append(job)
            self._activate(job.connection)

    def drop(self, connection: Connection) -> None:
        """Post nothing more with a peer, and close its channel when all is quiet."""
        with self._change:
            connection.dropped = True
            self._activate(connection)

    def wake(self) -> None:
        """Have a look: a channel has news."""
        with self._change:
            self._news = True
            self._change.notify_all()

    def stop(self, timeout_s: float) -> list[Job] | None:
        """End the thread once all is done, or the time is over.

        Returns:
            What has not ended. None if the thread waits for a peer that went silent just when
            Mooncake spoke to it first.
        """
        deadline = time.monotonic() + timeout_s
        with self._change:
            self._change.wait_for(lambda: self.crash or not self._active, timeout_s)
            self._stopping = True
            self._change.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0) + 1.0)
        if self._thread.is_alive():
            return None
        left: dict[Job, None] = {}
        for connection in self._active:
            left |= dict.fromkeys(connection.queue)
            left |= dict.fromkeys(job for _, job in connection.flying)
            left |= dict.fromkeys(connection.doubtful)
        return list(left)

    def let_go(self) -> None:
        """Forget the engine, after :meth:`stop`."""
        del self._engine

    def _activate(self, connection: Connection) -> None:
        self._known.add(connection)
        self._active[connection] = None
        self._news = True
        self._change.notify_all()

    def _run(self) -> None:
        turns = 0
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._stopping or self._active or self._news)
                    if self._stopping:
                        return
                    if self._news:
                        self._look_for_ended()
                    connections = tuple(self._active)
                moved = sum(self._turn(connection) for connection in connections)
                self._retire(connections)
                turns = 0 if moved else turns + 1
                self._pause(turns, sum(len(c.flying) for c in connections))
        except Exception as error:  # a bug of ours: say so in poll, not only on stderr
            logger.exception("the Mooncake worker thread failed")
            with self._change:
                self.crash = f"the worker thread failed: {type(error).__name__}: {error}"
                self._change.notify_all()

    def _pause(self, turns: int, flying: int) -> None:
        if flying >= DEEP:
            time.sleep(SLEEP_MAX_S)
            return
        if turns <= EAGER_TURNS:
            time.sleep(0)
            return
        if flying:
            time.sleep(min(SLEEP_MIN_S * 2.0 ** min(turns - EAGER_TURNS, 10), SLEEP_MAX_S))
            return
        with self._change:
            self._change.wait_for(lambda: self._news or self._stopping, DOUBT_SLEEP_S)

    def _retire(self, connections: tuple[Connection, ...]) -> None:
        with self._change:
            for connection in connections:
                if connection.busy:
                    continue
                del self._active[connection]
                others = self._known - {connection}
                watched = any(other.engine == connection.engine for other in others)
                if connection.dropped and (watched or not connection.has_sockets):
                    connection.channel.close()
                    self._known.discard(connection)
            if not self._active:
                self._change.notify_all()  # stop() may wait for this

    def _look_for_ended(self) -> None:
        self._news = False
        for connection in tuple(self._known):
            if connection.channel.peer_ended and connection.has_sockets:
                connection.has_sockets = False
                self._sweep(connection)
            if connection.dropped and connection.channel.lost and not connection.busy:
                self._known.discard(connection)

    def _sweep(self, connection: Connection) -> None:
        """Use each of Mooncake's sockets to a peer that has ended: else it never closes them."""
        scratch = np.zeros(self._lanes, np.uint64)
        places = scratch.ctypes.data + np.arange(self._lanes, dtype=np.uint64)
        job = Job("read", connection, places, places, np.ones(self._lanes, np.uint64), kept=scratch)
        job.failure = connection.channel.lost
        self._start(connection, job, slice(0, self._lanes))
        self._active[connection] = None

    def _turn(self, connection: Connection) -> int:
        moved = self._collect(connection)
        if connection.queue:
            moved += self._cancel(connection) if connection.gone else self._post(connection)
        if connection.doubtful:
            moved += self._decide(connection)
        return moved

    def _collect(self, connection: Connection) -> int:
        """Take what has ended, in the order in which it was posted."""
        count, flying = 0, connection.flying
        check = self._engine.transfer_check_status
        while flying:
            status = check(flying[0][0])
            if status not in (DONE, FAILED):
                break
            _, job = flying.popleft()
            job.flying -= 1
            count += 1
            if status == FAILED:
                job.in_doubt = True
                job.failure = job.failure or str(
                    translate(status, f"{job.op} with {connection.agent}")
                )
            # One that failed with pieces left is still first in the queue: _post() sees to it.
            queued = bool(connection.queue) and connection.queue[0] is job
            if not (job.flying or queued):
                self._settle(job)
        return count

    def _post(self, connection: Connection) -> int:
        """Post what there is room for."""
        room = min(WINDOW - len(connection.flying), PIECES_PER_TURN)
        count = 0
        while connection.queue and count < room:
            job = connection.queue[0]
            if not job.failure:
                part = slice(job.posted, job.posted + room - count)
                count += self._start(connection, job, part)
            if job.all_posted:
                connection.queue.popleft()
                if not job.flying:
                    self._settle(job)
        return count

    def _start(self, connection: Connection, job: Job, part: slice) -> int:
        """Post a part of an operation's pieces."""
        name, fly, before = connection.engine, connection.flying.append, job.posted
        read, write = self._engine.batch_transfer_async_read, self._engine.transfer_submit_write
        reads = job.op == "read"
        pieces = (job.local[part].tolist(), job.remote[part].tolist(), job.nbytes[part].tolist())
        for local, remote, nbytes in zip(*pieces, strict=True):
            piece = (
                read(name, [local], [remote], [nbytes])
                if reads
                else write(name, local, remote, nbytes)
            )
            if not piece:  # it was not started, so it moves nothing
                job.failure = f"Mooncake does not start a {job.op} with {connection.agent}"
                break
            fly((piece, job))
            job.posted += 1
            job.flying += 1
        return job.posted - before

    def _cancel(self, connection: Connection) -> int:
        """Post nothing more; what is in flight has yet to end."""
        count = 0
        while connection.queue:
            job = connection.queue.popleft()
            job.failure = job.failure or connection.gone
            count += 1
            if not job.flying:
                self._settle(job)
        return count

    def _settle(self, job: Job) -> None:
        """All that was posted has ended: has the operation, too?"""
        if job.in_doubt and not job.connection.channel.peer_ended:
            logger.info("%s; it stays pending until the peer is quiet", job.failure)
            job.connection.doubtful.append(job)
        else:
            self._end(job)

    def _decide(self, connection: Connection) -> int:
        """End the operations that the peer, or its end, has freed of doubt."""
        still = []
        for job in connection.doubtful:
            if connection.channel.peer_ended or connection.channel.is_quiet(job.question):
                self._end(job)
                continue
            still.append(job)
            if not job.question:
                with contextlib.suppress(TransportError):  # lost, or full: then it takes longer
                    job.question = connection.channel.ask_quiet()
        ended = len(connection.doubtful) - len(still)
        connection.doubtful = still
        return ended

    def _end(self, job: Job) -> None:
        if job.notification and not job.failure:
            try:
                job.connection.channel.notify(job.notification)
            except TransportError as error:
                job.failure = f"all bytes have moved, but the notification cannot: {error}"
        job.state = State.FAILED if job.failure else State.DONE
        if job.handle is not None:
            self._events.ended(job.handle, job.state, job.failure)
        job.ended.set()
