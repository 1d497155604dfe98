"""Work that takes time, done beside the engine's steps: digests, and cells put in their places."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from kvbridge.errors import KVBridgeError, PlanError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Beside:
    """Works in one thread, which is made when it is first needed; asked from one thread.

    One is enough: all of this is bound by memory, and none of it may take the cores of the engine.
    """

    def __init__(self, threads: Executor | None = None) -> None:
        """Take where to work; a thread of its own if not given. Shut down at the end."""
        self._threads = threads
        self._running: list[Future[object]] = []

    def start(self, work: Callable[[], T], what: str) -> "Future[T]":
        """Do some work; what it raises is an error of ours.

        Args:
            work: The work.
            what: What it is, for the error message, such as ``"taking digests"``.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvbridge-beside")
        running = self._threads.submit(_guarded, work, what)
        self._running = [each for each in self._running if not each.done()]
        self._running.append(running)  # type: ignore[arg-type]
        return running

    @property
    def is_busy(self) -> bool:
        """Whether some of it goes on, so that memory is being touched."""
        return any(not each.done() for each in self._running)

    def close(self) -> None:
        """Begin nothing more, and wait for what goes on. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


def _guarded(work: Callable[[], T], what: str) -> T:
    """Do some work for somebody else; a fault of this code ends no engine's step."""
    try:
        return work()
    except KVBridgeError:
        raise
    except Exception as error:
        _log.exception("beside the steps, %s failed", what)
        raise PlanError(f"{what} failed: {type(error).__name__}: {error}") from error
