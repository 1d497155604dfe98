"""The second turn of a conversation: prefill reads back what decode has kept, roles exchanged."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import Request
from tests.integration.test_connector import BROKEN, LOCAL, SLOW, two
from tests.integration.tiny_engine import CONTENT, HEADS, LAYERS, Make, TinyEngine, run

PROMPT, WRITTEN, ASKED = 11, 6, 9
HELD = PROMPT + WRITTEN  # tokens that decode holds at the end of the first turn
NEXT = HELD + ASKED  # the prompt of the second one
# Pages of 4 tokens; with larger ones, those at the end are spare.
P_FIRST, P_NEXT = [3, 1, 5], [6, 14, 8, 13, 10, 9, 12]
D_FIRST, D_NEXT = [2, 7, 4, 9, 6], [11, 3, 13, 1, 12, 10, 15]

DIRECT = {**LOCAL, "staging_nbytes": 0}
"""Every byte is counted, and whole pages would bring more than is needed."""

SHAPES = [
    ({"tp": 1}, {"tp": 1}),
    ({"tp": 2}, {"pp": 2, "page": 8}),
    ({"pp": 2, "page": 8}, {"tp": 2}),
    ({"tp": 4, "page": 6}, {"tp": 1, "pp": 2}),
]


def write(engine: TinyEngine, pages: list[int], start: int, count: int, value: float) -> None:
    """Compute some tokens of a request, as an engine does that runs them."""
    shape = (LAYERS, count, 2, HEADS, CONTENT)
    cells = (value + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)
    for (pp, tp), memory in engine.memory.items():
        layers, heads = memory.shape[0], memory.shape[4]
        mine = cells[pp * layers :][:layers, :, :, tp * heads :][:, :, :, :heads]
        for i in range(count):
            page, offset = divmod(start + i, engine.page)
            memory[:, pages[page], :, offset] = mine[:, i]


def finish(
    engine: TinyEngine, request_id: str, pages: list[int], prompt: int, tokens: int, params: Any
) -> Any:
    """Finish a request, and return what it takes along through a router."""
    request = Request(request_id, prompt, tokens, params)
    holds, taken = engine.scheduler.request_finished(request, (tuple(pages),))
    assert holds == (taken is not None)
    return json.loads(json.dumps(taken))


def wanted_again(params: Any) -> dict[str, Any]:
    """Return params as a router passes them on if the other engine will want the blocks too."""
    return {**params, "do_remote_decode": True}


def turn_one(p: TinyEngine, d: TinyEngine, request_id: str = "turn-1") -> Any:
    """Prefill, decode, and keep; return what the decode engine offers."""
    params = wanted_again(p.prefill(request_id, P_FIRST, PROMPT))
    assert d.load(request_id, D_FIRST, PROMPT, params) == PROMPT
    run([p, d], lambda: request_id in d.loaded and request_id in p.sent)
    assert d.loaded[request_id].error == ""
    write(d, D_FIRST, PROMPT, WRITTEN, 1e6)
    kept = finish(d, request_id, D_FIRST, PROMPT, HELD, params)
    assert kept is not None
    assert kept["remote_engine_id"] == d.engine_id
    assert kept["remote_num_tokens"] == HELD
    p.sent.clear()
    d.loaded.clear()
    return kept


def rest(engine: TinyEngine, but: Iterable[int]) -> list[Any]:
    """Return a copy of all pages but some."""
    return [np.delete(memory, list(but), axis=1).copy() for memory in engine.memory.values()]


def moved(nbytes: int) -> int:
    return nbytes * LAYERS * 2 * HEADS * CONTENT * 4


# --- all goes well -------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [("turn-1", "turn-2"), ("talk", "talk")], ids=["two ids", "one id"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_prefill_reads_back_what_decode_has_kept(
    engine: Make, prefill: dict[str, int], decode: dict[str, int], ids: tuple[str, str]
) -> None:
    """And decode, on the way back, what it has not itself: every turn moves what is new."""
    p, d = engine("p", DIRECT, **prefill), engine("d", DIRECT, **decode)
    params = wanted_again(turn_one(p, d, ids[0]))
    untouched = rest(p, P_NEXT)
    assert p.load(ids[1], P_NEXT, NEXT, params) == HELD
    run([p, d], lambda: ids[1] in p.loaded and ids[0] in d.sent)
    assert p.loaded[ids[1]].error == ""
    assert sum(source.nbytes for source in p.loaded[ids[1]].sources) == moved(HELD)
    assert np.array_equal(p.tokens(P_NEXT, HELD), d.tokens(D_FIRST, HELD))
    assert np.array_equal(p.tokens(P_NEXT, PROMPT), p.tokens(P_FIRST, PROMPT))
    assert (p.tokens(P_NEXT, NEXT)[:, HELD:] == -1).all(), "what nobody has computed yet"
    assert all(map(np.array_equal, rest(p, P_NEXT), untouched))

    write(p, P_NEXT, HELD, ASKED, 2e6)
    given = finish(p, ids[1], P_NEXT, NEXT, NEXT, params)
    here = HELD // d.page * d.page  # whole pages that decode still has
    for page, whole in zip(D_NEXT, D_FIRST[: here // d.page], strict=False):
        for memory in d.memory.values():
            memory[:, page] = memory[:, whole]
    assert d.load(ids[1], D_NEXT, NEXT, given, here=here) == NEXT - here
    run([p, d], lambda: ids[1] in d.loaded and ids[1] in p.sent)
    assert d.loaded[ids[1]].error == ""
    assert sum(source.nbytes for source in d.loaded[ids[1]].sources) == moved(NEXT - here)
    assert np.array_equal(d.tokens(D_NEXT, NEXT), p.tokens(P_NEXT, NEXT))
    assert p.expired == d.expired == set()


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_prefill_reads_only_what_it_has_not_cached(
    engine: Make, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    p, d = engine("p", DIRECT, **prefill), engine("d", DIRECT, **decode)
    kept = turn_one(p, d)
    here = PROMPT // p.page * p.page
    write(p, P_NEXT, 0, here, 3e6)  # not what decode holds, to tell whether it is touched
    before = p.tokens(P_NEXT, here).copy()
    assert p.load("turn-2", P_NEXT, NEXT, kept, here=here) == HELD - here
    run([p, d], lambda: "turn-2" in p.loaded and "turn-1" in d.sent)
    assert p.loaded["turn-2"].error == ""
    assert sum(source.nbytes for source in p.loaded["turn-2"].sources) == moved(HELD - here)
    assert np.array_equal(p.tokens(P_NEXT, here), before)
    assert np.array_equal(p.tokens(P_NEXT, HELD)[:, here:], d.tokens(D_FIRST, HELD)[:, here:])


def test_decode_is_told_at_once_if_prefill_needs_nothing(engine: Make) -> None:
    """It has all that decode holds in its own cache."""
    p, d = engine("p", LOCAL), engine("d", LOCAL, tp=2)
    kept = turn_one(p, d)
    assert p.load("turn-2", P_NEXT, NEXT, kept, here=20) == 0
    run([p, d], lambda: "turn-1" in d.sent)
    assert p.loaded == {}
    assert d.expired == set()


@pytest.mark.parametrize("agree", [10, 0])
def test_a_router_may_let_prefill_read_less(engine: Make, agree: int) -> None:
    """As where the next prompt has the same beginning, and then goes on in other tokens."""
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    kept = turn_one(p, d)
    kept["kvbridge"]["children"]["local"]["remote_num_tokens"] = agree
    assert p.load("turn-2", P_NEXT, NEXT, kept) == agree
    run([p, d], lambda: bool(p.loaded) == bool(agree) and "turn-1" in d.sent)
    assert all(each.ok for each in p.loaded.values())
    assert np.array_equal(p.tokens(P_NEXT, agree), d.tokens(D_FIRST, agree))
    assert (p.tokens(P_NEXT, NEXT)[:, agree:] == -1).all()
    assert d.expired == set()


@pytest.mark.parametrize("wanted", [True, False])
def test_an_offer_goes_one_way_unless_the_router_asks_for_the_way_back(
    engine: Make, wanted: bool
) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", P_FIRST, PROMPT)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    if wanted:
        params = wanted_again(params)
    d.load("r", D_FIRST, PROMPT, params)
    run([p, d], lambda: "r" in d.loaded)
    kept = finish(d, "r", D_FIRST, PROMPT, PROMPT, params)
    if wanted:
        assert (kept["do_remote_prefill"], kept["do_remote_decode"]) == (True, False)
        assert (params["remote_engine_id"], kept["remote_engine_id"]) == ("p", "d")
    else:
        assert kept is None


# --- it goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("met", [False, True], ids=["never met", "met"])
def test_what_decode_keeps_no_longer_fails_the_load(engine: Make, met: bool) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "lease_s": 0.4}, tp=2)
    if met:
        p.load("warm", P_NEXT, NEXT, turn_one(p, d, "warm-1"))
        run([p, d], lambda: "warm" in p.loaded and "warm-1" in d.sent)
    kept = turn_one(p, d)
    run([p, d], lambda: "turn-1" in d.sent)
    assert "turn-1" in d.expired
    write(d, D_FIRST, 0, HELD, 5e6)  # they are somebody else's now
    p.load("turn-2", P_NEXT, NEXT, kept)
    run([p, d], lambda: "turn-2" in p.loaded)
    assert (p.loaded["turn-2"].ok, p.loaded["turn-2"].cause) == (False, "lease")
    # Prefill computes it itself, and the conversation goes on.
    write(p, P_NEXT, 0, NEXT, 6e6)
    d.load("turn-2", D_NEXT, NEXT, finish(p, "turn-2", P_NEXT, NEXT, NEXT, wanted_again(kept)))
    run([p, d], lambda: "turn-2" in d.loaded and "turn-2" in p.sent)
    assert np.array_equal(d.tokens(D_NEXT, NEXT), p.tokens(P_NEXT, NEXT))


def test_what_decode_has_kept_is_read_once(engine: Make) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    kept = turn_one(p, d)
    for request_id, cause in (("turn-2", ""), ("turn-2 again", "lease")):
        p.load(request_id, P_NEXT, NEXT, kept)
        run([p, d], lambda: request_id in p.loaded and "turn-1" in d.sent)  # noqa: B023
        assert p.loaded[request_id].cause == cause
    assert d.expired == set()


@pytest.mark.parametrize(
    ("met", "cause"), [("never", "stale"), ("before", "transport"), ("before and anew", "stale")]
)
def test_what_decode_kept_before_it_has_restarted_fails_the_load(
    engine: Make, met: str, cause: str
) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL, tp=2)
    if met != "never":
        p.load("warm", P_NEXT, NEXT, turn_one(p, d, "warm-1"))
        run([p, d], lambda: "warm" in p.loaded and "warm-1" in d.sent)
    kept = turn_one(p, d)
    d.close()
    again = engine("d", {**LOCAL, "handshake": {"port": kept["remote_port"]}}, tp=2)
    if met == "before and anew":
        p.load("new", P_FIRST, 4, again.prefill("new", D_NEXT, 4))
        run([p, again], lambda: "new" in p.loaded)
        assert p.loaded["new"].ok
    write(again, D_FIRST, 0, HELD, 5e6)
    p.load("turn-2", P_NEXT, NEXT, kept)
    run([p, again], lambda: "turn-2" in p.loaded)
    assert (p.loaded["turn-2"].ok, p.loaded["turn-2"].cause) == (False, cause)
    assert ("has restarted" in p.loaded["turn-2"].error) == (cause == "stale")


@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
def test_what_is_given_up_while_it_is_loaded_is_not_kept_for_anybody(
    engine: Make, several: bool
) -> None:
    """Whatever the engine says of it: the blocks are being written to."""
    p = engine("p", two(LOCAL, LOCAL))
    d = engine("d", {"connectors": [SLOW, {"name": "b", **LOCAL}]} if several else SLOW)
    params = wanted_again(p.prefill("r", P_FIRST, PROMPT))
    d.load("r", D_FIRST, PROMPT, params)
    for _ in range(100):
        d.step()
    given_up = Request("r", PROMPT, PROMPT, params)
    assert d.scheduler.request_finished(given_up, (tuple(D_FIRST),)) == (True, None)
    run([p, d], lambda: "r" in d.loaded)
    assert d.scheduler.stats().value("kvbridge_leases_held") == 0
    assert d.sent == []


# --- decode is another process -------------------------------------------------------------------


def serve(pipe: Connection, config: Any, shape: dict[str, Any]) -> None:
    """Be a decode engine until the pipe closes."""
    d = TinyEngine("d", config, **shape)
    pipe.send(None)
    try:
        while True:
            while not pipe.poll(0.001):
                d.step()
            action, *arguments = pipe.recv()
            pipe.send(action(d, *arguments))
    except EOFError:
        d.close()


@contextmanager
def decode_process(p: TinyEngine, config: Any, **shape: int) -> Iterator[Callable[..., Any]]:
    """Start a decode engine; what is called with an action is done there, while prefill steps."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, config, shape), daemon=True)
    process.start()
    theirs.close()
    assert pipe.poll(60)
    pipe.recv()

    def do(*message: Any) -> Any:
        pipe.send(message)
        run([p], pipe.poll)
        return pipe.recv()

    try:
        yield do
    finally:
        process.kill()
        process.join(30)
        pipe.close()


