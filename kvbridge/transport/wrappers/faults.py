"""What shall go wrong, as a value, and the dice that follow it."""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

from msgspec import Meta

from kvbridge.config import Config
from kvbridge.errors import ConfigError
from kvbridge.transport.wrappers.base import WrapperConfig

What = Literal["fail", "drop", "delay", "reorder", "duplicate"]

_POSSIBLE: dict[str, frozenset[What]] = {
    "operations": frozenset({"fail", "drop", "delay", "reorder", "duplicate"}),
    "notifications": frozenset({"drop", "delay", "reorder", "duplicate"}),
    "peering": frozenset({"fail", "drop", "delay"}),
}

T = TypeVar("T")


class Fault(Config, frozen=True):
    """One way to go wrong, and which events it hits.

    Attributes:
        what: ``fail``: ends badly. ``drop``: is never heard of. ``delay``: is heard of later.
            ``reorder``: is heard of after its successor. ``duplicate``: is heard of twice.
        at: Numbers of the events that are hit for certain, counted from 0.
        share: Share of all other events that are hit, drawn from the seed.
        delay_s: How long a delayed event waits, and a reordered one at most.
    """

    what: What
    at: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    delay_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.01


class Faults(WrapperConfig, frozen=True):
    """All that shall go wrong; nothing by default.

    A ``duplicate`` operation, and a notification of a live peer that is dropped or duplicated,
    are things that no correct transport does; they happen only where they are asked for.

    Attributes:
        operations: What happens to operations, counted as they are submitted.
        notifications: What happens to notifications, counted as they arrive *here*.
        peering: What happens to calls of ``add_peer``.
        seed: Equal seeds draw equal faults.
    """

    operations: tuple[Fault, ...] = ()
    notifications: tuple[Fault, ...] = ()
    peering: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse faults that their events cannot have.

        Raises:
            ConfigError: There is one, or more than all events shall be hit.
        """
        for events, possible in _POSSIBLE.items():
            faults: tuple[Fault, ...] = getattr(self, events)
            for fault in faults:
                if fault.what not in possible:
                    raise ConfigError(
                        f"{events} cannot {fault.what!r}; possible: {', '.join(sorted(possible))}"
                    )
            if sum(fault.share for fault in faults) > 1 + 1e-9:
                raise ConfigError(f"the shares of {events} add up to more than 1")


class Dice:
    """Says which fault the next event of one kind has. Safe to use from several threads."""

    def __init__(self, faults: tuple[Fault, ...], seed: str) -> None:
        """Start to count at 0."""
        self._faults = faults
        self._certain = {at: fault for fault in reversed(faults) for at in fault.at}
        self._numbers = itertools.count()
        self._random = random.Random(seed)  # noqa: S311  # repeatable is what is wanted

    def throw(self) -> Fault | None:
        """Return the fault of the next event, if it has one."""
        number, drawn = next(self._numbers), self._random.random()
        if number in self._certain:
            return self._certain[number]
        for fault in self._faults:
            if drawn < fault.share:
                return fault
            drawn -= fault.share
        return None


@dataclass(slots=True)
class _Waiting(Generic[T]):
    item: T
    due_s: float
    can_be_overtaken: bool


class DelayLine(Generic[T]):
    """Where events wait that are late or out of order."""

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: list[_Waiting[T]] = []

    def through(self, arrived: Iterable[tuple[T, Fault | None]], now_s: float) -> list[T]:
        """Take what has arrived; return what is to be heard of now, in order."""
        heard = self._take(lambda waiting: waiting.due_s <= now_s)
        for item, fault in arrived:
            what = fault.what if fault else None
            if fault and what in ("delay", "reorder"):
                self._waiting.append(_Waiting(item, now_s + fault.delay_s, what == "reorder"))
            elif what != "drop":
                heard += [item, item] if what == "duplicate" else [item]
                heard += self._take(lambda waiting: waiting.can_be_overtaken)
        return heard

    def add_due(self, item: T) -> None:
        """Have one more event heard of at once."""
        self._waiting.append(_Waiting(item, -math.inf, can_be_overtaken=False))

    def end(self) -> None:
        """Have everything heard of at once."""
        for waiting in self._waiting:
            waiting.due_s = -math.inf

    def _take(self, wanted: Callable[[_Waiting[T]], bool]) -> list[T]:
        taken = [waiting for waiting in self._waiting if wanted(waiting)]
        self._waiting = [waiting for waiting in self._waiting if not wanted(waiting)]
        return [waiting.item for waiting in taken]
