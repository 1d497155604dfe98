"""Requests that the other engine writes, since it was asked to: over every transport."""

import json
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.connector import Request
from kvbridge.connector.bridge import BridgeConnector
from kvbridge.errors import PeerLostError
from kvbridge.handshake.messages import Given, Want, Withdrawal
from kvbridge.session import RankAgent
from kvbridge.transport import Peer
from kvbridge.transport.local import agent as local_agent
from tests.integration import drivers
from tests.integration.tiny_engine import Make, TinyEngine, expected, run

LOCAL: dict[str, Any] = {"transport": "local"}
PUSH: dict[str, Any] = {**LOCAL, "direction": "push"}
DIRECT: dict[str, Any] = {**PUSH, "staging_nbytes": 0}
"""Every cell is written to its place; see test_packed_pushes.py for what is packed."""
SHAPES = [({"tp": 2}, {"tp": 4}), ({"tp": 4}, {"pp": 2}), ({"pp": 2}, {"tp": 2, "pp": 2}), ({}, {})]


def faulty(**options: Any) -> dict[str, Any]:
    inner = {"inner": LOCAL, **options}
    return {"name": "local", "transport": "faulty", "options": inner, "direction": "push"}


def agents(engine: TinyEngine) -> list[RankAgent]:
    workers = engine.workers.values()
    return [w.worker_half.agent for w in workers if isinstance(w, BridgeConnector)]


def pushes(engine: TinyEngine, **labels: str) -> float:
    return sum(
        worker.stats().value("kvbridge_pushes_total", **labels)
        for worker in engine.workers.values()
    )


def written(engine: TinyEngine, outcome: str = "ok") -> float:
    return sum(
        worker.stats().value("kvbridge_transfers_total", direction="write", outcome=outcome)
        for worker in engine.workers.values()
    )


def quarantined(engine: TinyEngine) -> int:
    return sum(agent.quarantined for agent in agents(engine))


def check(p: TinyEngine, d: TinyEngine, blocks: list[int], ours: list[int], tokens: int) -> None:
    assert (d.tokens(ours, tokens) == p.tokens(blocks, tokens)).all()
    assert p.sent.count("r") == 1


