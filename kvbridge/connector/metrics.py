"""What connectors count, for Prometheus."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from kvbridge.connector.series import SERIES, Series
from kvbridge.connector.stats import Spread, Stats

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class StatsCollector(Collector):
    """Shows what connectors have counted to a registry that it is registered with.

    Counting goes on whether somebody looks or not, and nothing is done here until somebody does::

        REGISTRY.register(StatsCollector(scheduler.stats, worker.stats))

    A registry takes one: it refuses a second one, whose series would have the same names. So all
    connectors of a process go into one, and what they count is added.
    """

    def __init__(self, *sources: Callable[[], Stats]) -> None:
        """Take what returns the counts; called in the thread of whoever looks.

        Args:
            sources: ``stats`` of connectors; or what else has them, such as the last ones that the
                workers have sent from their processes.
        """
        self._sources = sources

    def describe(self) -> Iterator[Family]:
        """Return every series, without values."""
        return map(_family, SERIES.values())

    def collect(self) -> Iterator[Family]:
        """Return every series that has a value."""
        stats = sum((source() for source in self._sources), Stats())
        plain = {name: _plain(each) for name, each in SERIES.items() if each.kind != "histogram"}
        spread = {
            name: _histogram(each) for name, each in SERIES.items() if each.kind == "histogram"
        }
        for (name, *labels), value in stats.values.items():
            plain[name].add_metric(labels, value)
        for (name, *labels), counted in stats.spreads.items():
            spread[name].add_metric(labels, _buckets(SERIES[name], counted), counted.total)
        families = (spread[name] if name in spread else plain[name] for name in SERIES)
        return (family for family in families if family.samples)


def _family(series: Series) -> Family:
    return _histogram(series) if series.kind == "histogram" else _plain(series)


def _histogram(series: Series) -> HistogramMetricFamily:
    return HistogramMetricFamily(series.name, series.meaning, labels=series.labels)


def _plain(series: Series) -> CounterMetricFamily | GaugeMetricFamily:
    if series.kind == "counter":
        return CounterMetricFamily(series.name, series.meaning, labels=series.labels)
    return GaugeMetricFamily(series.name, series.meaning, labels=series.labels)


def _buckets(series: Series, spread: Spread) -> list[tuple[str, float]]:
    """Return how many measurements are at most each bound, as Prometheus counts them."""
    bounds = (*map(str, series.bounds), "+Inf")
    return list(zip(bounds, accumulate(spread.counts), strict=True))
