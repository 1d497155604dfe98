"""What the polls of a transport have returned so far, held against the contract."""

import time
from collections.abc import Callable

from kvbridge.testing.violations import RuleViolationError
from kvbridge.transport import Finished, Handle, Notification, State, Transport


class HangingError(TimeoutError):
    """Something did not happen in time."""


class Poller:
    """Polls, and complains about reports that no transport may make.

    Attributes:
        transport: What is polled.
        finished: Every operation that was reported.
        notifications: What has come and was not taken yet.
    """

    def __init__(self, transport: Transport, *, knows_all: bool = True) -> None:
        """Start with nothing submitted.

        Args:
            transport: What to poll.
            knows_all: Whether every handle is given to :meth:`keep`.
        """
        self.transport = transport
        self.finished: dict[Handle, Finished] = {}
        self.notifications: list[Notification] = []
        self._submitted: set[Handle] | None = set() if knows_all else None

    def keep(self, handle: Handle) -> Handle:
        """Note what ``submit`` has returned."""
        if self._submitted is not None:
            self._submitted.add(handle)
        return handle

    def pump(self) -> None:
        """Poll once.

        Raises:
            RuleViolationError: An operation is reported twice, was never submitted, or is not
                reported as ended.
        """
        finished, notifications = self.transport.poll()
        for end in finished:
            if self._submitted is not None and end.handle not in self._submitted:
                raise RuleViolationError("poll reported a handle that submit has not returned")
            if end.handle in self.finished:
                raise RuleViolationError(f"poll reported operation {end.handle.id} twice")
            if end.state not in (State.DONE, State.FAILED):
                raise RuleViolationError(f"poll reported an operation as {end.state}")
            self.finished[end.handle] = end
        self.notifications.extend(notifications)

    def wait(self, handle: Handle, timeout_s: float) -> Finished:
        """Poll until an operation has ended.

        Raises:
            HangingError: It is still pending.
        """
        if not self._until(lambda: handle in self.finished, timeout_s):
            raise HangingError(f"operation {handle.id} is pending after {timeout_s:g} s")
        return self.finished[handle]

    def wait_notifications(self, count: int, timeout_s: float) -> list[Notification]:
        """Poll until so many notifications are there or the time is over, and take them all."""
        self._until(lambda: len(self.notifications) >= count, timeout_s)
        taken, self.notifications = self.notifications, []
        return taken

    def wait_and_pump(self, condition: Callable[[], bool], each_s: float) -> float:
        """Have the transport wait and poll it, in turns, until something is so.

        Args:
            condition: That.
            each_s: What each wait is given.

        Returns:
            How long it took.

        Raises:
            HangingError: It is not so when a second wait would have been over, too.
        """
        start = time.monotonic()
        while not condition():
            if time.monotonic() > start + 2 * each_s:
                raise HangingError(f"nothing came of waits of {each_s:g} s each")
            self.transport.wait(each_s)
            self.pump()
        return time.monotonic() - start

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.pump()
            time.sleep(0)
        return True