@pytest.fixture
def prefers_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the local transport say that writing is better."""
    changed = replace(local_agent.CAPABILITIES, preferred_direction="write")
    monkeypatch.setattr(local_agent, "CAPABILITIES", changed)


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_a_request_is_written_for_every_shape(
    engine: Make, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    p, d = engine("p", LOCAL, **prefill), engine("d", PUSH, **decode)
    assert d.load("r", [5, 9, 4], 10, p.prefill("r", [7, 2, 3], 10)) == 10
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    check(p, d, [7, 2, 3], [5, 9, 4], 10)
    assert written(d) == len(d.ranks)
    assert not p.expired


@pytest.mark.parametrize(
    ("name", "direction", "lanes", "writes"),
    [
        ("nixl", "push", "all", 5),
        ("ucx", "push", "all", 5),
        ("mooncake", "push", "all", 5),
        ("nixl", "auto", "tcp", 5),
        ("ucx", "auto", "tcp", 5),
        ("nixl", "auto", "all", 0),
    ],
)
def test_a_request_is_written_over_every_transport(
    name: str, direction: str, lanes: str, writes: int
) -> None:
    """Where UCX has TCP alone, a native read is slow and endangers the owner: auto pushes.

    Unless what is read would be staged.
    """
    decode = {"direction": direction, "staging_nbytes": 0}
    written = {"direction": "write", "outcome": "ok"}
    loads = drivers.count_of_loads(
        name, "transfers_total", written, requests=5, decode=decode, UCX_TLS=lanes
    )
    assert loads == writes


def test_b09_what_the_reader_has_already_is_not_written(engine: Make) -> None:
    """B09: the request's last blocks go into the reader's last blocks."""
    p, d = engine("p", LOCAL), engine("d", PUSH)
    params = p.prefill("r", [10, 11, 12, 13, 14], 20)
    assert d.load("r", [1, 2, 3, 8, 9], 20, params, here=12) == 8
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.tokens([8, 9], 8) == p.tokens([13, 14], 8)).all()
    assert (d.tokens([1, 2, 3], 12) == -1).all()


def test_b25_a_reader_that_needs_nothing_says_so(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", PUSH)
    assert d.load("r", [5], 4, p.prefill("r", [7], 4), here=4) == 0
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired
    assert pushes(p) == 0


@pytest.mark.usefixtures("prefers_to_write")
def test_auto_has_it_written_where_the_transport_prefers_that(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (written(d), pushes(p, outcome="ok")) == (1, 1)


def test_auto_reads_where_the_transport_does_not_care(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert (written(d), pushes(p)) == (0, 0)


@pytest.mark.usefixtures("prefers_to_write")
@pytest.mark.parametrize(
    "there", [{"direction": "pull"}, {"handshake": {"allowed_networks": ["10.0.0.0/8"]}}], ids=str
)
def test_auto_reads_where_the_other_engine_cannot_write(
    engine: Make, there: dict[str, Any]
) -> None:
    p, d = engine("p", {**LOCAL, **there}), engine("d", LOCAL)
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent, timeout_s=30)
    assert d.loaded["r"].ok
    check(p, d, [7], [5], 4)
    assert not p.expired


def test_push_alone_fails_where_the_other_engine_cannot_write(engine: Make) -> None:
    p, d = engine("p", {**LOCAL, "direction": "pull"}), engine("d", PUSH)
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert "that engine writes for nobody" in d.loaded["r"].error
    assert d.loaded["r"].cause == "refused"
    assert not p.expired, "it was told that nothing is needed"


@pytest.mark.usefixtures("prefers_to_write")
def test_a_want_that_turns_out_impossible_is_read_instead(engine: Make, monkeypatch: Any) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded and "first" in p.sent)

    def refuse(self: RankAgent, gift: Any, want: Want) -> None:
        gift.fail("not today", "refused")

    monkeypatch.setattr(RankAgent, "give", refuse)
    d.load("r", [5], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    check(p, d, [3], [5], 4)
    assert not p.expired


def test_a_list_of_blocks_that_is_too_long_to_be_sent_is_read_instead(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(local_agent.CAPABILITIES, preferred_direction="write", notify_max_bytes=240)
    monkeypatch.setattr(local_agent, "CAPABILITIES", changed)
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    ours, theirs = list(range(15)), list(range(15, 0, -1))
    d.load("r", ours, 60, p.prefill("r", theirs, 60))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    assert (written(d), pushes(p)) == (0, 0)
    check(p, d, theirs, ours, 60)


def test_b38_a_write_that_cannot_begin_fails_the_load_at_once(engine: Make) -> None:
    """B38: the reader learns of it, and does not use the half that came."""
    broken = faulty(operations=[{"what": "fail", "share": 1.0}])
    p = engine("p", LOCAL, tp=2, worker_config=None, workers=None)
    half = engine("p2", broken, tp=2)
    d = engine("d", PUSH)
    begun_s = time.monotonic()
    d.load("r", [5], 4, half.prefill("r", [7], 4))
    run([half, d], lambda: "r" in d.loaded and "r" in half.sent)
    assert "will not write" in d.loaded["r"].error
    assert d.loaded["r"].cause == "transport"
    assert time.monotonic() - begun_s < 5.0, "long before any deadline"
    d.load("r2", [5], 4, p.prefill("r2", [7], 4))
    run([p, d], lambda: "r2" in d.loaded)
    assert d.loaded["r2"].ok


@pytest.mark.parametrize("what", ["drop", "duplicate", "reorder"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_notices_that_get_lost_or_come_twice_cost_a_moment(
    engine: Make, what: str, side: str
) -> None:
    some = faulty(notifications=[{"what": what, "share": 0.5, "delay_s": 0.05}], seed=3)
    fine = {**PUSH, "name": "local"}
    p = engine("p", some if side == "producer" else fine, tp=2)
    d = engine("d", some if side == "consumer" else fine)
    for n in range(6):
        d.load(f"r{n}", [2 * n, 2 * n + 1], 8, p.prefill(f"r{n}", [2 * n + 1, 2 * n], 8))
    run([p, d], lambda: len(d.loaded) == 6)
    for n in range(6):
        assert d.loaded[f"r{n}"].ok
        ours, theirs = [2 * n, 2 * n + 1], [2 * n + 1, 2 * n]
        assert (d.tokens(ours, 8) == p.tokens(theirs, 8)).all()


def test_b26_a_producer_that_does_not_answer_costs_no_more_than_the_deadline(engine: Make) -> None:
    """B26, in push: the load fails in time; its blocks are quiet once the producer has said so."""
    p, d = engine("p", LOCAL), engine("d", {**PUSH, "timeout_s": 1.0})
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.load("r", [5], 4, p.prefill("r", [3], 4))
    deadline_s = time.monotonic() + 1.5
    while time.monotonic() < deadline_s:
        d.step()
    assert "r" not in d.loaded, "whoever has not answered may still write"
    assert quarantined(d) == 1
    assert d.workers[0, 0].stats().value("kvbridge_quarantined_operations") == 1
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "deadline"
    assert "ranks [(0, 0)] of engine 'p' had not said that they have written" in d.loaded["r"].error
    assert "prefill" not in d.loaded["r"].error, "it had ended"
    assert quarantined(d) == 0
    assert (d.tokens([5], 4) == p.tokens([7], 4)).all(), "what was withdrawn is not written"


def test_a_want_that_comes_again_is_not_carried_out_again(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", PUSH, tp=2)
    params = p.prefill("r", [7], 4)
    d.load("r", [5], 4, params)
    heard: list[tuple[str, Want]] = []
    gifts = p.workers[0, 0].worker_half._gifts  # type: ignore[attr-defined]
    hear = gifts.heard

    def note(sender: str, what: Want | Withdrawal) -> None:
        if isinstance(what, Want) and not what.is_empty:
            heard.append((sender, what))
        hear(sender, what)

    gifts.heard = note
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    d.fill([5], value=0.5)  # by now the blocks are somebody else's
    before = d.tokens([5], 4).copy()
    for sender, want in heard:
        hear(sender, want)
    for _ in range(20):
        p.step()
        d.step()
    assert heard
    assert (d.tokens([5], 4) == before).all()


def test_what_another_agent_asks_for_is_not_written(engine: Make) -> None:
    """A rank may have its own blocks written to, and nobody else's."""
    p, d, thief = engine("p", LOCAL), engine("d", PUSH), engine("t", PUSH)
    for each in (d, thief):
        each.load("first", [5], 4, p.prefill(f"{each.engine_id}-first", [7], 4))
        run([p, each], lambda each=each: "first" in each.loaded)  # type: ignore[misc]
    params = p.prefill("r", [3], 4)
    p.step()
    entry = params["kvbridge"]["children"]["local"]
    (agent,), (victim,) = agents(thief), agents(d)
    address = thief.scheduler.scheduler_half.server.address  # type: ignore[attr-defined]
    transfer = agent.sessions["p"]
    want = Want(
        99, entry["remote_request_id"], "d", victim.incarnation, 1, (0, 0),
        (address.host, address.port), blocks=(), start_token=0, end_token=4, timeout_s=5.0,
    )  # fmt: skip
    (peer,) = transfer.peers.values()
    agent._notes.send(peer, want)
    stats = p.workers[0, 0].stats
    run(
        [p, d, thief],
        lambda: stats().value("kvbridge_notices_ignored_total", reason="stranger") == 1,
    )
    assert pushes(p, reason="refused") == 1


