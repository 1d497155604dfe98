"""What other threads want done, and how they wake the one that does it."""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvbridge.errors import KVBridgeError, TransportError
from kvbridge_ucx.translate import UcxError

T = TypeVar("T")


class Mailbox:
    """Commands for one thread, which does one after the other."""

    def __init__(self, event_fd: int) -> None:
        """Start empty; ``event_fd`` becomes readable when there is something else to do."""
        self._commands: deque[tuple[Callable[[], object], Future[None] | None]] = deque()
        self._closed = self._asleep = False
        self._waking = threading.Lock()  # nobody is woken through a descriptor that was closed
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for fd in (self._wake_fd, event_fd):
            self._poller.register(fd, select.POLLIN)

    def __len__(self) -> int:
        """Return how many commands wait."""
        return len(self._commands)

    # For other threads.

    def tell(self, command: Callable[[], object], done: Future[None] | None = None) -> None:
        """Have something done soon, in the order of telling."""
        self._commands.append((command, done))
        with self._waking:
            if not self._closed:
                if self._asleep:
                    os.eventfd_write(self._wake_fd, 1)
                return
        self._refuse()

    def call(self, function: Callable[[], T]) -> T:
        """Have something done, and return what it returns.

        Raises:
            TransportError: The thread has ended.
        """
        results: list[T] = []
        done: Future[None] = Future()
        self.tell(lambda: results.append(function()), done)
        done.result()
        return results[0]

    # For the thread that obeys.

    def obey(self) -> int:
        """Do what was told; return how much."""
        obeyed = 0
        while self._commands:
            command, done = self._commands.popleft()
            obeyed += 1
            if done is None:
                command()
                continue
            try:
                command()
            except (KVBridgeError, UcxError) as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(TransportError(f"transport 'ucx' is broken: {error!r}"))
                raise
            else:
                done.set_result(None)
        return obeyed

    def sleep(self, may_sleep: Callable[[], bool], timeout_s: float) -> None:
        """Wait until there is something to do, if ``may_sleep`` still agrees."""
        self._asleep = True
        if not self._commands and may_sleep():
            self._poller.poll(1000 * timeout_s)
        self._asleep = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def refuse(self) -> None:
        """Refuse what waits, and all that is told from now on."""
        with self._waking:
            self._closed = True
        self._refuse()

    def close(self) -> None:
        """Close the descriptor, after :meth:`refuse`."""
        os.close(self._wake_fd)

    def _refuse(self) -> None:
        while self._commands:
            _, done = self._commands.popleft()
            if done is not None:
                done.set_exception(TransportError("transport 'ucx' was closed meanwhile"))
