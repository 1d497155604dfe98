"""Params that make no sense: what is said of them, and that they harm one request alone."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvbridge.connector import Connector, Request, remote_request, scheduler_connector
from kvbridge.connector.params import chosen_id
from kvbridge.errors import ConfigError

GIVEN = {
    "remote_engine_id": "p",
    "remote_request_id": "r#1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2]],
    "remote_num_tokens": 4,
    "remote_lease": [3, 9],
    "incarnation": "i",
    "generation": 1,
    "lease_s": 30.0,
}
EXPECTED = {
    "remote_engine_id": "p",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "transfer_id": "t",
}
NAME = "text of 1 to 1024 characters, none of them half of a surrogate pair"
PASS_ON = "pass on what the other engine's connector returned, unchanged"
TO_ROUTER = "correct it in the router, or whatever else chose the transfer_id"
CHOOSE = f"{TO_ROUTER}, and give both engines the same one, such as a uuid"
LONG = "x" * 1025

NONSENSE: list[tuple[dict[str, Any], str]] = [
    *(
        ({key: value}, f"{key} is {shown}, expected {NAME}")
        for key in ("remote_engine_id", "remote_request_id", "incarnation")
        for value, shown in (
            ("", "''"),
            ("a\ud800", r"'a\ud800'"),
            (LONG, f"'{LONG[:80]}'... (1025 characters)"),
        )
    ),
    ({"remote_engine_id": 7}, f"remote_engine_id is 7, expected {NAME}"),
    ({"incarnation": ["i"]}, f"incarnation is of type list, expected {NAME} or null"),
    ({"remote_host": ""}, "host '' is neither a host name nor an IP address"),
    ({"remote_host": True}, "host True is neither"),
    ({"remote_host": None}, "remote_port is 5600, but remote_host is null"),
    ({"remote_port": None}, "port None must be a whole number"),
    ({"remote_port": 0}, "remote_port is 0, where nobody can answer"),
    ({"remote_port": "0"}, "remote_port is 0, where nobody can answer"),
    ({"remote_port": 65536}, "port 65536 must be a whole number"),
    ({"remote_port": -1}, "port -1 must be a whole number"),
    ({"remote_port": True}, "port True must be a whole number"),
    ({"remote_port": math.nan}, "port nan must be a whole number"),
    ({"remote_block_ids": 7}, "remote_block_ids is 7, expected a list"),
    ({"remote_block_ids": ["12"]}, "remote_block_ids[0] is '12', expected a list"),
    ({"remote_block_ids": [[-1]]}, "remote_block_ids[0][0] is -1, expected a whole number >= 0"),
    ({"remote_block_ids": [[1, True]]}, "remote_block_ids[0][1] is True, expected a whole number"),
    (
        {"remote_block_ids": [[1], [1 << 32]]},
        "remote_block_ids[1][0] is 4294967296, expected a whole number <= 4294967295",
    ),
    ({"remote_num_tokens": -1}, "remote_num_tokens is -1, expected a whole number >= 0"),
    ({"remote_num_tokens": True}, "remote_num_tokens is True, expected a whole number"),
    ({"remote_num_tokens": 4.5}, "remote_num_tokens is 4.5, expected a whole number"),
    ({"remote_num_tokens": math.nan}, "remote_num_tokens is nan, expected a whole number"),
    ({"remote_num_tokens": 1 << 70}, "remote_num_tokens is of type int"),
    ({"remote_lease": 7}, "remote_lease is 7, expected a list or null"),
    ({"remote_lease": [3, 0]}, "remote_lease[1] is 0, expected a whole number >= 1"),
    ({"remote_lease": [True, 9]}, "remote_lease[0] is True, expected a whole number"),
    ({"generation": -1}, "generation is -1, expected a whole number >= 0"),
    ({"generation": True}, "generation is True, expected a whole number"),
    ({"lease_s": math.nan}, "lease_s is nan, expected a number >= 0.0"),
    ({"lease_s": math.inf}, "lease_s is inf, expected a number <= 86400.0"),
    ({"lease_s": True}, "lease_s is True, expected a number"),
]
CHOSEN: list[tuple[dict[str, Any], str]] = [
    ({"transfer_id": 7}, f"transfer_id is 7, expected {NAME}; {CHOOSE}"),
    ({"transfer_id": ["x"]}, f"transfer_id is of type list, expected {NAME}; {CHOOSE}"),
    ({"transfer_id": ""}, f"transfer_id is '', expected {NAME}; {CHOOSE}"),
    ({"transfer_id": "a\udfff"}, rf"transfer_id is 'a\udfff', expected {NAME}; {CHOOSE}"),
    (
        {"transfer_id": LONG},
        f"transfer_id is '{LONG[:80]}'... (1025 characters), expected {NAME}; {CHOOSE}",
    ),
]


def cases() -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield params, flat and for a connector of its own, and what is to be said of them."""
    for change, words in NONSENSE:
        part = {**GIVEN, **change}
        yield part, f"{words}; {PASS_ON}" if "expected" in words else words
        yield {"kvbridge": {"version": 1, "children": {"local": part}}}, words
    for change, words in CHOSEN:
        yield {**EXPECTED, **change}, words
    yield {**EXPECTED, "remote_engine_id": ""}, f"'', expected {NAME}; {TO_ROUTER}"
    yield {**EXPECTED, "remote_port": 0}, f"remote_port is 0, where nobody can answer; {TO_ROUTER}"
    yield {**EXPECTED, "remote_num_tokens": -1}, f"expected a whole number >= 0; {TO_ROUTER}"
    yield {"remote_engine_id": "p"}, f"remote_request_id is missing; {PASS_ON}"
    yield {"kvbridge": 7}, f"kvbridge is 7, expected a mapping; {PASS_ON}"
    yield {"kvbridge": {"version": True, "children": {}}}, "kvbridge: version is True, expected"