def test_an_answer_that_nobody_waits_for_is_counted(engine: Make) -> None:
    p, d = engine("p", PUSH), engine("d", PUSH)
    for first, second in ((p, d), (d, p)):
        second.load("r", [5], 4, first.prefill("r", [7], 4))
        run([p, d], lambda second=second: "r" in second.loaded)  # type: ignore[misc]
    (agent,) = agents(p)
    (peer,) = agent.sessions["d"].peers.values()
    assert agent.tell(peer, Given(12345, 64))
    stats = d.workers[0, 0].stats
    run([p, d], lambda: stats().value("kvbridge_notices_ignored_total", reason="unasked") == 1)


def test_a_reader_that_has_restarted_gets_nothing_into_its_old_blocks(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", PUSH)
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.close()
    again = engine("d", PUSH)
    again.load("r", [6], 4, p.prefill("r", [3], 4))
    run([p, again], lambda: "r" in again.loaded and "r" in p.sent)
    assert again.loaded["r"].ok
    check(p, again, [3], [6], 4)


def test_a_lease_that_is_over_is_said_to_be(engine: Make) -> None:
    p, d = engine("p", {**LOCAL, "lease_s": 0.3}, tp=2), engine("d", PUSH)
    params = p.prefill("r", [3], 4)
    run([p], lambda: "r" in p.sent)
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "kept no longer" in d.loaded["r"].error
    assert d.loaded["r"].cause == "lease"


def test_blocks_that_are_being_written_are_not_free_when_their_lease_is_over(engine: Make) -> None:
    slow = faulty(operations=[{"what": "delay", "share": 1.0, "delay_s": 1.0}])
    p = engine("p", {**slow, "lease_s": 0.4, "lease_longest_s": 0.4})
    d = engine("d", {**DIRECT, "name": "local"})
    begun_s = time.monotonic()
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in p.sent)
    assert time.monotonic() - begun_s > 0.9
    assert p.expired == {"r"}
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok, "they were kept until all of it was written"


