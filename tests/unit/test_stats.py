"""What connectors count adds up, travels, and is what Prometheus reads."""

import pickle
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvbridge.connector import Spread, Stats
from kvbridge.connector.metrics import StatsCollector
from kvbridge.connector.series import FAILOVERS, SERIES, TRANSFER_SECONDS, TRANSFERS, WORKER, Series
from kvbridge.connector.stats import Meter


def counted(name: str, failed: int) -> Stats:
    meter = Meter(WORKER, name, "local")
    for _ in range(failed):
        meter.count(TRANSFERS, "read", "failed", "transport")
    for seconds in (0.001, 0.002, 1000.0):
        meter.measure(TRANSFER_SECONDS, seconds, "read", "reading")
    return meter.stats({})


def samples(*sources: Stats) -> Iterator[Sample]:
    registry = CollectorRegistry()
    registry.register(StatsCollector(*(lambda stats=each: stats for each in sources)))
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        yield from family.samples


def test_counts_of_ranks_add_up_and_those_of_connectors_stay_apart() -> None:
    stats = counted("a", 1) + counted("a", 2) + counted("b", 5)
    failed = {"outcome": "failed", "reason": "transport"}
    assert stats.value("kvbridge_transfers_total", connector="a", **failed) == 3
    assert stats.value("kvbridge_transfers_total", connector="b", **failed) == 5
    assert stats.value("kvbridge_transfers_total") == 8
    reading = stats.spreads["kvbridge_transfer_seconds", "a", "local", "read", "reading"]
    assert (sum(reading.counts), reading.counts[:2], reading.counts[-1]) == (6, (2, 2), 2)
    assert reading.total == pytest.approx(2000.006)


def test_adding_changes_neither() -> None:
    a, b = counted("a", 1), counted("a", 2)
    before = pickle.dumps((a, b))
    assert a + b == b + a
    assert a + Stats() == a
    assert pickle.dumps((a, b)) == before


def test_counts_travel() -> None:
    stats = counted("a", 1)
    assert pickle.loads(pickle.dumps(stats)) == stats  # ours, from our own engine's process


def test_what_was_taken_does_not_change_any_more() -> None:
    meter = Meter(WORKER, "a", "local")
    taken = meter.stats({})
    meter.count(TRANSFERS, "read", "ok", "")
    meter.measure(TRANSFER_SECONDS, 1.0, "read", "reading")
    assert taken == Meter(WORKER, "a", "local").stats({})


def test_a_label_that_is_not_known_beforehand_is_refused() -> None:
    """The number of series cannot grow with what requests say."""
    with pytest.raises(KeyError):
        Meter(WORKER, "a", "local").count(TRANSFERS, "read", "failed", "request-17")
    with pytest.raises(ValueError, match="not in tuple"):
        counted("a", 1).value("kvbridge_transfers_total", phase="all")


@pytest.mark.parametrize("each", SERIES.values(), ids=lambda each: each.name)
def test_names_follow_the_conventions(each: Series) -> None:
    """Base unit last, ``_total`` on counters alone, and never the kind."""
    assert each.name.startswith("kvbridge_")
    assert each.name.endswith("_total") == (each.kind == "counter")
    assert each.kind not in each.name
    assert bool(each.bounds) == (each.kind == "histogram")
    if each.bounds:
        assert each.name.rpartition("_")[2] in {"seconds", "bytes"}
        assert list(each.bounds) == sorted(set(each.bounds))


def test_prometheus_reads_the_same_numbers() -> None:
    read = {
        (each.name, *sorted(each.labels.items())): each.value
        for each in samples(counted("a", 1), counted("a", 2), counted("b", 5))
    }
    labels = {"transport": "local", "direction": "read", "outcome": "failed", "reason": "transport"}
    for connector, value in (("a", 3), ("b", 5)):
        whose = sorted({**labels, "connector": connector}.items())
        assert read["kvbridge_transfers_total", *whose] == value
    phase = {"transport": "local", "direction": "read", "connector": "a", "phase": "reading"}
    for bound, count in (("0.001", 2), ("0.0025", 4), ("60.0", 4), ("+Inf", 6)):
        whose = sorted({**phase, "le": bound}.items())
        assert read["kvbridge_transfer_seconds_bucket", *whose] == count
    assert read["kvbridge_transfer_seconds_count", *sorted(phase.items())] == 6


def test_everything_is_there_at_zero_before_it_happens() -> None:
    """Otherwise the first failure is no increase, and no alert."""
    zero = {each.labels["reason"] for each in samples(counted("a", 0)) if "reason" in each.labels}
    assert {"transport", "handshake", "lease", "deadline", "stale", "shutdown"} <= zero


def test_collectors_of_two_registries_do_not_meet_and_one_registry_takes_one() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    asked: list[int] = []

    def ask() -> Stats:
        asked.append(1)
        return counted("a", 1)

    for registry in (one, other):
        registry.register(StatsCollector(ask))
    assert not asked, "nothing is asked before somebody looks"
    assert generate_latest(one) == generate_latest(other)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        one.register(StatsCollector(Stats))


def test_nothing_counted_is_nothing_shown() -> None:
    assert list(samples()) == list(samples(Stats())) == []


def test_series_of_several_connectors_have_both_names() -> None:
    (shown,) = samples(Stats({(FAILOVERS.name, "a", "b"): 2}))
    assert (shown.name, shown.labels, shown.value) == (
        "kvbridge_failovers_total",
        {"from": "a", "to": "b"},
        2,
    )


def test_spreads_of_other_bounds_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="zip"):
        Spread((1, 2)) + Spread((1, 2, 3))
