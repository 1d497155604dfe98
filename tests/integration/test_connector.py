"""Requests from engine to engine through connectors: one transport, or several as one."""

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import Request, remote_request, worker_connector
from kvbridge.errors import ConfigError
from kvbridge.handshake import HandshakeServer, open_registry
from tests.integration.registry_servers import RedisServer
from tests.integration.tiny_engine import (
    Make,
    TinyEngine,
    run,
    scheduler_of,
    several,
    worker_of,
)

LOCAL = {"transport": "local"}
BROKEN = {
    "transport": "faulty",
    "options": {"inner": {"transport": "local"}, "operations": [{"what": "fail", "share": 1.0}]},
}


def assert_moved(p: TinyEngine, d: TinyEngine, there: list[int], here: list[int], n: int) -> None:
    assert np.array_equal(p.tokens(there, n), d.tokens(here, n))


# --- one connector -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp": 2}, {"tp": 1}),
        ({"tp": 1}, {"tp": 4}),
        ({"tp": 2, "pp": 2}, {"tp": 1}),
        ({"tp": 1}, {"tp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_a_request_goes_from_engine_to_engine(
    engine: Make, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    p, d = engine("p", LOCAL, **prefill), engine("d", LOCAL, **decode)
    params = p.prefill("r", [3, 1, 5], 11)
    assert params["remote_num_tokens"] == 11
    assert d.load("r", [2, 7, 4], 11, params) == 11
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].error == ""
    assert d.loaded["r"].via == "local"
    assert_moved(p, d, [3, 1, 5], [2, 7, 4], 11)
    assert p.expired == set()


def test_a_prefix_that_is_here_already_is_not_moved(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3, 1, 5], 11)
    d.fill([2], value=7)
    before = d.tokens([2], 4).copy()
    assert d.load("r", [2, 7, 4], 11, params, here=4) == 7
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert np.array_equal(d.tokens([2], 4), before)
    assert np.array_equal(d.tokens([7, 4], 7), p.tokens([1, 5], 7))


def test_a_full_local_hit_moves_nothing_and_frees_the_producer_at_once(engine: Make) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    params = p.prefill("r", [3, 1], 8)
    assert d.load("r", [2, 7], 8, params, here=8) == 0
    run([p, d], lambda: "r" in p.sent)
    assert d.loaded == {}
    assert p.expired == set()
    assert (d.memory[0, 0] == -1).all()


def test_a_request_that_is_aborted_before_it_has_blocks_frees_the_producer(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    request = Request("r", 8, params=p.prefill("r", [3, 1], 8), aborted=True)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    assert d.scheduler.request_finished(request, ()) == (False, None)
    run([p, d], lambda: "r" in p.sent)
    assert d.loaded == {}


def test_blocks_that_nobody_asks_for_are_free_when_the_lease_is_over(engine: Make) -> None:
    p = engine("p", {**LOCAL, "lease_s": 0.3})
    p.prefill("r", [3, 1], 8)
    run([p], lambda: "r" in p.sent)
    assert p.expired == {"r"}


def test_requests_that_want_nothing_from_others_hold_nothing(engine: Make) -> None:
    p = engine("p", LOCAL)
    for request in (
        Request("plain", 8, 8),
        Request("aborted", 8, 8, {"do_remote_decode": True}, aborted=True),
        Request("nothing", 8, 0, {"do_remote_decode": True}),
    ):
        assert p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert p.scheduler.request_finished(request, ((1, 2),)) == (False, None)


def test_more_tokens_than_the_blocks_hold_are_not_offered(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p = engine("p", LOCAL)
    request = Request("r", 5, computed_tokens=5, params={"do_remote_decode": True})
    assert p.scheduler.request_finished(request, ((1,),)) == (False, None)
    assert "has computed 5 tokens of it, the blocks that it lists hold 4" in caplog.text
    holds, _ = p.scheduler.request_finished(request, ((1, 2),))
    assert holds


@pytest.mark.parametrize("together", [False, True], ids=["afterwards", "at once"])
def test_an_engine_is_met_where_a_request_says_though_another_said_otherwise(
    engine: Make, together: bool
) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "handshake": {"timeout_s": 1.0}})
    wrong = p.prefill("wrong", [3], 4)
    for each in (wrong, wrong["kvbridge"]["children"]["local"]):
        each["remote_port"] = 1
    d.load("wrong", [5], 4, wrong)
    if together:
        d.step()
    else:
        run([p, d], lambda: "wrong" in d.loaded)
    d.load("right", [7], 4, p.prefill("right", [2], 4))
    run([p, d], lambda: "right" in d.loaded and "wrong" in d.loaded)
    assert d.loaded["wrong"].cause == "handshake"
    assert d.loaded["right"].error == ""


