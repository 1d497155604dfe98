"""Blocks that were computed of other tokens than a request's: a router has mixed something up."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvbridge.connector import Request
from kvbridge.session.tokens import digest_of_tokens
from tests.integration.tiny_engine import Make, TinyEngine, expected, run, scheduler_of

LOCAL = {"transport": "local"}
TOKENS = [17, 4, 2**31, 5]


def offer(p: TinyEngine, tokens: Sequence[int] | None) -> Any:
    """Prefill, where one more token has been sampled by the end."""
    p.fill([3])
    request = Request("r", 4, 4, {"do_remote_decode": True}, tokens=tokens)
    return p.scheduler.request_finished(request, ((3,),))[1]


def matched(d: TinyEngine, params: Any, tokens: Sequence[int] | None) -> int | None:
    request = Request("r", 4, params=params, tokens=tokens)
    return d.scheduler.get_num_new_matched_tokens(request, 0)[0]


@pytest.mark.parametrize(
    ("theirs", "ours", "count"),
    [
        ([*TOKENS, 9], TOKENS, 4),
        ([*TOKENS, 9], [*TOKENS, 8, 7], 4),
        ([*TOKENS, 9], [17, 4, 2**31, 6], 0),
        ([*TOKENS, 9], TOKENS[:3], 0),
        ([*TOKENS, 9], None, 4),
        (None, TOKENS, 4),
    ],
    ids=["its own", "a later turn", "another's", "shorter", "not known here", "not known there"],
)
def test_only_what_was_computed_of_its_own_tokens_is_loaded(
    engine: Make,
    caplog: pytest.LogCaptureFixture,
    theirs: Sequence[int] | None,
    ours: Sequence[int] | None,
    count: int,
) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = offer(p, theirs)
    assert matched(d, params, ours) == matched(d, params, ours) == count
    refused = scheduler_of(d.scheduler).stats().value("kvbridge_params_refused_total")
    assert refused == (0 if count else 1), "once, however often it is looked at"
    assert ("another one's params" in caplog.text) == (not count)


def test_a_router_may_leave_tokens_out_that_do_not_agree(engine: Make) -> None:
    """What it leaves is not checked: it says that it has compared them."""
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = offer(p, TOKENS)
    params["kvbridge"]["children"]["local"]["remote_num_tokens"] = 2
    assert matched(d, params, [17, 4, 1, 1]) == 2


def test_it_is_computed_where_it_was_to_be_loaded_and_the_blocks_go_back(engine: Make) -> None:
    p, d = engine("p", {**LOCAL, "lease_s": 1.0}), engine("d", LOCAL)
    params = offer(p, TOKENS)
    request = Request("r", 4, params=params, tokens=[1, 2, 3, 4])
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, ((5,),), 0)
    d.scheduler.request_finished(request, ((5,),))
    run([p, d], lambda: "r" in p.sent)
    assert (d.memory[0, 0] == -1).all()


def expects(d: TinyEngine, p: TinyEngine, tokens: Sequence[int] | None, here: int = 0) -> None:
    """Begin to wait for four tokens that will be computed under the name of x."""
    request = Request("r", 4, params=expected(p, "x"), tokens=tokens)
    found, _ = d.scheduler.get_num_new_matched_tokens(request, here)
    d.scheduler.update_state_after_alloc(request, ((5,),), found or 0)


def compute(p: TinyEngine, tokens: Sequence[int] | None, computed: int = 4) -> None:
    """Prefill under that name, in two chunks."""
    p.fill([3])
    params = {"do_remote_decode": True, "transfer_id": "x"}
    p.scheduler.request_progressed(Request("r", 4, 2, params, tokens=tokens), ((3,),))
    p.step()
    request = Request("r", 4, computed, params, tokens=tokens)
    p.scheduler.request_finished(request, ((3,),))


@pytest.mark.parametrize("first", ["the reader", "the producer"])
@pytest.mark.parametrize(
    ("theirs", "ours", "here", "is_loaded"),
    [
        ([*TOKENS, 9], TOKENS, 0, True),
        ([*TOKENS, 9], TOKENS, 2, True),
        ([*TOKENS, 9], [*TOKENS, 8, 7], 0, True),
        ([*TOKENS, 9], [17, 4, 2**31, 6], 0, False),
        ([*TOKENS, 9], [18, 4, 2**31, 5], 2, False),
        ([*TOKENS, 9], TOKENS[:3], 0, True),
        ([*TOKENS, 9], None, 0, True),
        (None, TOKENS, 0, True),
    ],
    ids=[
        "its own",
        "its own, half of them here",
        "a later turn",
        "another's",
        "another's, from what is here on",
        "not all known here",
        "not known here",
        "not known there",
    ],
)
def test_under_a_chosen_name_only_its_own_tokens_are_written(
    engine: Make,
    first: str,
    theirs: Sequence[int] | None,
    ours: Sequence[int] | None,
    here: int,
    is_loaded: bool,
) -> None:
    """Nobody can tell what a name stands for until it has been computed."""
    p, d = engine("p", {**LOCAL, "lease_s": 5.0}), engine("d", LOCAL)
    if first == "the producer":
        compute(p, theirs)
        expects(d, p, ours, here)
    else:
        expects(d, p, ours, here)
        for _ in range(20):
            run([p, d], lambda: True)
        compute(p, theirs)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert not p.expired, "the reader tells that it is done"
    loaded = d.loaded["r"]
    assert (loaded.ok, loaded.cause) == ((True, "") if is_loaded else (False, "refused"))
    assert is_loaded or "give each request a transfer_id of its own" in loaded.error


def test_the_prompts_of_one_http_request_under_one_name_get_nothing_of_each_other(
    engine: Make,
) -> None:
    """Which of them prefill has finished first is chance; that one is kept, the others are not."""
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "timeout_s": 5.0})
    prompts = {f"r{n}": [n, 2, 3, 4] for n in range(3)}
    for n, (name, tokens) in enumerate(prompts.items()):
        request = Request(name, 4, params=expected(p, "x"), tokens=tokens)
        found, _ = d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler.update_state_after_alloc(request, ((5 + n,),), found or 0)
    for n in (1, 0, 2):
        p.fill([n], n + 0.5)
        params = {"do_remote_decode": True, "transfer_id": "x"}
        request = Request(f"r{n}", 4, 4, params, tokens=prompts[f"r{n}"])
        is_kept, _ = p.scheduler.request_finished(request, ((n,),))
        assert is_kept == (n == 1)
    run([p, d], lambda: d.loaded.keys() >= prompts.keys())
    assert {name for name, loaded in d.loaded.items() if loaded.ok} <= {"r1"}
    for n in (0, 2):
        assert d.loaded[f"r{n}"].recompute
        assert (d.memory[0, 0][:, 5 + n] == -1).all()


def test_a_digest_is_of_so_many_tokens_and_their_order() -> None:
    assert digest_of_tokens([1, 2, 3], 2) == digest_of_tokens([1, 2], 2)
    assert len({digest_of_tokens(each, 2) for each in ([1, 2], [2, 1], [1, 1], [0, 2])}) == 4
