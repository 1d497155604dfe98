"""What has happened of late, as a line of the log."""

import logging
import math
from collections.abc import Callable

from kvbridge.connector.series import (
    LEASES_EXPIRED,
    LEASES_HELD,
    OFFERS,
    PUSHES,
    QUARANTINED,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
    Series,
)
from kvbridge.connector.stats import Stats

_log = logging.getLogger(__name__)


class Summary:
    """Says at intervals what has been counted since the last time, if that is anything."""

    def __init__(
        self, who: str, stats: Callable[[], Stats], interval_s: float, clock: Callable[[], float]
    ) -> None:
        """Begin the first interval.

        Args:
            who: Whose counts they are, in words.
            stats: Returns them.
            interval_s: How often to look; 0 for never.
            clock: Seconds that never run backwards.
        """
        self._who, self._stats, self._interval_s, self._clock = who, stats, interval_s, clock
        self._before, self._since_s = Stats(), clock()

    def poll(self) -> None:
        """Say it if it is time; whoever counts calls this now and then."""
        seconds = self._clock() - self._since_s
        if not self._interval_s or seconds < self._interval_s:
            return
        now = self._stats()
        recent, self._before = now.since(self._before), now
        self._since_s += seconds
        said = described(recent)
        if said:
            _log.info("%s, in %.3g s: %s", self._who, seconds, said)


def described(recent: Stats) -> str:
    """Return in words what has been counted in a time; empty if nothing has happened."""
    parts = [
        _loads(recent),
        _counted(recent, PUSHES, "written for others"),
        _counted(recent, OFFERS, "offered"),
        _some(recent, LEASES_EXPIRED, "leases expired"),
    ]
    if any(parts):  # as it is now, which alone is no news
        parts += [
            _some(recent, LEASES_HELD, "held now"),
            _some(recent, QUARANTINED, "in quarantine"),
        ]
    return "; ".join(filter(None, parts))


def _loads(recent: Stats) -> str:
    said = _counted(recent, TRANSFERS, "loaded")
    if not recent.value(TRANSFERS.name, outcome="ok"):
        return said
    nbytes = recent.spread(TRANSFER_BYTES.name).total
    reading = recent.spread(TRANSFER_SECONDS.name, phase="reading")
    p50, p90 = (1e3 * reading.quantile(q, TRANSFER_SECONDS.bounds) for q in (0.5, 0.9))
    speed = f"{nbytes / reading.total / 1e9:.3g} GB/s each, " if reading.total else ""
    return f"{said}, {_size(nbytes)}, {speed}reading p50 {p50:.3g} ms p90 {p90:.3g} ms"


def _some(recent: Stats, series: Series, what: str) -> str:
    value = recent.value(series.name)
    return f"{value:g} {what}" if value else ""


def _counted(recent: Stats, series: Series, done: str) -> str:
    """Return how often something went well, and what it was where it did not."""
    by_outcome: dict[tuple[str, ...], float] = {}
    at = 1 + series.labels.index("outcome")
    for (name, *labels), value in recent.values.items():
        if name == series.name and value:
            outcome = (name, *labels)[at:]
            by_outcome[outcome] = by_outcome.get(outcome, 0) + value
    good = sum(value for (what, *_), value in by_outcome.items() if what in {"ok", "made"})
    others = [
        f"{value:g} {what}" + (f" ({why})" if why not in {"", what} else "")
        for (what, why), value in sorted(by_outcome.items())
        if what not in {"ok", "made"}
    ]
    return ", ".join([f"{good:g} {done}", *others]) if by_outcome else ""


def _size(nbytes: float) -> str:
    power = min(int(math.log(max(nbytes, 1), 1000)), 4)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