def test_b47_a_request_for_another_engine_fails_with_both_ids(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["children"]["local"]["remote_engine_id"] = "q"
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "'q' was expected here, this is 'p'" in d.loaded["r"].error


def test_b48_a_request_of_an_earlier_start_is_refused_and_the_next_one_moves(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    old = p.prefill("r1", [3], 4)
    port = old["remote_port"]
    p.close()
    again = engine("p", {**LOCAL, "handshake": {"port": port}})
    again.fill([3], value=9)
    d.load("r1", [2], 4, old)
    run([again, d], lambda: "r1" in d.loaded)
    assert "has restarted" in d.loaded["r1"].error
    assert (d.memory[0, 0] == -1).all()
    d.load("r2", [2], 4, again.prefill("r2", [5], 4))
    run([again, d], lambda: "r2" in d.loaded)
    assert d.loaded["r2"].ok
    assert_moved(again, d, [5], [2], 4)


def test_params_of_a_plain_proxy_are_enough(engine: Make) -> None:
    """The flat keys alone, as proxies know them, with a port that became a float (B64)."""
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3, 1], 8)
    del params["kvbridge"]
    params["remote_port"] = float(params["remote_port"])
    d.load("r", [2, 7], 8, params)
    run([p, d], lambda: "r" in d.loaded)
    assert_moved(p, d, [3, 1], [2, 7], 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_port": "5600.5"}, "remote_port.*'5600.5'"),
        ({"remote_port": 70000}, "remote_port.*70000"),
        ({"remote_port": None}, "remote_port.*None"),
        ({"remote_host": "tcp://evil;"}, "host 'tcp://evil;'"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": "x"}, "remote_block_ids"),
        ({"remote_num_tokens": -1}, "remote_num_tokens"),
        ({"remote_engine_id": None}, "remote_engine_id"),
    ],
    ids=str,
)
def test_b64_params_that_make_no_sense_are_refused_by_name_before_any_connection(
    engine: Make, change: dict[str, Any], message: str
) -> None:
    good = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 5600,
        "remote_block_ids": [[1]],
        "remote_num_tokens": 4,
    }
    assert remote_request(good, "local") is not None
    with pytest.raises(ConfigError, match=message):
        remote_request({**good, **change}, "local")
    d = engine("d", LOCAL)
    assert d.load("r", [2], 4, {**good, **change}) == 0  # and the engine computes it itself
    assert d.scheduler.stats().value("kvbridge_params_refused_total", reason="malformed") == 1


def test_params_of_another_version_are_refused_with_both(engine: Make) -> None:
    p = engine("p", LOCAL)
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["version"] = 2
    with pytest.raises(ConfigError, match="version is 2, this side reads 1"):
        remote_request(params, "local")