def test_memory_that_others_may_write_to_is_not_given_up(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**DIRECT, "timeout_s": 1.0})
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.load("r", [5], 4, p.prefill("r", [3], 4))
    d.step()
    with pytest.raises(Exception, match="1 writes of other engines into its memory") as raised:
        d.renew()
    assert type(raised.value).__name__ == "MemoryBusyError"
    run([p, d], lambda: "r" in d.loaded)


def test_memory_that_others_may_write_to_at_the_end_is_named(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", LOCAL), engine("d", DIRECT)
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.load("r", [5], 4, p.prefill("r", [3], 4))
    d.step()
    d.close()
    assert "may still be written to" in caplog.text


@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_what_is_still_being_computed_is_written_once_it_is(
    engine: Make, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    p, d = engine("p", LOCAL, **prefill), engine("d", LOCAL, **decode)
    assert d.load("r", [5, 9, 4], 10, expected(p, "x")) == 10
    for _ in range(50):
        p.step()
        d.step()
    assert "r" not in d.loaded
    p.prefill("r", [7, 2, 3], 10, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    check(p, d, [7, 2, 3], [5, 9, 4], 10)
    assert sum(source.nbytes for source in d.loaded["r"].sources) > 0
    assert not p.expired


def test_what_will_never_be_computed_is_said_at_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    for when, name in (("after", "x"), ("before", "y")):
        if when == "before":
            finish_aborted(p, name)
        d.load(name, [5], 4, expected(p, name))
        for _ in range(50):
            p.step()
            d.step()
        if when == "after":
            finish_aborted(p, name)
        begun_s = time.monotonic()
        run([p, d], lambda name=name: name in d.loaded)  # type: ignore[misc]
        assert time.monotonic() - begun_s < 5
        assert "or never were" in d.loaded[name].error


def finish_aborted(p: TinyEngine, transfer_id: str) -> None:
    params = {"do_remote_decode": True, "transfer_id": transfer_id}
    request = Request(transfer_id, 4, 0, params, aborted=True)
    assert p.scheduler.request_finished(request, ((7,),)) == (False, None)


@pytest.mark.parametrize("check", ["off", "full"])
def test_no_more_tokens_are_written_than_were_computed(engine: Make, check: str) -> None:
    """The blocks have room for more, and what is there is not the request's."""
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "payload_check": check})
    d.load("r", [5, 9, 4], 12, expected(p, "x"))
    p.prefill("r", [7, 2, 3], 10, transfer_id="x")
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert "10 have been computed" in d.loaded["r"].error
    assert (d.tokens([5, 9, 4], 12) == -1).all()
    d.load("s", [5, 9, 4], 12, {**expected(p, "y"), "remote_num_tokens": 10})
    p.prefill("s", [7, 2, 3], 10, transfer_id="y")
    run([p, d], lambda: "s" in d.loaded)
    assert d.loaded["s"].ok
    assert (d.tokens([5, 9, 4], 10) == p.tokens([7, 2, 3], 10)).all()


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1.5, 999], ids=str)
def test_blocks_that_are_none_fail_their_own_request_alone(engine: Make, wrong: Any) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("wrong", [wrong], 4, expected(p, "x"))
    d.load("right", [6], 4, expected(p, "y"))
    for name, block in (("x", 3), ("y", 7)):
        p.prefill(name, [block], 4, transfer_id=name)
    run([p, d], lambda: {"wrong", "right"} <= d.loaded.keys())
    assert not d.loaded["wrong"].ok
    assert d.loaded["wrong"].cause == "refused"
    assert (d.tokens([6], 4) == p.tokens([7], 4)).all()