def answer(d: TinyEngine, request_id: str, params: dict[str, Any]) -> tuple[Any, Any]:
    """Load a first turn, write an answer, and keep; return what is offered, and what is held."""
    d.load(request_id, D_FIRST, PROMPT, params)
    run([d], lambda: request_id in d.loaded)
    write(d, D_FIRST, PROMPT, WRITTEN, 1e6)
    kept = finish(d, request_id, D_FIRST, PROMPT, HELD, params)
    return kept, d.tokens(D_FIRST, HELD)


def held(d: TinyEngine) -> tuple[list[str], set[str]]:
    return d.sent, d.expired


def test_prefill_reads_back_from_another_process_until_that_is_killed(engine: Make) -> None:
    p, shape = engine("p", LOCAL, tp=2), {"pp": 2, "page": 8}
    first, other = (wanted_again(p.prefill(name, P_FIRST, PROMPT)) for name in ("r", "other"))
    with decode_process(p, LOCAL, **shape) as do:
        kept, tokens = do(answer, "r", first)
        assert p.load("turn-2", P_NEXT, NEXT, kept, here=8) == HELD - 8
        run([p], lambda: "turn-2" in p.loaded)
        assert p.loaded["turn-2"].error == ""
        assert np.array_equal(p.tokens(P_NEXT, HELD)[:, 8:], tokens[:, 8:])
        run([p], lambda: do(held) == (["r"], set()))
        kept, _ = do(answer, "other", other)
    port = {"handshake": {"port": kept["remote_port"]}}
    with decode_process(p, {**LOCAL, **port}, **shape):
        # The first one finds that the process is gone, the second one that another has its place.
        for request_id, cause in (("turn-3", "transport"), ("turn-4", "stale")):
            p.load(request_id, P_NEXT, NEXT, kept)
            run([p], lambda: request_id in p.loaded)  # noqa: B023
            assert (p.loaded[request_id].ok, p.loaded[request_id].cause) == (False, cause)