def test_a_connector_that_nobody_offers_by_its_name_is_told_of(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", LOCAL), engine("d", {"name": "other", **LOCAL})
    params = p.prefill("r", [3], 4)
    for _ in range(3):
        assert d.load("r", [2], 4, params) == 0
    assert caplog.text.count("is offered by connectors ['local'] and not by 'other'") == 1


def test_engines_with_one_secret_move_requests(engine: Make, tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    config = {**LOCAL, "handshake": {"secret_file": str(tmp_path / "secret")}}
    p, d, stranger = engine("p", config), engine("d", config), engine("s", LOCAL)
    params = p.prefill("r", [3], 4)
    d.load("r", [2], 4, params)
    stranger.load("r", [2], 4, params)
    run([p, d, stranger], lambda: "r" in d.loaded and "r" in stranger.loaded)
    assert d.loaded["r"].ok
    assert "secret" in stranger.loaded["r"].error


def test_a_request_cannot_have_an_engine_dial_just_anywhere(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["children"]["local"]["remote_host"] = "169.254.169.254"
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "outside of the networks that may be dialled" in d.loaded["r"].error


# --- never another request's bytes ----------------------------------------------------------------


def test_blocks_of_an_earlier_registration_are_not_read(engine: Make) -> None:
    """An engine that has slept holds other bytes at other addresses: the old offer is refused."""
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    old = p.prefill("r", [3], 4)
    p.renew()
    d.load("r", [2], 4, old)
    run([p, d], lambda: "r" in d.loaded)
    assert "has registered other memory since: registration 2" in d.loaded["r"].error
    assert (d.memory[0, 0] == -1).all()
    d.load("r2", [2], 4, p.prefill("r2", [3], 4))
    run([p, d], lambda: "r2" in d.loaded)
    assert d.loaded["r2"].ok
    assert_moved(p, d, [3], [2], 4)


def test_an_engine_that_slept_is_not_believed_by_those_who_knew_it_either(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("before", [2], 4, p.prefill("before", [5], 4))
    run([p, d], lambda: "before" in d.loaded and "before" in p.sent)
    old = p.prefill("r", [3], 4)
    p.step()
    kept = p.memory[0, 0]  # it may still be mapped: what it holds is nobody's any more
    p.renew()
    kept[:] = -5
    d.load("r", [2], 4, old)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert "its lease was over" in d.loaded["r"].error
    assert p.expired == {"r"}
    d.load("r2", [2], 4, p.prefill("r2", [3], 4))
    run([p, d], lambda: "r2" in d.loaded)
    assert d.loaded["r2"].ok


@pytest.mark.parametrize("decode", [{"tp": 1}, {"tp": 4}], ids=str)
def test_a_reader_that_comes_too_late_is_told_so(engine: Make, decode: dict[str, int]) -> None:
    """The blocks hold another request's bytes by then, and the read of them would succeed."""
    p, d = engine("p", {**LOCAL, "lease_s": 0.3}, tp=2), engine("d", LOCAL, **decode)
    params = p.prefill("r", [3, 1], 8)
    run([p], lambda: "r" in p.sent)
    p.fill([3, 1], value=0.5)
    d.load("r", [2, 7], 8, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "its lease was over" in d.loaded["r"].error


def test_a_lease_that_ends_while_bytes_move_fails_the_read(engine: Make) -> None:
    """Though the reader asks for more time: there is an end to that."""
    short = {"name": "a", **LOCAL, "lease_s": 0.4, "lease_longest_s": 0.4}
    p, d = engine("p", short), engine("d", SLOW)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert "its lease was over" in d.loaded["r"].error
    d.load("r2", [2], 4, p.prefill("r2", [5], 4))
    run([p, d], lambda: "r2" in d.loaded)
    assert d.loaded["r2"].ok


@pytest.mark.parametrize("lease", [[7, 99], [4095, 1]], ids=str)
def test_b69_an_offer_that_was_never_made_is_none(engine: Make, lease: list[int]) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "timeout_s": 1})
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["children"]["local"]["remote_lease"] = lease
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "lease" in d.loaded["r"].error
    assert "had not begun" in d.loaded["r"].error


def test_a_request_without_a_lease_moves_and_is_warned_of_once(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    for request_id in ("r1", "r2"):
        params = p.prefill(request_id, [3], 4)
        params["kvbridge"]["children"]["local"]["remote_lease"] = None
        d.load(request_id, [2], 4, params)
        run([p, d], lambda: request_id in d.loaded)  # noqa: B023
        assert d.loaded[request_id].ok
    assert caplog.text.count("comes without a lease") == 1


def test_no_more_requests_are_offered_than_there_are_leases(engine: Make) -> None:
    p = engine("p", {**LOCAL, "lease_s": 0.3})
    slots = scheduler_of(p.scheduler)._holds._slots
    while len(slots) > 2:
        slots.pop()
    assert all(p.prefill(f"r{i}", [3], 4) for i in range(2))
    assert p.prefill("r2", [3], 4) is None
    run([p], lambda: len(p.sent) == 2)
    assert p.prefill("r3", [3], 4) is not None


SLOW = {
    "name": "a",
    "transport": "faulty",
    "options": {
        "inner": {"transport": "local"},
        "operations": [{"what": "delay", "at": [0], "delay_s": 1.0}],
    },
}


@pytest.mark.parametrize("several", [False, True])
def test_b69_a_second_load_of_one_id_waits_until_the_first_is_over(
    engine: Make, several: bool
) -> None:
    p = engine("p", two(LOCAL, LOCAL))
    d = engine("d", {"connectors": [SLOW, {"name": "b", **LOCAL}]} if several else SLOW)
    d.load("x", [2], 4, p.prefill("r1", [3], 4))
    for _ in range(200):
        d.step()
    aborted = Request("x", 4, params=None, aborted=True)
    assert d.scheduler.request_finished(aborted, ((2,),)) == (True, None), "it is written to"
    retry = Request("x", 8, params=p.prefill("r2", [5, 6], 8))
    assert d.scheduler.get_num_new_matched_tokens(retry, 0) == (None, False)
    run([p, d], lambda: "x" in d.loaded)
    del d.loaded["x"]
    assert d.load("x", [7, 8], 8, retry.params) == 8
    run([p, d], lambda: "x" in d.loaded)
    assert d.loaded["x"].ok
    assert_moved(p, d, [5, 6], [7, 8], 8)


@pytest.mark.parametrize("config", [LOCAL, {"connectors": [LOCAL, {"name": "b", **LOCAL}]}])
def test_b69_a_request_that_finishes_twice_is_offered_once(engine: Make, config: Any) -> None:
    p, d = engine("p", config), engine("d", config)
    first = p.prefill("r", [1, 2], 8)
    again = Request("r", 8, 8, {"do_remote_decode": True})
    assert p.scheduler.request_finished(again, ((5, 6),)) == (False, None)
    d.load("r", [2, 7], 8, first)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert_moved(p, d, [1, 2], [2, 7], 8)
    p.sent.clear()
    d.loaded.clear()
    d.scheduler.request_finished(Request("r", 8), ((2, 7),))
    d.load("r", [3, 4], 8, p.prefill("r", [5, 6], 8))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert_moved(p, d, [5, 6], [3, 4], 8)


def test_after_the_shutdown_nothing_is_offered(engine: Make) -> None:
    p = engine("p", LOCAL)
    p.close()
    request = Request("r", 8, 8, {"do_remote_decode": True})
    assert p.scheduler.request_finished(request, ((5, 6),)) == (False, None)


@pytest.mark.parametrize("params", [[1], "x", 5, True, {"do_remote_prefill": "false"}])
@pytest.mark.parametrize("config", [LOCAL, {"connectors": [LOCAL, {"name": "b", **LOCAL}]}])
def test_params_that_are_none_harm_no_other_request(engine: Make, config: Any, params: Any) -> None:
    p, d = engine("p", config), engine("d", config)
    for _ in range(5):
        strange = Request("s", 8, 8, params)
        assert d.scheduler.get_num_new_matched_tokens(strange, 0) == (0, False)
        assert d.scheduler.request_finished(strange, ((1,),)) == (False, None)
    assert d.load("r", [2], 4, p.prefill("r", [3], 4)) == 4
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok


def test_what_another_connector_offers_spoils_nothing(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3], 4)
    params["kvbridge"]["children"]["zzz"] = {"junk": [[1]]}
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok


def test_b64_a_proxy_that_makes_every_number_a_float_does_no_harm(engine: Make) -> None:
    def floats(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: floats(each) for key, each in value.items()}
        if isinstance(value, list):
            return [floats(each) for each in value]
        return float(value) if type(value) is int else value

    p, d = engine("p", LOCAL), engine("d", LOCAL)
    for request_id, drop in (("r1", ()), ("r2", ("kvbridge",))):
        params = floats(p.prefill(request_id, [3, 1], 8))
        for key in drop:
            del params[key]
        d.load(request_id, [2, 7], 8, params)
        run([p, d], lambda: request_id in d.loaded)  # noqa: B023
        assert d.loaded[request_id].error == ""


# --- several as one ------------------------------------------------------------------------------


def two(first: dict[str, Any], second: dict[str, Any], **shared: Any) -> dict[str, Any]:
    return {"connectors": [{"name": "a", **first}, {"name": "b", **second}], **shared}


def test_the_first_child_loads_and_the_other_is_told(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL), tp=2)
    d = engine("d", two(LOCAL, LOCAL))
    params = p.prefill("r", [3, 1], 8)
    assert sorted(params["kvbridge"]["children"]) == ["a", "b"]
    assert params["remote_port"] == params["kvbridge"]["children"]["a"]["remote_port"]
    assert d.load("r", [2, 7], 8, params) == 8
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].via == "a"
    assert_moved(p, d, [3, 1], [2, 7], 8)
    assert p.expired == set()  # the second child was told, and did not wait for its lease


def test_every_child_gets_its_own_metadata_back_for_every_rank(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL), tp=2, pp=2)
    a, b = (scheduler_of(each)._engine for each in several(p.scheduler).children.values())
    assert sorted(a) == sorted(b) == p.ranks
    for rank, worker in p.workers.items():
        children = several(worker).children.values()
        for engine_metadata, child in zip((a, b), children, strict=True):
            assert engine_metadata[rank] == child.get_handshake_metadata()
        assert a[rank] != b[rank]


