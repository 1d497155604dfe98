"""Blocks that go while the rest of their request is being computed."""

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import Request
from tests.integration.tiny_engine import Make, TinyEngine, expected, run, several, worker_of

LOCAL = {"transport": "local", "lease_s": 60, "lease_longest_s": 60}
TOKENS = 12
THEIRS, OURS = [7, 2, 3], [5, 9, 4]


def request(tokens: int, **more: Any) -> Request:
    return Request("r", TOKENS, tokens, {"do_remote_decode": True, "transfer_id": "x"}, **more)


def compute(p: TinyEngine, pages: list[int], tokens: int, value: float = 0.0) -> None:
    """Compute a request up to a token, and say so."""
    p.fill(pages, value)
    p.scheduler.request_progressed(request(tokens), (tuple(pages),))


def here(d: TinyEngine, tokens: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return d.tokens(OURS, TOKENS)[:, :tokens]


def is_here(p: TinyEngine, d: TinyEngine, tokens: int) -> bool:
    return bool((here(d, tokens) == p.tokens(THEIRS, TOKENS)[:, :tokens]).all())


def settle(*engines: TinyEngine) -> None:
    for _ in range(50):
        for engine in engines:
            engine.step()


SHAPES = [({}, {}), ({"tp": 2}, {"tp": 4}), ({"tp": 4, "pp": 2}, {"tp": 2})]


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_each_chunk_goes_as_soon_as_it_is_computed(
    engine: Make, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    p, d = engine("p", LOCAL, **prefill), engine("d", LOCAL, **decode)
    assert d.load("r", OURS, TOKENS, expected(p, "x")) == TOKENS
    for chunk, tokens in ((THEIRS[:1], 3), (THEIRS[:2], 8)):
        compute(p, chunk, tokens)
        run([p, d], partial(is_here, p, d, tokens))
        settle(p, d)
        assert (d.tokens(OURS, TOKENS)[:, tokens:] == -1).all(), "that is not computed yet"
        assert "r" not in d.loaded
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert is_here(p, d, TOKENS)
    assert not p.expired


def test_every_byte_goes_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:2], 8)
    run([p, d], lambda: is_here(p, d, 8))
    d.memory[0, 0][:, OURS[:2]] = 4711
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded)
    assert (d.memory[0, 0][:, OURS[:2]] == 4711).all(), "written a second time"
    (source,) = d.loaded["r"].sources
    assert source.nbytes == p.tokens(THEIRS, TOKENS).nbytes


@pytest.mark.parametrize("is_said", [True, False], ids=["it is said", "other blocks show it"])
def test_what_was_preempted_goes_again(engine: Make, is_said: bool) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, [11, 12], 8, value=0.25)
    run([p, d], lambda: here(d, 8)[0, 0, 0, 0, 0] == 0.25)
    if is_said:
        p.scheduler.request_preempted(request(0))
    p.memory[0, 0][:, [11, 12]] = 13  # somebody else's by now
    compute(p, THEIRS[:1], 4)
    run([p, d], lambda: is_here(p, d, 4))
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok
    assert is_here(p, d, TOKENS)


def test_one_that_gets_the_same_blocks_again_is_written_again(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:2], 8, value=0.25)
    run([p, d], lambda: here(d, 8)[0, 0, 0, 0, 0] == 0.25)
    p.scheduler.request_preempted(request(0))
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded)
    assert is_here(p, d, TOKENS)


class Event:
    """What a device has or has not done."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come


def test_nothing_goes_before_its_event(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    events: list[Event] = []

    def record() -> Event:
        events.append(Event())
        return events[-1]

    p.workers[0, 0].record_events(record)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:1], 4)
    settle(p, d)
    compute(p, THEIRS[:2], 8)
    settle(p, d)
    assert len(events) == 2, "one for each step that says something"
    assert (d.memory[0, 0] == -1).all()
    events[0].has_come = True
    run([p, d], lambda: is_here(p, d, 4))
    settle(p, d)
    assert (d.tokens(OURS, TOKENS)[:, 4:] == -1).all()
    events[1].has_come = True
    run([p, d], lambda: is_here(p, d, 8))


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_never_finishes_fails_in_words(engine: Make, when: str) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:1], 4)
    if when == "after":
        run([p, d], lambda: is_here(p, d, 4))
    assert p.scheduler.request_finished(request(4, aborted=True), ((7,),)) == (False, None)
    run([p, d], lambda: "r" in d.loaded)
    assert (d.loaded["r"].cause, "or never were" in d.loaded["r"].error) == ("lease", True)
    assert not worker_of(p.workers[0, 0]).agent._kept.computed._parts


def test_a_reader_that_gives_up_midway_gets_nothing_more(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:1], 4)
    run([p, d], lambda: is_here(p, d, 4))
    asked = Request("r", TOKENS, params=None, aborted=True)
    assert d.scheduler.request_finished(asked, (tuple(OURS),)) == (True, None)
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "aborted"
    d.memory[0, 0][:] = -1  # the blocks are somebody else's
    compute(p, THEIRS[:2], 8)
    settle(p, d)
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in p.sent)
    assert (d.memory[0, 0] == -1).all()


def test_who_asks_late_gets_all_at_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    compute(p, THEIRS[:2], 8)
    settle(p)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    run([p, d], lambda: is_here(p, d, 8))
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded)
    assert is_here(p, d, TOKENS)


def test_over_several_connectors(engine: Make) -> None:
    both = {"connectors": [{"name": "a", **LOCAL}, {"name": "b", **LOCAL}]}
    p, d = engine("p", both), engine("d", both)
    asks = expected(p, "x", several(p.scheduler).children["a"])
    d.load("r", OURS, TOKENS, asks)
    compute(p, THEIRS[:2], 8)
    run([p, d], lambda: is_here(p, d, 8))
    p.scheduler.request_preempted(request(0))
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok
    assert is_here(p, d, TOKENS)


def test_what_was_computed_before_a_sleep_is_not_written_after_it(engine: Make) -> None:
    """The same blocks are other memory then, and what was said of them comes too late."""
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", OURS, TOKENS, expected(p, "x"))
    compute(p, THEIRS[:1], 4)
    run([p, d], lambda: is_here(p, d, 4))
    compute(p, THEIRS[:2], 8)
    p.sleep()
    settle(p, d)
    p.renew()
    run([p, d], lambda: "d" in worker_of(p.workers[0, 0]).agent.sessions)
    settle(p, d)
    assert (d.tokens(OURS, TOKENS)[:, 4:] == -1).all(), "nothing is computed there yet"
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert is_here(p, d, TOKENS)


def test_a_request_that_waits_under_a_chosen_name_has_its_blocks_kept(engine: Make) -> None:
    """It knows no lease that it could name, and its turn comes after that would be over."""
    p = engine("p", {**LOCAL, "lease_s": 3.0})
    d = engine("d", LOCAL)
    waits = Request("r", TOKENS, params=expected(p, "x"))
    assert d.scheduler.get_num_new_matched_tokens(waits, 0)[0] == TOKENS
    p.prefill("r", THEIRS, TOKENS, transfer_id="x")
    until_s = time.monotonic() + 6.0
    run([p, d], lambda: time.monotonic() > until_s)
    assert p.sent == []
    d.load("r", OURS, TOKENS, expected(p, "x"))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert is_here(p, d, TOKENS)
    assert not p.expired
