"""What nearly every rule begins with, and why it need not fail a hundred times."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvbridge.errors import KVBridgeError
from kvbridge.testing.violations import RuleViolationError


class FirstStep:
    """A step that nearly every rule begins with, such as to open an agent.

    Where it has never worked and fails twice in the same words, it is not tried again: what is not
    written yet would take minutes to say one thing for each rule.
    """

    def __init__(self, what: str) -> None:
        """Name it."""
        self._what = what
        self.worked = False
        self._failure = ""
        self._hopeless = False

    def check(self) -> None:
        """Break the rule where trying is useless."""
        if self._hopeless:
            raise RuleViolationError(self._failure)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Break the rule where the block raises, and remember why."""
        self.check()
        try:
            yield
        except (KVBridgeError, RuleViolationError) as error:
            name = "" if isinstance(error, RuleViolationError) else f"{type(error).__name__}: "
            failure = f"{self._what}: {name}{error}"
            self._hopeless = not self.worked and failure == self._failure
            self._failure = failure
            raise RuleViolationError(failure) from error
        self.worked = True