@pytest.mark.parametrize("decode", [{"tp": 1}, {"tp": 2, "pp": 2}], ids=str)
def test_what_the_first_child_cannot_load_the_second_one_does(
    engine: Make, decode: dict[str, int]
) -> None:
    p = engine("p", two(LOCAL, LOCAL), tp=2)
    d = engine("d", two(BROKEN, LOCAL), **decode)
    params = p.prefill("r", [3, 1], 8)
    d.load("r", [2, 7], 8, params)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "b")
    assert_moved(p, d, [3, 1], [2, 7], 8)
    for worker in d.workers.values():
        assert dict(several(worker).worker_half.failovers) == {("a", "b"): 1}
    assert p.expired == set()


def test_only_the_rank_that_failed_goes_on_with_the_next_child(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL))
    broken, whole = two(BROKEN, LOCAL), two(LOCAL, LOCAL)
    d = engine(
        "d",
        whole,
        tp=2,
        workers=lambda rank, topology: worker_connector(
            broken if rank == (0, 1) else whole, topology, model="m", incarnation="1"
        ),
    )
    d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "a, b")
    assert_moved(p, d, [3, 1], [2, 7], 8)
    assert p.expired == set()


def test_a_request_that_no_child_can_load_fails_once_with_every_reason(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL, lease_s=1))
    d = engine("d", two(BROKEN, BROKEN))
    d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    error = d.loaded["r"].error
    assert error.count("a fault that was asked for") == 2
    assert "a: " in error
    assert "b: " in error
    d.load("r2", [2, 7], 8, p.prefill("r2", [3, 1], 8))
    run([p, d], lambda: "r2" in d.loaded)


