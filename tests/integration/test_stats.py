"""Each thing that goes wrong is counted by its cause, and nothing else is."""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvbridge.connector import (
    BridgeConnector,
    Connector,
    ConnectorConfig,
    Request,
    Stats,
    worker_connector,
)
from kvbridge.connector.metrics import StatsCollector
from kvbridge.connector.series import SERIES
from kvbridge.model import TransferTopology
from tests.integration.tiny_engine import Make, TinyEngine, run, worker_of

LOCAL: dict[str, Any] = {"transport": "local"}


def faulty(**options: Any) -> dict[str, Any]:
    """Configure a connector called ``local`` that something goes wrong with."""
    return {"name": "local", "transport": "faulty", "options": {"inner": LOCAL, **options}}


def slow(*operations: int, seconds: float = 1.0) -> dict[str, Any]:
    return faulty(operations=[{"what": "delay", "at": operations, "delay_s": seconds}])


BROKEN = faulty(operations=[{"what": "fail", "share": 1.0}])


def two(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**a, "name": "a"}, {**b, "name": "b"}]


def halves(engine: TinyEngine) -> list[Connector]:
    return [engine.scheduler, *engine.workers.values()]


def counted(engine: TinyEngine) -> Stats:
    return sum((half.stats() for half in halves(engine)), Stats())


Moves = dict[tuple[str, ...], float]


def moved(before: Stats, after: Stats) -> Moves:
    """Return by how much which counters have grown, without what all of them have in common.

    Requests that wait are kept all the time, so that renewals are as many as there was time for.
    """
    grown = {}
    for (name, *labels), value in after.values.items():
        series = SERIES[name]
        more = value - before.values.get((name, *labels), 0)
        if series.kind == "counter" and more and name != "kvbridge_renewals_total":
            said = dict(zip(series.labels, labels, strict=True))
            told = [said[each] for each in said if each not in {"transport", "direction"}]
            short = name.removeprefix("kvbridge_").removesuffix("_total")
            grown[short, *filter(None, told)] = more
    return grown


MET: Moves = {("handshakes", "local", "ok"): 1}
OFFERED: Moves = {("offers", "local", "made"): 1}
LOADED: Moves = {
    ("transfers", "local", "ok"): 1,
    ("transfer_copies", "local", "planned"): 4,
    ("transfer_copies", "local", "submitted"): 2,
}


def failed(cause: str) -> Moves:
    return {("transfers", "local", "failed", cause): 1}


def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def load(p: TinyEngine, d: TinyEngine, request_id: str = "r", **changed: Any) -> None:
    params = p.prefill(request_id, [3], 4)
    for at in (params, *params["kvbridge"]["children"].values()):
        at.update(changed)
    d.load(request_id, [2], 4, params)


# --- what happens, and what is counted on both sides ----------------------------------------------