@pytest.fixture
def half() -> Iterator[Connector]:
    made = scheduler_connector({"transport": "local"}, engine_id="d")
    yield made
    made.shutdown()


def refused(half: Connector) -> float:
    return half.stats().value("kvbridge_params_refused_total", reason="malformed")


def test_good_params_are_read() -> None:
    """What the cases below change is all right otherwise."""
    for given in (GIVEN, EXPECTED, {"kvbridge": {"version": 1, "children": {"local": GIVEN}}}):
        assert remote_request(given, "local") is not None
    looked_up = remote_request({**GIVEN, "remote_host": None, "remote_port": None}, "local")
    assert looked_up is not None
    assert looked_up.address is None


def test_nonsense_is_named_with_what_is_allowed_and_fails_one_request(
    half: Connector, caplog: pytest.LogCaptureFixture
) -> None:
    for i, (given, words) in enumerate(cases(), 1):
        with pytest.raises(ConfigError) as said:
            remote_request(given, "local")
        assert words in str(said.value)
        assert str(said.value).startswith("kv_transfer_params: ")
        assert "regex" not in str(said.value)
        request = Request(f"r{i}", 4, params={"do_remote_prefill": True, **given})
        for _ in range(2):
            assert half.get_num_new_matched_tokens(request, 0) == (0, False)
        assert half.request_finished(request, ()) == (False, None)
        assert refused(half) == i, "once for each request, however often it is looked at"
        assert f"request r{i} cannot be loaded: {said.value}" in caplog.text


@pytest.mark.parametrize(("change", "words"), CHOSEN, ids=lambda each: str(each)[:30])
def test_a_name_that_is_none_is_said_where_blocks_would_be_kept(
    half: Connector, change: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as said:
        chosen_id(change)
    assert str(said.value) == f"kv_transfer_params: {words}"
    caplog.set_level(logging.WARNING)
    request = Request("r", 4, 4, {"do_remote_decode": True, **change})
    for i in (1, 2):  # an id may come again
        assert half.request_finished(request, ((1,),)) == (False, None)
        assert refused(half) == i
        assert caplog.text.count(f"request r cannot be offered: {said.value}") == i