# --- several connectors --------------------------------------------------------------------------


@pytest.mark.parametrize("first", [LOCAL, BROKEN], ids=["first child", "second child"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES[:2], ids=str)
def test_every_child_keeps_and_one_reads_back(
    engine: Make, prefill: dict[str, int], decode: dict[str, int], first: dict[str, Any]
) -> None:
    p, d = engine("p", two(first, LOCAL), **prefill), engine("d", two(LOCAL, LOCAL), **decode)
    kept = turn_one(p, d)
    assert sorted(kept["kvbridge"]["children"]) == ["a", "b"]
    assert d.scheduler.stats().value("kvbridge_leases_held") == 2
    here = 8 if p.page == 4 else 0
    assert p.load("turn-2", P_NEXT, NEXT, wanted_again(kept), here=here) == HELD - here
    run([p, d], lambda: "turn-2" in p.loaded and "turn-1" in d.sent)
    assert (p.loaded["turn-2"].error, p.loaded["turn-2"].via) == ("", "ab"[first is BROKEN])
    assert np.array_equal(p.tokens(P_NEXT, HELD)[:, here:], d.tokens(D_FIRST, HELD)[:, here:])
    assert d.expired == set(), "every child was told"
    assert d.scheduler.stats().value("kvbridge_leases_held") == 0


# --- engines whose role does not allow it --------------------------------------------------------


def test_an_engine_that_only_takes_says_why_it_offers_nothing(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "role": "consumer"})
    for request_id in ("r1", "r2"):
        params = wanted_again(p.prefill(request_id, P_FIRST, PROMPT))
        d.load(request_id, D_FIRST, PROMPT, params)
        run([p, d], lambda: request_id in d.loaded)  # noqa: B023
        assert finish(d, request_id, D_FIRST, PROMPT, HELD, params) is None
    assert d.scheduler.stats().value("kvbridge_offers_total", reason="role") == 2
    assert caplog.text.count("connector 'local' has the role 'consumer'") == 1
    assert "'both'" in caplog.text


def test_an_engine_that_only_gives_says_why_it_reads_nothing_back(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", {**LOCAL, "role": "producer"}), engine("d", LOCAL)
    for request_id in ("r1", "r2"):
        kept = turn_one(p, d, request_id)
        assert p.load(f"{request_id}-2", P_NEXT, NEXT, kept) == 0
    assert p.scheduler.stats().value("kvbridge_params_refused_total", reason="role") == 2
    assert caplog.text.count("connector 'local' has the role 'producer'") == 1


@pytest.mark.parametrize(("role", "params"), [("consumer", {}), ("producer", {})])
def test_a_role_is_spoken_of_only_where_something_else_is_wanted(
    engine: Make, caplog: pytest.LogCaptureFixture, role: str, params: dict[str, Any]
) -> None:
    e = engine("e", {**LOCAL, "role": role})
    request = Request("r", 8, 8, params)
    assert e.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert e.scheduler.request_finished(request, ((1, 2),)) == (False, None)
    assert "role" not in caplog.text