def test_a_child_whose_engine_cannot_be_met_is_passed_over(engine: Make) -> None:
    p = engine("p", two(LOCAL, LOCAL, lease_s=2))
    d = engine("d", two(LOCAL, LOCAL, handshake={"timeout_s": 0.5}))
    scheduler_of(several(p.scheduler).children["a"]).server.close()
    d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "b")
    assert_moved(p, d, [3, 1], [2, 7], 8)
    assert p.expired == {"r"}  # nobody could tell child "a"


def test_a_first_child_that_stalls_leaves_time_for_the_next(engine: Make, tmp_path: Path) -> None:
    p = engine("p", two(LOCAL, LOCAL, lease_s=60))
    d = engine("d", two(LOCAL, LOCAL, timeout_s=4, handshake={"timeout_s": 30}))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        params = p.prefill("r", [3, 1], 8)
        params["kvbridge"]["children"]["a"]["remote_port"] = silent.getsockname()[1]
        d.load("r", [2, 7], 8, params)
        run([p, d], lambda: "r" in d.loaded)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "b")
    assert_moved(p, d, [3, 1], [2, 7], 8)


@pytest.mark.parametrize("config", [LOCAL, {"connectors": [LOCAL, {"name": "b", **LOCAL}]}])
def test_an_engine_may_load_fewer_tokens_than_were_offered(engine: Make, config: Any) -> None:
    p, d = engine("p", config), engine("d", config)
    request = Request("r", 11, params=p.prefill("r", [3, 1, 5], 11))
    assert d.scheduler.get_num_new_matched_tokens(request, 0)[0] == 11
    d.scheduler.update_state_after_alloc(request, ((2, 7, 4),), 3)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert np.array_equal(d.tokens([4], 3), p.tokens([5], 3))
    assert (d.tokens([2, 7], 8) == -1).all()


