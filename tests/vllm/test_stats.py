"""What is counted gets to vLLM's log and to Prometheus as it was."""

from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvbridge.connector import Spread, Stats
from kvbridge.connector.series import (
    LEASES_HELD,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
)
from kvbridge.integrations.vllm.stats import BridgePromMetrics, BridgeStats, measurements

OWNER = ("nixl", "nixl")
OK = (TRANSFERS.name, *OWNER, "read", "ok", "")
FAILED = (TRANSFERS.name, *OWNER, "read", "failed", "lease")
BYTES = (TRANSFER_BYTES.name, *OWNER, "read")
READING = (TRANSFER_SECONDS.name, *OWNER, "read", "reading")
HELD = (LEASES_HELD.name, *OWNER)
BOUNDS = TRANSFER_SECONDS.bounds


def spread_of(values: list[float], bounds: tuple[float, ...]) -> Spread:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return Spread(tuple(counts), sum(values))


@given(st.lists(st.floats(1e-6, 500.0), max_size=30))
def test_measurements_count_as_those_did_that_were_taken(taken: list[float]) -> None:
    spread = spread_of(taken, BOUNDS)
    again = spread_of(measurements(spread, BOUNDS), BOUNDS)
    assert again.counts == spread.counts
    assert again.total == pytest.approx(spread.total, rel=1e-6)


def loads(ok: int, failed: int, held: int) -> Stats:
    return Stats(
        {OK: ok, FAILED: failed, HELD: held},
        {
            BYTES: spread_of([2e6] * ok, TRANSFER_BYTES.bounds),
            READING: spread_of([0.004] * ok, BOUNDS),
        },
    )


def test_counts_travel_as_plain_data_and_add_up() -> None:
    first, second = (BridgeStats.of(loads(*each)) for each in ((2, 1, 7), (1, 0, 3)))
    arrived = BridgeStats(first.to_dict()).aggregate(BridgeStats(second.to_dict())).content()
    assert (arrived.value(TRANSFERS.name, outcome="ok"), arrived.values[FAILED]) == (3, 1)
    assert arrived.values[HELD] == 3, "what is as it is now is not added to what it was"
    assert arrived.spread(TRANSFER_BYTES.name).total == 6e6


def test_the_log_says_what_users_know_from_others() -> None:
    said = BridgeStats.of(loads(2, 1, 0)).reduce()
    assert said["Num successful transfers"] == 2
    assert said["Num failed transfers"] == 1
    assert said["Avg MB per transfer"] == 2
    assert said["Avg xfer time (ms)"] == 4
    assert BridgeStats().is_empty()
    assert BridgeStats.of(Stats({OK: 0})).is_empty()
    assert not BridgeStats.of(Stats({OK: 0}), is_first=True).is_empty(), "a series begins"
    assert not BridgeStats.of(loads(0, 0, 5)).is_empty(), "what is held, say, of who only gives"


def test_prometheus_shows_every_series_with_the_labels_of_vllm() -> None:
    registry = CollectorRegistry()

    def kind(of: Any) -> Any:
        def make(**arguments: Any) -> Any:
            arguments.pop("multiprocess_mode", None)
            return of(**arguments, registry=registry)

        return make

    metrics = BridgePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {each: kind(each) for each in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    metrics.observe(BridgeStats.of(loads(2, 1, 4)).to_dict(), 1)
    metrics.observe(BridgeStats.of(loads(1, 0, 2)).to_dict(), 1)
    engine = {"model_name": "m", "engine": "1", "connector": "nixl", "transport": "nixl"}
    moves = {**engine, "direction": "read"}
    ok = {**moves, "outcome": "ok", "reason": ""}
    assert registry.get_sample_value(TRANSFERS.name, ok) == 3
    assert registry.get_sample_value(LEASES_HELD.name, engine) == 2
    assert registry.get_sample_value(f"{TRANSFER_BYTES.name}_sum", moves) == pytest.approx(6e6)
    assert registry.get_sample_value(f"{TRANSFER_BYTES.name}_count", moves) == 3
