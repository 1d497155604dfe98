"""What has happened to an agent, between the thread that sees it and the next ``poll``."""

import threading
from collections import deque
from typing import TypeVar

from kvbridge.transport.base import Finished, Handle, Notification, Poll, State
from kvbridge.transport.memory import LocalMemory

_Item = TypeVar("_Item")


class Events:
    """Collects what has ended and what peers sent; any thread may tell, one takes."""

    def __init__(self, memory: LocalMemory) -> None:
        """Start with nothing; ``memory`` is where ended operations had theirs pinned."""
        self._memory = memory
        self.finished: deque[Finished] = deque()
        self.notifications: deque[Notification] = deque()
        self._news = threading.Event()

    def ended(self, handle: Handle, state: State, reason: str = "") -> None:
        """Note that an operation is quiet, once for each; ``reason`` says why it failed."""
        self._memory.unpin(handle.pinned)
        self.finished.append(Finished(handle, state, reason))
        self._news.set()

    def heard(self, sender: str, payload: bytes) -> None:
        """Note what a peer sent."""
        self.notifications.append(Notification(sender, payload))
        self._news.set()

    def take(self) -> Poll:
        """Return what was told since the last call."""
        self._news.clear()  # first: what is told from now on is news, though it is taken here
        return Poll(_drain(self.finished), _drain(self.notifications))

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has been told since the last :meth:`take`; say whether it has."""
        return self._news.wait(timeout_s)


def _drain(items: deque[_Item]) -> tuple[_Item, ...]:
    # Only one thread takes, so what is counted is there; what comes meanwhile waits.
    return tuple(items.popleft() for _ in range(len(items)))
