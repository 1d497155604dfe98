"""Blocks that were computed of other tokens than a request's: a router has mixed something up."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvbridge.connector import Request
from kvbridge.connector.tokens import digest_of_tokens
from tests.integration.tiny_engine import Make, TinyEngine, run, scheduler_of

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


def test_a_digest_is_of_so_many_tokens_and_their_order() -> None:
    assert digest_of_tokens([1, 2, 3], 2) == digest_of_tokens([1, 2], 2)
    assert len({digest_of_tokens(each, 2) for each in ([1, 2], [2, 1], [1, 1], [0, 2])}) == 4
