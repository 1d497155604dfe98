"""Loads that nobody wants any more: given up wherever they are, and the other engine told."""

import time
from typing import Any

import pytest

from kvbridge.connector import Request, WorkerReport
from tests.integration.tiny_engine import Make, TinyEngine, expected, run, several

LOCAL = {"transport": "local", "lease_s": 60}
SLOW_S = 1.0


def failing(what: str, **more: Any) -> dict[str, Any]:
    """Return a connector whose first operation goes wrong."""
    faults = [{"what": what, "at": [0], **more}]
    options = {"inner": {"transport": "local"}, "operations": faults}
    return {"name": "a", "transport": "faulty", "options": options, "lease_s": 60}


SLOW = failing("delay", delay_s=SLOW_S)


def abort(d: TinyEngine, request_id: str, blocks: list[int]) -> None:
    """Let an engine know that a request is not wanted any more, which is being loaded."""
    request = Request(request_id, 4 * len(blocks), params=None, aborted=True)
    assert d.scheduler.request_finished(request, (tuple(blocks),)) == (True, None)


def aborted(d: TinyEngine) -> float:
    stats = [worker.stats() for worker in d.workers.values()]
    assert not any(each.value("kvbridge_transfers_total", outcome="failed") for each in stats)
    return sum(each.value("kvbridge_transfers_total", outcome="aborted") for each in stats)


def is_reading(d: TinyEngine, count: int = 1) -> bool:
    values = [
        worker.stats().value("kvbridge_transfers_pending", phase="reading")
        for worker in d.workers.values()
    ]
    return min(values) >= count


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_one_that_has_met_nobody_ends_at_once_and_the_producer_is_told(
    engine: Make, direction: str
) -> None:
    config = {**LOCAL, "direction": direction}
    p, d = engine("p", LOCAL, tp=2), engine("d", config)
    d.load("r", [2, 5], 8, p.prefill("r", [3, 1], 8))
    abort(d, "r", [2, 5])
    d.step()
    assert (d.loaded["r"].cause, d.loaded["r"].ok) == ("aborted", False)
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired
    assert (d.memory[0, 0] == -1).all()
    assert aborted(d) == 1


def test_one_that_reads_is_given_up_and_its_blocks_come_once_they_are_quiet(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", SLOW)
    params = p.prefill("r", [3], 4)
    del params["kvbridge"]
    d.load("r", [2], 4, params)
    run([p, d], lambda: is_reading(d))
    begun_s = time.monotonic()
    abort(d, "r", [2])
    run([p, d], lambda: "r" in p.sent)
    assert "r" not in d.loaded, "a read into its blocks is still on its way"
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "aborted"
    assert time.monotonic() - begun_s > SLOW_S / 2
    assert not p.expired
    assert aborted(d) == 1


def test_one_that_waits_for_a_place_ends_at_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**SLOW, "reads_max": 1})
    for name, theirs, ours in (("first", 3, 2), ("second", 4, 6)):
        params = p.prefill(name, [theirs], 4)
        del params["kvbridge"]
        d.load(name, [ours], 4, params)
    run([p, d], lambda: is_reading(d))
    abort(d, "second", [6])
    run([p, d], lambda: "second" in p.sent)
    assert d.loaded["second"].cause == "aborted"
    assert "first" not in d.loaded
    run([p, d], lambda: "first" in d.loaded)
    assert d.loaded["first"].ok


def test_one_that_waits_for_its_prefill_is_withdrawn(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [2], 4, expected(p, "x"))
    run([p, d], lambda: is_reading(d))
    abort(d, "r", [2])
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "aborted"
    p.prefill("r", [3], 4, transfer_id="x")
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired
    assert (d.memory[0, 0] == -1).all()


@pytest.mark.parametrize("first", [SLOW, failing("fail")], ids=["while it reads", "as it fails"])
def test_no_other_connector_goes_on_with_it(engine: Make, first: dict[str, Any]) -> None:
    second = {"name": "b", **LOCAL}
    p = engine("p", {"connectors": [{"name": "a", **LOCAL}, second]})
    d = engine("d", {"connectors": [first, second]})
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    if first is SLOW:
        run([p, d], lambda: is_reading(d))
    abort(d, "r", [2])
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "aborted"
    assert d.loaded["r"].via == "a"
    assert not several(d.workers[0, 0]).worker_half.failovers
    assert not p.expired, "the one that stood by has told as well"


def test_one_that_another_connector_has_taken_over_is_given_up_there(engine: Make) -> None:
    first = {**failing("fail"), "name": "b"}
    p = engine("p", {"connectors": [{"name": "b", **LOCAL}, {"name": "a", **LOCAL}]})
    d = engine("d", {"connectors": [first, SLOW]})
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: several(d.workers[0, 0]).worker_half.failovers["b", "a"] == 1)
    run([p, d], lambda: is_reading(d))
    abort(d, "r", [2])
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "aborted"
    assert not p.expired


def test_one_that_ends_in_the_same_step_ends_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    (worker,) = d.workers.values()
    deadline_s = time.monotonic() + 10
    while not (ended := worker.get_finished().loaded) and time.monotonic() < deadline_s:
        worker.start_load_kv(d.scheduler.build_connector_meta())
        p.step()
    assert ended["r"].ok
    abort(d, "r", [2])  # the scheduler half has not been told yet
    worker.start_load_kv(d.scheduler.build_connector_meta())
    assert not worker.get_finished().loaded
    run([p], lambda: "r" in p.sent)
    assert aborted(d) == 0


@pytest.mark.parametrize("several_of_them", [False, True])
def test_one_that_had_ended_by_itself_does_not_take_its_successor_along(
    engine: Make, several_of_them: bool
) -> None:
    """Found by the simulator (seed 700037 of 1,000 requests): ids come again, as in a retry."""
    config = {"connectors": [LOCAL, {**LOCAL, "name": "b"}]} if several_of_them else LOCAL
    p, d = engine("p", config), engine("d", config)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    reports: list[WorkerReport] = []

    def step_of_d() -> WorkerReport:
        d.workers[0, 0].start_load_kv(d.scheduler.build_connector_meta())
        d.reports.add((0, 0), d.workers[0, 0].get_finished())
        reports.append(d.reports.take())
        return reports[-1]

    run([p], lambda: "r" in step_of_d().loaded)
    abort(d, "r", [2])  # the scheduler half has not heard yet
    d.scheduler.update_connector_output(reports[-1])
    d.load("r", [5], 4, p.prefill("s", [1], 4))
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok, d.loaded["r"].error


@pytest.mark.parametrize("way", ["pull", "push"])
def test_what_has_not_begun_by_its_deadline_does_not_begin(engine: Make, way: str) -> None:
    """An engine that was at one long step asks for nothing that nobody waits for any more."""
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "direction": way, "timeout_s": 0.5})
    d.load("first", [4], 4, p.prefill("first", [6], 4))  # so that the engines have met
    run([p, d], lambda: "first" in d.loaded and "first" in p.sent)
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    metadata = d.scheduler.build_connector_meta()
    for worker in d.workers.values():
        worker.start_load_kv(metadata)
    time.sleep(0.6)
    d.step()
    assert d.loaded["r"].cause == "deadline"
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired, "it is told that nothing is needed"
    assert (d.tokens([5], 4) == -1).all()