def all_goes_well(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    return p, d


def a_read_fails(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", BROKEN)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    return p, d


def nobody_listens(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "handshake": {"timeout_s": 0.3}})
    load(p, d, remote_port=dead_port())
    run([p, d], lambda: "r" in d.loaded)
    return p, d


def nobody_listens_in_time(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    def impatient(_: Any, place: TransferTopology) -> Connector:
        return BridgeConnector.worker(ConnectorConfig(timeout_s=0.3), place, model="m")

    p, d = engine("p", LOCAL), engine("d", LOCAL, workers=impatient)
    load(p, d, remote_port=dead_port())
    run([p, d], lambda: "r" in d.loaded)
    return p, d


def it_does_not_fit(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    def other_model(_: Any, place: Any) -> Connector:
        return worker_connector(LOCAL, place, model="other", incarnation="1")

    p, d = engine("p", LOCAL), engine("d", LOCAL, workers=other_model)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded)
    return p, d


def it_has_restarted(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    load(p, d, incarnation="an earlier one")
    run([p, d], lambda: "r" in d.loaded)
    return p, d


def its_blocks_cannot_be(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    load(p, d, remote_block_ids=[[999]])
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    return p, d


def nobody_reads(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", {**LOCAL, "lease_s": 0.2}), engine("d", LOCAL)
    p.prefill("r", [3], 4)
    run([p, d], lambda: "r" in p.sent)
    return p, d


def it_is_read_too_late(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", {**LOCAL, "lease_s": 0.3, "lease_longest_s": 0.3}), engine("d", slow(0))
    load(p, d)
    run([p, d], lambda: "r" in d.loaded)
    before_s = time.monotonic()
    run([p, d], lambda: time.monotonic() > before_s + 0.1)  # the notice is on its way
    return p, d


def a_read_takes_too_long(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", {**slow(0, seconds=2.0), "timeout_s": 0.3})
    load(p, d)
    run([p, d], lambda: counted(d).value("kvbridge_quarantined_operations") == 1)
    assert counted(d).value("kvbridge_transfers_total", reason="deadline") == 1, (
        "before it is quiet"
    )
    run([p, d], lambda: "r" in d.loaded)
    assert counted(d).value("kvbridge_quarantined_operations") == 0
    return p, d


def a_notice_gets_lost_on_its_way(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    lossy = faulty(notifications=[{"what": "drop", "share": 1.0}])
    p, d = engine("p", {**lossy, "lease_s": 0.5}), engine("d", LOCAL)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    return p, d


def a_notice_comes_twice(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    twice = faulty(notifications=[{"what": "duplicate", "share": 1.0}])
    p, d = engine("p", twice), engine("d", LOCAL, tp=2)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    return p, d


def nobody_can_be_told(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    params = p.prefill("x", [3], 4)
    p.close()
    d.load("x", [2], 4, params, here=4)
    lost = partial(d.workers[0, 0].stats().value, "kvbridge_notices_lost_total")
    run([d], lambda: d.workers[0, 0].stats().value("kvbridge_notices_lost_total") == lost() + 1)
    return p, d


def it_is_aborted_before_it_has_blocks(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    request = Request("r", 4, params=p.prefill("r", [3], 4), aborted=True)
    d.scheduler.request_finished(request, ())
    run([p, d], lambda: "r" in p.sent)
    return p, d


def the_reader_is_shut_down(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", slow(0, seconds=0.3))
    load(p, d)
    run([p, d], lambda: counted(d).value("kvbridge_transfers_pending", phase="reading") == 1)
    d.close()
    d.close()
    return p, d


def params_make_no_sense(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    load(p, d, remote_port="none")
    d.scheduler.request_finished(Request("r", 4, params={}), ())
    d.step()
    return p, d


def names_differ(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", {**LOCAL, "name": "other"}), engine("d", LOCAL)
    load(p, d)
    d.step()
    return p, d


def too_many_are_held(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", {**LOCAL, "leases_max": 2}), engine("d", LOCAL)
    for i in range(3):
        p.prefill(f"r{i}", [3], 4)
    assert counted(p).value("kvbridge_leases_held") == 2
    return p, d


def it_is_drained(engine: Make) -> tuple[TinyEngine, TinyEngine]:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    p.scheduler.drain(1.0)
    assert p.prefill("r", [3], 4) is None
    return p, d


HAPPENS: list[tuple[Callable[[Make], tuple[TinyEngine, TinyEngine]], Moves, Moves]] = [
    (all_goes_well, OFFERED, MET | LOADED),
    (a_read_fails, OFFERED, MET | failed("transport")),
    (
        nobody_listens,
        OFFERED,
        {("handshakes", "local", "failed", "timeout"): 1} | failed("handshake"),
    ),
    (
        nobody_listens_in_time,
        OFFERED,
        failed("handshake"),
    ),
    (
        it_does_not_fit,
        OFFERED,
        {("handshakes", "local", "failed", "incompatible"): 1} | failed("incompatible"),
    ),
    (it_has_restarted, OFFERED, MET | failed("stale")),
    (its_blocks_cannot_be, OFFERED, MET | failed("refused")),
    (nobody_reads, OFFERED | {("leases_expired", "local"): 1}, {}),
    (
        it_is_read_too_late,
        OFFERED | {("leases_expired", "local"): 1, ("notices_ignored", "local", "late"): 1},
        MET | failed("lease"),
    ),
    (a_read_takes_too_long, OFFERED, MET | failed("deadline")),
    (a_notice_gets_lost_on_its_way, OFFERED | {("leases_expired", "local"): 1}, MET | LOADED),
    (
        a_notice_comes_twice,
        OFFERED | {("notices_ignored", "local", "duplicate"): 1},
        {
            ("handshakes", "local", "ok"): 2,
            ("transfers", "local", "ok"): 2,
            ("transfer_copies", "local", "planned"): 8,
            ("transfer_copies", "local", "submitted"): 8,
        },
    ),
    (
        nobody_can_be_told,
        {("offers", "local", "made"): 2},
        MET | LOADED | {("notices_lost", "local", "transport"): 1},
    ),
    (it_is_aborted_before_it_has_blocks, OFFERED, MET),
    (the_reader_is_shut_down, OFFERED, MET | failed("shutdown")),
    (params_make_no_sense, OFFERED, {("params_refused", "local", "malformed"): 1}),
    (
        names_differ,
        {("offers", "other", "made"): 1},
        {("params_refused", "local", "unmatched"): 1},
    ),
    (
        too_many_are_held,
        {("offers", "local", "made"): 2, ("offers", "local", "declined", "leases_max"): 1},
        {},
    ),
    (it_is_drained, {("offers", "local", "declined", "draining"): 1}, {}),
]


@pytest.mark.parametrize(
    ("happen", "holder", "reader"), HAPPENS, ids=[each[0].__name__ for each in HAPPENS]
)
def test_what_happens_is_counted_and_nothing_else(
    engine: Make,
    happen: Callable[[Make], tuple[TinyEngine, TinyEngine]],
    holder: Moves,
    reader: Moves,
) -> None:
    p, d = happen(engine)
    assert moved(Stats(), counted(p)) == holder
    assert moved(Stats(), counted(d)) == reader
    causes = {cause for name, _, *_, cause in reader if name == "transfers"} - {"ok", "shutdown"}
    assert {each.cause for each in d.loaded.values() if not each.ok} == causes
    assert all(each.ok == (each.cause == "") for each in d.loaded.values())


def test_a_child_takes_over_and_both_are_told_apart(engine: Make) -> None:
    """Two children over one transport, in one engine."""
    p, d = engine("p", two(LOCAL, LOCAL)), engine("d", two(BROKEN, LOCAL))
    before = counted(d)
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert d.loaded["r"].cause == ""
    assert moved(before, counted(d)) == {
        ("handshakes", "a", "ok"): 1,
        ("handshakes", "b", "ok"): 1,
        ("transfers", "a", "failed", "transport"): 1,
        ("transfers", "b", "ok"): 1,
        ("transfer_copies", "b", "planned"): 4,
        ("transfer_copies", "b", "submitted"): 2,
        ("failovers", "a", "b"): 1,
    }


def test_of_several_that_fail_the_last_cause_is_kept(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL))
    d = engine("d", [{**BROKEN, "name": "a"}, {**LOCAL, "name": "b"}], tp=2)
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["children"]["b"]["incarnation"] = "an earlier one"
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "asked for" in d.loaded["r"].error
    assert d.loaded["r"].cause == "stale"


# --- bounds ---------------------------------------------------------------------------------------


def test_loads_beyond_the_bound_wait_in_order_and_are_counted(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**slow(0, seconds=0.5), "reads_max": 1})
    for i in range(4):
        load(p, d, f"r{i}")
    empty = p.prefill("empty", [5], 4)
    d.load("empty", [6], 4, empty, here=4)
    run([p, d], lambda: counted(d).value("kvbridge_transfers_pending", phase="queued") == 3)
    assert counted(d).value("kvbridge_transfers_pending", phase="reading") == 1
    run([p, d], lambda: "empty" in p.sent)
    assert not d.loaded, "what moves nothing waits for nobody"
    run([p, d], lambda: len(d.loaded) == 4)
    assert list(d.loaded) == ["r0", "r1", "r2", "r3"]
    assert all(each.ok for each in d.loaded.values())
    stats = counted(d)
    assert stats.value("kvbridge_transfers_queued_total") == 3
    assert stats.value("kvbridge_transfers_pending") == 0
    queued = stats.spreads["kvbridge_transfer_seconds", "local", "faulty", "read", "queued"]
    assert sum(queued.counts) == 4
    assert queued.total > 3 * 0.4


def test_the_time_of_a_load_that_waits_for_a_place_runs(engine: Make) -> None:
    p = engine("p", LOCAL)
    d = engine("d", {**slow(0, seconds=2.0), "reads_max": 1, "timeout_s": 0.7})
    load(p, d, "hangs")
    run([p, d], lambda: counted(d).value("kvbridge_transfers_pending", phase="reading") == 1)
    waits = Request("waits", 4, params=p.prefill("waits", [3], 4))
    d.workers[0, 0].start_standby(d.scheduler.standby_load(waits, ((5,),), 4), timeout_s=0.2)
    run([p, d], lambda: "waits" in d.loaded and "waits" in p.sent)
    assert d.loaded["waits"].cause == "deadline"
    assert "1 loads may read at once" in d.loaded["waits"].error
    run([p, d], lambda: counted(d).value("kvbridge_quarantined_operations") == 1)
    load(p, d, "next")
    run([p, d], lambda: "next" in d.loaded)
    assert d.loaded["next"].ok, "what hangs has given its place back"
    assert "hangs" not in d.loaded, "though it is not quiet"
    run([p, d], lambda: "hangs" in d.loaded)
    assert d.loaded["hangs"].cause == "deadline"
    assert p.expired == set()


def test_an_engine_that_hangs_leaves_places_to_others(engine: Make) -> None:
    hangs, p = engine("hangs", LOCAL), engine("p", LOCAL)
    d = engine("d", {**slow(*range(6), seconds=1.5), "reads_max": 8})
    for i in range(10):
        load(hangs, d, f"slow{i}")
    run([hangs, d], lambda: counted(d).value("kvbridge_transfers_pending", phase="reading") == 6)
    load(p, d, "r")
    run([p, d], lambda: "r" in d.loaded)
    assert set(d.loaded) == {"r"}
    run([hangs, p, d], lambda: len(d.loaded) == 11)
    assert all(each.ok for each in d.loaded.values())


def test_no_more_than_the_bound_read_at_once_whoever_they_are(engine: Make) -> None:
    engines = [engine("p", LOCAL), engine("q", LOCAL)]
    d = engine("d", {**slow(*range(20), seconds=0.3), "reads_max": 4})
    for i in range(10):
        load(engines[i % 2], d, f"r{i}")
    reading = []

    def ended() -> bool:
        reading.append(counted(d).value("kvbridge_transfers_pending", phase="reading"))
        return len(d.loaded) == 10

    run([*engines, d], ended)
    assert max(reading) == 4
    assert all(each.ok for each in d.loaded.values())


def test_an_engine_that_has_gone_while_its_loads_wait_is_met_anew(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**slow(0, seconds=0.5), "reads_max": 1})
    load(p, d, "reads")
    load(p, d, "waits")
    run([p, d], lambda: counted(d).value("kvbridge_transfers_pending", phase="queued") == 1)
    worker_of(d.workers[0, 0]).agent.disconnect("p")
    run([p, d], lambda: len(d.loaded) == 2)
    assert d.loaded["waits"].ok
    assert counted(d).value("kvbridge_handshakes_total", outcome="ok") == 2


# --- what others read -----------------------------------------------------------------------------


def test_renewals_are_counted(engine: Make) -> None:
    p, d = engine("p", {**LOCAL, "lease_s": 1.5}), engine("d", LOCAL)
    request = Request("r", 4, params=p.prefill("r", [3], 4))
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (4, True)
    run([p, d], lambda: counted(d).value("kvbridge_renewals_total", outcome="kept") >= 2)
    assert moved(Stats(), counted(d)) == {}
    assert counted(p).value("kvbridge_leases_held") == 1


def test_prometheus_reads_what_engines_of_a_process_have_counted(engine: Make) -> None:
    p, d = engine("p", two(LOCAL, LOCAL)), engine("d", two(LOCAL, LOCAL), tp=2)
    registry = CollectorRegistry()
    registry.register(StatsCollector(*(half.stats for half in (*halves(p), *halves(d)))))
    load(p, d)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.name for family in families} == {
        name.removesuffix("_total") for name in SERIES
    }, "every series is there from the start, and once"
    read = {
        (each.labels.get("connector"), each.labels.get("outcome")): each.value
        for family in families
        for each in family.samples
        if each.name == "kvbridge_transfers_total"
        and (each.labels["direction"], each.labels["reason"]) == ("read", "")
    }
    assert read == {("a", "ok"): 2, ("b", "ok"): 0}


def test_counts_can_be_read_while_an_engine_works(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    errors: list[BaseException] = []
    over = threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                counted(d)
                counted(p)
        except BaseException as error:  # shown below
            errors.append(error)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for i in range(30):
            load(p, d, f"r{i}")
            run([p, d], lambda: f"r{i}" in d.loaded and f"r{i}" in p.sent)  # noqa: B023
    finally:
        over.set()
        looker.join()
    assert not errors
    assert counted(d).value("kvbridge_transfers_total", outcome="ok") == 30


def test_engines_say_it_as_they_step(engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvbridge.connector.summary")
    config = {"transport": "local", "log_interval_s": 0.05}
    p, d = engine("p", config), engine("d", config, tp=2)
    p.prefill("s", [1], 4)  # which nobody comes for
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    begun = "connector local, rank (0, 1), in "
    run(
        [p, d],
        lambda: (
            any(line.startswith(begun) and "1 loaded, 1.79 kB" in line for line in caplog.messages)
            and any(re.search("2 offered; [12] held now$", line) for line in caplog.messages)
        ),
    )