@pytest.mark.parametrize("config", [LOCAL, {"connectors": [LOCAL, {"name": "b", **LOCAL}]}])
@pytest.mark.parametrize("tokens", [80, -5])
def test_tokens_that_nobody_offered_end_in_an_error_and_not_in_silence(
    engine: Make, config: Any, tokens: int
) -> None:
    p, d = engine("p", config), engine("d", config)
    request = Request("r", 11, params=p.prefill("r", [3, 1, 5], 11))
    d.scheduler.update_state_after_alloc(request, ((2, 7, 4),), tokens)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert "no range" in d.loaded["r"].error
    assert p.expired == set()


def test_a_full_local_hit_frees_every_child_at_once(engine: Make) -> None:
    p, d = engine("p", two(LOCAL, LOCAL)), engine("d", two(LOCAL, LOCAL))
    assert d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8), here=8) == 0
    run([p, d], lambda: "r" in p.sent)
    assert p.expired == set()


def test_b66_a_request_moves_alike_alone_and_as_one_of_two(engine: Make) -> None:
    p, d = engine("p", {"connectors": [LOCAL]}), engine("d", LOCAL)
    assert d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8)) == 8
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert_moved(p, d, [3, 1], [2, 7], 8)
    p2, d2 = engine("p2", two(LOCAL, LOCAL)), engine("d2", {"connectors": [{"name": "b", **LOCAL}]})
    assert d2.load("r", [2, 7], 8, p2.prefill("r", [3, 1], 8)) == 8
    run([p2, d2], lambda: "r" in d2.loaded)
    assert d2.loaded["r"].via == "b"
    assert_moved(p2, d2, [3, 1], [2, 7], 8)


def test_two_transports_side_by_side(engine: Make) -> None:
    config = {"connectors": [{"transport": "nixl"}, LOCAL]}
    p, d = engine("p", config), engine("d", config)
    d.load("r", [2, 7], 8, p.prefill("r", [3, 1], 8))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "nixl")
    assert_moved(p, d, [3, 1], [2, 7], 8)
    assert p.expired == set()


# --- found by a registry -------------------------------------------------------------------------


def test_an_engine_is_found_by_its_id_alone(engine: Make) -> None:
    """Requests need not carry an address where a registry knows it."""
    p = engine("p", LOCAL)
    params = p.prefill("r", [3, 1], 8)
    entry = params["kvbridge"]["children"]["local"]
    port, entry["remote_host"], entry["remote_port"] = entry["remote_port"], None, None
    registry = {"registry": "static", "options": {"engines": {"p~local": f"127.0.0.1:{port}"}}}
    d = engine("d", {**LOCAL, "handshake": {"registry": registry}})
    lost = engine("l", LOCAL)
    d.load("r", [2, 7], 8, params)
    lost.load("r", [2, 7], 8, params)
    run([p, d, lost], lambda: "r" in d.loaded and "r" in lost.loaded)
    assert d.loaded["r"].error == ""
    assert_moved(p, d, [3, 1], [2, 7], 8)
    assert "no registry is configured" in lost.loaded["r"].error


