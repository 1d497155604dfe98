"""Keeping one child's trouble from the others."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvbridge.connector.series import CHILD_ERRORS
from kvbridge.connector.stats import Stats
from kvbridge.errors import WrongHalfError

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0

T = TypeVar("T")


class Isolation:
    """What one child may do: it is left alone for a growing while after it has raised.

    Attributes:
        name: Name of the child.
        errors: How often it has raised.
        last_error: What it raised last, in words.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with a child that has done nothing wrong."""
        self.name, self._clock = name, clock
        self.errors = 0
        self.last_error = ""
        self._in_a_row = 0
        self._until_s = 0.0

    @property
    def is_quarantined(self) -> bool:
        """Whether the child is left alone for now."""
        return self._clock() < self._until_s

    def call(self, action: Callable[[], T], otherwise: T) -> T:
        """Return what an action of the child returns; if it raises, what stands for that.

        A child may be anybody's code, so whatever it raises stays here; unless it was called on
        the wrong half, which is the engine's mistake and none of the child's.

        Raises:
            WrongHalfError: It was.
        """
        try:
            result = action()
        except WrongHalfError:
            raise
        except Exception as error:
            self.errors += 1
            self._in_a_row += 1
            pause_s = min(FIRST_PAUSE_S * 2 ** min(self._in_a_row - 1, 16), LONGEST_PAUSE_S)
            self._until_s = self._clock() + pause_s
            self.last_error = f"{type(error).__name__}: {error}"
            _log.exception("connector %r is left alone for %g s", self.name, pause_s)
            return otherwise
        self._in_a_row = 0
        return result


def errors_of(isolations: Iterable[Isolation]) -> Stats:
    """Return how often children have raised."""
    return Stats({(CHILD_ERRORS.name, each.name): each.errors for each in isolations})