def test_a_prefill_that_is_not_wanted_after_all_is_said_to_be(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [5], 4, expected(p, "x"))
    p.scheduler.request_finished(Request("r", 4, 4, {"transfer_id": "x"}), ((7,),))
    begun_s = time.monotonic()
    run([p, d], lambda: "r" in d.loaded)
    assert time.monotonic() - begun_s < 5
    assert "or never were" in d.loaded["r"].error


def test_who_waits_in_vain_for_a_prefill_is_told_what_it_waited_for(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**PUSH, "timeout_s": 1.0})
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.load("r", [5], 4, expected(p, "x"))
    deadline_s = time.monotonic() + 1.5
    while time.monotonic() < deadline_s:
        d.step()
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "deadline"
    words = r"ranks \[\(0, 0\)\] of engine 'p' had not said that .* 'x' \(its prefill may not have"
    assert re.search(words, d.loaded["r"].error), d.loaded["r"].error


def test_what_waits_to_be_computed_takes_no_place_of_what_can_be_read(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "reads_max": 2, "timeout_s": 5})
    for n in range(4):
        d.load(f"later-{n}", [n], 4, expected(p, f"x{n}"))
    d.load("now", [9], 4, p.prefill("now", [7], 4))
    run([p, d], lambda: "now" in d.loaded)
    assert d.loaded["now"].ok
    assert not d.loaded.keys() - {"now"}