def test_engines_announce_themselves_and_are_found_in_a_registry(
    engine: Make, tmp_path: Path
) -> None:
    """Over a real Redis: every child under a name of its own, gone once its engine is."""
    with RedisServer(tmp_path) as server:
        shared = {"handshake": {"registry": server.options(), "timeout_s": 5.0}}
        p = engine("p", two(LOCAL, LOCAL, **shared))
        d = engine("d", two(LOCAL, LOCAL, **shared))
        params = p.prefill("r", [3, 1], 8)
        for entry in params["kvbridge"]["children"].values():
            entry["remote_host"] = entry["remote_port"] = None
        d.load("r", [2, 7], 8, params)
        run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
        assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "a")
        assert_moved(p, d, [3, 1], [2, 7], 8)
        with open_registry(server.options()) as registry:
            assert {each.engine_id for each in registry.engines()} >= {"p~a", "p~b", "d~a"}
            p.close()
            assert {each.engine_id for each in registry.engines()} == {"d~a", "d~b"}
        late = engine("late", two(LOCAL, LOCAL, **shared))
        late.load("r", [2, 7], 8, params)
        run([late], lambda: "r" in late.loaded)
        assert "engine 'p' stands in no entry of the registry" in late.loaded["r"].error


# --- leases that are renewed, and engines that are drained ---------------------------------------

SHORT = {**LOCAL, "lease_s": 0.9}


def test_blocks_are_kept_for_a_request_that_waits_in_a_queue(engine: Make) -> None:
    """Three leases long; another request, which nobody asks for, is over meanwhile (B28)."""
    p, d = engine("p", SHORT, tp=2), engine("d", LOCAL)
    params = p.prefill("r", [3, 1, 5], 11)
    p.prefill("forgotten", [7], 4)
    waiting = Request("r", 11, params=params)
    assert d.scheduler.get_num_new_matched_tokens(waiting, 0) == (11, True)
    start_s = time.monotonic()
    run([p, d], lambda: time.monotonic() > start_s + 2.7)
    assert p.expired == {"forgotten"}
    assert d.load("r", [2, 7, 4], 11, params) == 11
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].error == ""
    assert_moved(p, d, [3, 1, 5], [2, 7, 4], 11)
    assert p.expired == {"forgotten"}


def test_a_request_that_leaves_the_queue_is_kept_no_longer(engine: Make) -> None:
    p, d = engine("p", {**SHORT, "lease_longest_s": 60}), engine("d", LOCAL)
    params = p.prefill("r", [3, 1, 5], 11)
    waiting = Request("r", 11, params=params)
    d.scheduler.get_num_new_matched_tokens(waiting, 0)
    start_s = time.monotonic()
    run([p, d], lambda: time.monotonic() > start_s + 1.2)
    assert p.sent == []
    d.scheduler.request_finished(Request("r", 11, params=params, aborted=True), ())
    run([p, d], lambda: "r" in p.sent)
    assert p.expired == set()


def test_nothing_is_kept_for_ever(engine: Make) -> None:
    p, d = engine("p", {**SHORT, "lease_longest_s": 1.5}), engine("d", LOCAL)
    params = p.prefill("r", [3, 1, 5], 11)
    d.scheduler.get_num_new_matched_tokens(Request("r", 11, params=params), 0)
    start_s = time.monotonic()
    run([p, d], lambda: "r" in p.expired, timeout_s=5.0)
    assert 1.2 < time.monotonic() - start_s < 4.0


