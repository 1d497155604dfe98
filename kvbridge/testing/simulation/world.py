"""Virtual time, the one source of chance, and what is written down of a run."""

import hashlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

NESTED_MAX = 3


class Note(NamedTuple):
    """Something that happened.

    Attributes:
        at_s: Virtual time.
        where: Engine or rank where it did; empty for the proxy.
        job: Number of the job that it belongs to; 0 for none.
        text: What it was.
    """

    at_s: float
    where: str
    job: int
    text: str

    def __str__(self) -> str:
        """Write it as one line."""
        job = f"r{self.job}" if self.job else ""
        return f"{self.at_s:10.4f}  {self.where:<12} {job:<7} {self.text}"


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken.

    Attributes:
        rule: Which one.
        text: How.
        job: Number of the job; 0 for none.
        engines: Engines that had a part in it.
        at_s: Virtual time.
    """

    rule: str
    text: str
    job: int
    engines: tuple[str, ...]
    at_s: float


class World:
    """A clock, a queue of what will happen, and a generator that decides everything else.

    Attributes:
        rng: Every choice of a run.
        now_s: Virtual seconds since the start.
        notes: What happened.
        violation: The first promise that was broken; nothing happens after it.
        calm: Whether chance leaves everything new alone, because the run comes to its end.
        rest_s: How long steps of engines are that have nothing to do; 0 for as long as ever.
    """

    def __init__(self, seed: int) -> None:
        """Start at second 0."""
        self.rng = Random(seed)
        self.now_s = 0.0
        self.notes: list[Note] = []
        self.violation: Violation | None = None
        self.calm = False
        self.rest_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count(1)
        self._nested = 0

    def clock(self) -> float:
        """Return the virtual time, as clocks of the code under test."""
        return self.now_s

    def number(self) -> int:
        """Return a number that was not returned before."""
        return next(self._numbers)

    def chance(self, probability: float) -> bool:
        """Decide whether something happens."""
        return not self.calm and self.rng.random() < probability

    def note(self, where: str, job: int, text: str) -> None:
        """Write down what happened."""
        self.notes.append(Note(self.now_s, where, job, text))

    def violate(self, rule: str, text: str, job: int = 0, *engines: str) -> None:
        """Write down that a promise is broken; only the first one counts."""
        if self.violation is None:
            self.violation = Violation(rule, text, job, engines, self.now_s)
            self.note(engines[0] if engines else "", job, f"VIOLATION of {rule!r}: {text}")

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Have something happen later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        """Let everything happen up to some time."""
        events = self._events
        while events and events[0][0] <= until_s and self.violation is None:
            at_s, _, action = heapq.heappop(events)
            self.now_s = max(self.now_s, at_s)
            action()
        self.now_s = max(self.now_s, until_s)

    def block(self, delay_s: float) -> None:
        """Return later, while everything else goes on: what a call in a thread of its own does.

        Calls that block at once come back in the opposite order, so only a few may.
        """
        if self._nested < NESTED_MAX:
            self._nested += 1
            try:
                self.run(self.now_s + delay_s)
            finally:
                self._nested -= 1

    def digest(self) -> str:
        """Return what is equal for runs in which the same happened."""
        return hashlib.sha256("\n".join(map(str, self.notes)).encode()).hexdigest()