def test_a_producer_that_cannot_be_told_but_lives_is_asked_until_it_answers(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may break in one direction: its loss alone proves nothing."""
    p, d = engine("p", LOCAL), engine("d", {**PUSH, "timeout_s": 1.0})
    d.load("first", [5], 4, p.prefill("first", [7], 4))
    run([p, d], lambda: "first" in d.loaded)
    d.load("r", [6], 4, p.prefill("r", [3], 4))
    for _ in range(5):
        d.step()
    (agent,) = agents(d)
    (peer,) = agent.sessions["p"].peers.values()
    notify = agent._transport.notify

    def broken(to: Peer, payload: bytes) -> None:
        if to is peer:
            raise PeerLostError("the connection was reset")
        notify(to, payload)

    monkeypatch.setattr(agent._transport, "notify", broken)
    monkeypatch.setattr(agent._wants, "_send", broken)
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        d.step()
    assert "r" not in d.loaded, "p lives, and may still write"
    run([p, d], lambda: "r" in d.loaded)
    assert not d.loaded["r"].ok
    assert quarantined(d) == 0
    assert (d.tokens([6], 4) == -1).all()


def test_a_name_that_is_used_twice_brings_nobody_the_other_ones_bytes(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r1", [5], 4, expected(p, "x"))
    p.prefill("r1", [7], 4, transfer_id="x")
    run([p, d], lambda: "r1" in d.loaded)
    d.load("r2", [6], 4, expected(p, "x"))
    assert p.prefill("r2", [3], 4, transfer_id="x") is None
    run([p, d], lambda: "r2" in d.loaded)
    assert not d.loaded["r2"].ok
    assert (d.tokens([6], 4) == -1).all()


def test_a_reader_that_needs_nothing_of_what_is_being_computed_says_so(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    assert d.load("r", [5], 4, expected(p, "x"), here=4) == 0
    for _ in range(100):
        p.step()
        d.step()
    p.prefill("r", [7], 4, transfer_id="x")
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired


def test_what_is_being_computed_cannot_be_read(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "direction": "pull"})
    d.load("r", [5], 4, expected(p, "x"))
    run([p, d], lambda: "r" in d.loaded)
    assert "what is still being computed" in d.loaded["r"].error
    assert d.loaded["r"].cause == "refused"


@pytest.mark.parametrize("name", [7, "", ["x"], "x" * 2000], ids=str)
def test_a_name_that_is_none_is_refused(engine: Make, name: Any) -> None:
    p = engine("p", LOCAL)
    assert p.prefill("r", [7], 4, transfer_id=name) is None
    stats = p.scheduler.stats()
    assert stats.value("kvbridge_params_refused_total", reason="malformed") == 1


PRODUCER = """
    import json, sys
    from tests.integration.tiny_engine import TinyEngine
    p = TinyEngine("p", {"transport": "local"})
    taken = {}
    for name in ("first", "r"):
        params = p.prefill(name, [3], 4)
        print(json.dumps(params), flush=True)
    while True:
        if sys.stdin.readline().strip() == "step":
            for _ in range(200):
                p.step()
            print("stepped", flush=True)
"""


@pytest.mark.parametrize("way", [PUSH, DIRECT], ids=["packed", "direct"])
def test_blocks_are_quiet_a_moment_after_their_writer_was_killed(
    engine: Make, way: dict[str, Any]
) -> None:
    """The producer is killed with what was asked of it still open; staging comes back as well."""
    p = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRODUCER)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    try:
        assert p.stdin is not None
        assert p.stdout is not None
        first, second = (json.loads(p.stdout.readline()) for _ in range(2))
        d = engine("d", {**way, "timeout_s": 1.0})
        d.load("first", [5], 4, first)
        deadline_s = time.monotonic() + 20
        while "first" not in d.loaded:
            assert time.monotonic() < deadline_s
            p.stdin.write("step\n")
            p.stdout.readline()
            d.step()
        assert d.loaded["first"].ok
        d.load("r", [6], 4, second)
        (agent,) = agents(d)
        run([d], lambda: len(agent._wants) == 1)
        assert bool(agent.staged_nbytes) == (way is PUSH)
    finally:
        p.kill()
        p.communicate()
    run([d], lambda: "r" in d.loaded, timeout_s=20)
    assert not d.loaded["r"].ok
    assert (quarantined(d), agent.staged_nbytes) == (0, 0)


def test_what_is_written_goes_into_the_memory_of_the_rank_that_asks(engine: Make) -> None:
    """Its ranks have not registered their memory equally often: one had to be asked twice."""
    p, d = engine("p", LOCAL), engine("d", PUSH, tp=2)
    first = (0, 0)
    layers, heads = d.memory[first].shape[0], d.memory[first].shape[4]
    d.workers[first].register_kv_caches(d.cache(first, layers, heads))
    d.renew()
    d.load("r", [5], 4, p.prefill("r", [7], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    before = dict(d.memory)
    for memory in before.values():
        memory[:] = -3
    d.renew()
    d.load("s", [5], 4, p.prefill("s", [3], 4))
    run([p, d], lambda: "s" in d.loaded)
    assert d.loaded["s"].error == ""
    check(p, d, [3], [5], 4)
    assert all((memory == -3).all() for memory in before.values()), "written where it was before"