@pytest.mark.parametrize("config", [LOCAL, two(LOCAL, LOCAL)], ids=["one", "two"])
def test_an_engine_that_is_drained_serves_whoever_has_begun(engine: Make, config: Any) -> None:
    p, d = engine("p", config), engine("d", config)
    first, second = p.prefill("first", [3, 1], 8), p.prefill("second", [5, 7], 8)
    assert not p.scheduler.drained
    p.scheduler.drain(1.0)
    assert p.prefill("third", [9], 4) is None, "nothing new is kept"
    assert d.load("first", [2, 7], 8, first) == 8
    run([p, d], lambda: "first" in d.loaded and "first" in p.sent)
    assert d.loaded["first"].error == ""
    assert_moved(p, d, [3, 1], [2, 7], 8)
    run([p, d], lambda: p.scheduler.drained, timeout_s=5.0)
    assert p.expired == {"second"}
    assert d.load("second", [4, 6], 8, second) == 8
    run([p, d], lambda: "second" in d.loaded)
    assert "lease" in d.loaded["second"].error


@pytest.mark.parametrize("config", [LOCAL, two(LOCAL, LOCAL)], ids=["one", "two"])
def test_a_time_to_drain_that_is_none_is_the_engines_mistake(engine: Make, config: Any) -> None:
    p = engine("p", config)
    with pytest.raises(ConfigError, match=r"timeout_s of drain\(\) -1"):
        p.scheduler.drain(-1)
    assert p.prefill("r", [3], 4) is not None, "nothing has begun to end"


def test_memory_that_may_still_be_written_to_at_the_end_is_named(
    engine: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = engine("d", LOCAL)
    agent = worker_of(d.workers[0, 0]).agent
    monkeypatch.setattr(agent, "close", lambda: d.cache((0, 0), 2, 4).regions)
    d.workers[0, 0].shutdown()
    assert "1 region(s) may still be written to; keep their memory mapped" in caplog.text


@pytest.mark.parametrize("joins", [True, False], ids=["while it starts", "when it has started"])
def test_an_engine_that_starts_is_not_held_to_what_its_last_start_did(
    engine: Make, joins: bool
) -> None:
    """A request of its last start fails to meet it; those of the new one are not to wait for that.

    They join that attempt, or come when it has failed and a pause would be in order.
    """
    p = engine("p", LOCAL)
    d = engine("d", {**LOCAL, "handshake": {"timeout_s": 0.5}})
    new, old = (p.prefill(name, [page], 4) for name, page in (("new", 3), ("old", 5)))
    door = HandshakeServer()  # says "not yet"
    for params in (new, old):
        params["kvbridge"]["children"]["local"]["remote_port"] = door.port
    old["kvbridge"]["children"]["local"]["incarnation"] = "the last start"
    d.load("old", [2], 4, old)
    if joins:
        d.load("new", [4], 4, new)
    run([p, d], lambda: "old" in d.loaded)
    assert d.loaded["old"].cause == "handshake"
    published = p.workers[0, 0].get_handshake_metadata()
    assert published is not None
    door.set_xfer_handshake_metadata_pp_aware({(0, 0): published})
    if not joins:
        d.load("new", [4], 4, new)
    run([p, d], lambda: "new" in d.loaded)
    assert d.loaded["new"].error == ""
    assert_moved(p, d, [3], [4], 4)
    door.close()


@pytest.mark.parametrize("several_of_them", [False, True])
def test_a_rank_is_busy_while_more_steps_are_needed(engine: Make, several_of_them: bool) -> None:
    """An engine that stopped to step then would tell the other one nothing."""
    config = {"connectors": [LOCAL, {**LOCAL, "name": "b"}]} if several_of_them else LOCAL
    p, d = engine("p", config), engine("d", config)

    def busy(engine: TinyEngine) -> bool:
        return engine.workers[0, 0].busy

    assert not busy(p)
    assert not busy(d)
    params = p.prefill("r", [3], 4)
    p.step()
    assert busy(p), "it keeps blocks"
    d.scheduler.request_finished(Request("r", 4, params=params, aborted=True), ())
    d.step()
    assert busy(d), "it has to say that it needs nothing"
    run([p, d], lambda: p.sent == ["r"] and not (busy(p) or busy(d)))


def test_a_rank_that_waits_is_woken_by_what_another_engine_says(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    params = p.prefill("r", [3], 4)
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    start = time.monotonic()
    while p.sent != ["r"]:
        p.workers[0, 0].wait(10.0)
        assert time.monotonic() - start < 5
        p.step()
