"""A line of the log says what has happened since the last one, and nothing where nothing has."""

import logging
import math

import pytest

from kvbridge.connector import ConnectorConfig, Spread
from kvbridge.connector.series import (
    LEASES_EXPIRED,
    LEASES_HELD,
    OFFERS,
    PUSHES,
    QUARANTINED,
    SCHEDULER,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
    WORKER,
)
from kvbridge.connector.stats import Meter, Stats
from kvbridge.connector.summary import Summary

LOGGER = "kvbridge.connector.summary"


class Said:
    """A summary with a clock of its own."""

    def __init__(self, caplog: pytest.LogCaptureFixture, interval_s: float = 10.0) -> None:
        caplog.set_level(logging.INFO, LOGGER)
        self.caplog, self.now_s = caplog, 100.0
        self.worker, self.scheduler = Meter(WORKER, "a", "t"), Meter(SCHEDULER, "a", "t")
        self.held = self.quarantined = 0
        self.summary = Summary("connector a", self.stats, interval_s, lambda: self.now_s)

    def stats(self) -> Stats:
        own = self.worker.stats({(QUARANTINED.name,): self.quarantined})
        return own + self.scheduler.stats({(LEASES_HELD.name,): self.held})

    def after(self, seconds: float) -> list[str]:
        """Return the lines that come so much later."""
        self.now_s += seconds
        self.caplog.clear()
        self.summary.poll()
        return self.caplog.messages


def test_what_has_been_loaded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    said = Said(caplog)
    count, measure = said.worker.count, said.worker.measure
    for direction, nbytes, seconds in (("read", 3e6, 0.002), ("write", 1e6, 0.008)):
        count(TRANSFERS, direction, "ok", "")
        measure(TRANSFER_BYTES, nbytes, direction)
        measure(TRANSFER_SECONDS, seconds, direction, "reading")
        measure(TRANSFER_SECONDS, 50.0, direction, "all")
    count(TRANSFERS, "read", "failed", "lease", by=2)
    count(TRANSFERS, "write", "failed", "lease")
    count(TRANSFERS, "read", "failed", "transport")
    count(TRANSFERS, "read", "aborted", "aborted")
    assert said.after(9.9) == []
    (line,) = said.after(0.2)
    assert line == (
        "connector a, in 10.1 s: 2 loaded, 1 aborted, 3 failed (lease), 1 failed (transport), "
        "4 MB, 0.4 GB/s each, reading p50 2.5 ms p90 9 ms"
    )
    assert said.after(10) == []
    count(TRANSFERS, "read", "failed", "deadline")
    assert said.after(10) == ["connector a, in 10 s: 0 loaded, 1 failed (deadline)"]


def test_what_is_kept_is_said_where_something_has_happened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = Said(caplog)
    said.held, said.quarantined = 3, 1
    assert said.after(10) == [], "that is no news"
    said.scheduler.count(OFFERS, "made", "", by=4)
    said.scheduler.count(OFFERS, "declined", "role")
    said.worker.count(PUSHES, "failed", "lease")
    said.worker.count(LEASES_EXPIRED)
    (line,) = said.after(10)
    assert line == (
        "connector a, in 10 s: 0 written for others, 1 failed (lease); 4 offered, "
        "1 declined (role); 1 leases expired; 3 held now; 1 in quarantine"
    )
    assert said.after(10) == []


def test_nothing_is_said_where_that_is_not_wanted(caplog: pytest.LogCaptureFixture) -> None:
    said = Said(caplog, interval_s=0)
    said.worker.count(TRANSFERS, "read", "ok", "")
    assert said.after(1e6) == []
    assert ConnectorConfig().log_interval_s == 10


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((4, 0, 0), 0.5, 0.5),
        ((0, 4, 0), 0.5, 2.0),
        ((2, 2, 0), 0.5, 1.0),
        ((2, 2, 0), 0.75, 2.0),
        ((1, 1, 8), 0.9, 3.0),
        ((0, 0, 0), 0.9, 3.0),
    ],
)
def test_quantiles_are_taken_between_bounds(
    counts: tuple[int, ...], share: float, value: float
) -> None:
    assert math.isclose(Spread(counts).quantile(share, (1.0, 3.0)), value)


def test_what_was_counted_since_is_a_difference_and_a_gauge_is_not() -> None:
    meter = Meter(WORKER, "a", "t")
    meter.count(TRANSFERS, "read", "ok", "", by=3)
    meter.measure(TRANSFER_BYTES, 5.0, "read")
    before = meter.stats({(QUARANTINED.name,): 2})
    meter.count(TRANSFERS, "read", "ok", "")
    meter.measure(TRANSFER_BYTES, 7.0, "read")
    recent = meter.stats({(QUARANTINED.name,): 2}).since(before)
    assert recent.value(TRANSFERS.name) == 1
    assert recent.value(QUARANTINED.name) == 2
    spread = recent.spread(TRANSFER_BYTES.name, direction="read")
    assert (spread.total, sum(spread.counts)) == (7.0, 1)
