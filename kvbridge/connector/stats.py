"""Counts of connectors as plain values, which travel from process to process and add up."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbridge.connector.series import SERIES, Series

Key = tuple[str, ...]
"""The name of a series and the values of its labels."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Measurements, counted by size.

    Attributes:
        counts: How many are at most each bound and above the one before; the last is above all.
        total: Their sum.
    """

    counts: tuple[int, ...]
    total: float = 0.0

    def __add__(self, other: "Spread") -> "Spread":
        """Return both together."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Spread(counts, self.total + other.total)

    def __sub__(self, before: "Spread") -> "Spread":
        """Return what has been measured since."""
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return Spread(counts, self.total - before.total)

    def quantile(self, share: float, bounds: Sequence[float]) -> float:
        """Return about what so large a share is at most, as if sizes lay evenly between bounds.

        Args:
            share: From 0 to 1.
            bounds: Those of the series; what is above all of them counts as the last one.
        """
        left, low = share * sum(self.counts), 0.0
        for count, high in zip(self.counts, bounds, strict=False):
            if count and count >= left:
                return low + (high - low) * left / count
            left, low = left - count, high
        return low


@dataclass(frozen=True, slots=True)
class Stats:
    """What a connector has counted since it was made; picklable.

    What several ranks have counted, or both halves of an engine, is added.

    Attributes:
        values: Counters and gauges.
        spreads: Histograms.
    """

    values: Mapping[Key, float] = field(default_factory=dict)
    spreads: Mapping[Key, Spread] = field(default_factory=dict)

    def __add__(self, other: "Stats") -> "Stats":
        """Return both together."""
        values, spreads = dict(self.values), dict(self.spreads)
        for key, value in other.values.items():
            values[key] = values.get(key, 0) + value
        for key, spread in other.spreads.items():
            spreads[key] = spreads[key] + spread if key in spreads else spread
        return Stats(values, spreads)

    def value(self, name: str, **labels: str) -> float:
        """Return a counter or a gauge, summed over all labels that are not given.

        Args:
            name: The series.
            labels: Values of some of its labels.

        Raises:
            KeyError: There is no such series.
            ValueError: It has no such label.
        """
        matches = _matching(name, labels)
        return sum(value for key, value in self.values.items() if matches(key))

    def spread(self, name: str, **labels: str) -> Spread:
        """Return a histogram; see :meth:`value`."""
        matches = _matching(name, labels)
        empty = Spread((0,) * (1 + len(SERIES[name].bounds)))
        return sum((each for key, each in self.spreads.items() if matches(key)), empty)

    def since(self, before: "Stats") -> "Stats":
        """Return what has been counted since something was taken; gauges as they are now."""
        values = {
            key: value if SERIES[key[0]].kind == "gauge" else value - before.values.get(key, 0)
            for key, value in self.values.items()
        }
        spreads = {
            key: spread - before.spreads[key] if key in before.spreads else spread
            for key, spread in self.spreads.items()
        }
        return Stats(values, spreads)


def _matching(name: str, labels: Mapping[str, str]) -> Callable[[Key], bool]:
    """Return what tells whether a key is of a series, with these values of its labels."""
    at = {1 + SERIES[name].labels.index(label): value for label, value in labels.items()}
    return lambda key: key[0] == name and all(key[i] == wanted for i, wanted in at.items())


class Meter:
    """Counts for one half of one connector: from one thread, to be read from any."""

    def __init__(self, series: Iterable[Series], *owner: str) -> None:
        """Take what is counted here, and the values of the labels that all of it begins with.

        No key is added later, so that others can go through all of them at any time.
        """
        self._owner = owner
        rows = [(each, (each.name, *row)) for each in series for row in each.rows]
        self._values: dict[Key, float] = {key: 0 for each, key in rows if not each.bounds}
        self._counts = {key: [0] * (len(each.bounds) + 1) for each, key in rows if each.bounds}
        self._totals = dict.fromkeys(self._counts, 0.0)

    def count(self, series: Series, *labels: str, by: int = 1) -> None:
        """Count something."""
        self._values[series.name, *labels] += by

    def measure(self, series: Series, value: float, *labels: str) -> None:
        """Count something by its size."""
        key = (series.name, *labels)
        self._counts[key][bisect_left(series.bounds, value)] += 1
        self._totals[key] += value

    def stats(self, others: Mapping[Key, float]) -> Stats:
        """Return what has been counted, and what is known from elsewhere, by the same keys."""
        values: dict[Key, float] = {}
        for known in (self._values, others):
            for (name, *labels), value in known.items():
                key = (name, *self._owner, *labels)
                values[key] = values.get(key, 0) + value
        spreads = {
            (name, *self._owner, *labels): Spread(tuple(counts), self._totals[name, *labels])
            for (name, *labels), counts in self._counts.items()
        }
        return Stats(values, spreads)
