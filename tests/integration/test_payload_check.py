"""What has been loaded is compared with what the other engine holds."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import Connector
from kvbridge.connector.bridge import BridgeConnector
from kvbridge.errors import ConfigError, MemoryBusyError
from kvbridge.handshake import DigestRequest, Digests, Given
from kvbridge.handshake.messages import decode_note
from kvbridge.model import RankCache
from kvbridge.session import RankAgent, Transfer, answers, local_rank, payload, questions
from kvbridge.transport import Peer, Poll
from kvbridge.transport.local import agent as local_agent
from tests.integration import drivers
from tests.integration.tiny_engine import HEADS, Make, TinyEngine, run
from tests.integration.working import Held, working_in

LOCAL: dict[str, Any] = {"transport": "local"}
WAYS = ["pull", "push"]
SHAPES = [({"tp": 2}, {"tp": 4}), ({"tp": 4}, {"pp": 2}), ({}, {})]
THEIRS, OURS, TOKENS = [7, 2, 3], [5, 9, 4], 10
THREAD = "kvbridge-beside"


def checking(mode: str, way: str = "pull", **others: Any) -> dict[str, Any]:
    return {**LOCAL, "direction": way, "payload_check": mode, **others}


def agents(engine: TinyEngine) -> list[RankAgent]:
    workers = engine.workers.values()
    return [w.worker_half.agent for w in workers if isinstance(w, BridgeConnector)]


def checks(engine: TinyEngine, **labels: str) -> float:
    return sum(
        worker.stats().value("kvbridge_payload_checks_total", **labels)
        for worker in engine.workers.values()
    )


def when(worker: Connector, kind: type | None, act: Callable[[], None]) -> None:
    """Do something whenever a rank's transport brings a note of a kind, or the end of a read."""
    half = worker.worker_half  # type: ignore[attr-defined]
    poll = half._transport.poll

    def polled() -> Poll:
        brought: Poll = poll()
        notes = (decode_note(payload) for _, payload in brought.notifications)
        if any(isinstance(n, kind) for n in notes) if kind else brought.finished:
            act()
        return brought

    half._transport.poll = polled


def before_it_is_compared(worker: Connector, act: Callable[[], None]) -> None:
    """Do something once all bytes of a load are in their places."""
    checks = worker.worker_half.agent._checks  # type: ignore[attr-defined]
    begin = checks.begin

    def begun(transfer: Transfer, cache: RankCache) -> Any:
        if transfer.check is not None:
            act()
        return begin(transfer, cache)

    checks.begin = begun


def holds_nothing(*engines: TinyEngine) -> bool:
    """Whether nobody waits for anything, and no blocks are kept."""
    halves = [w.worker_half for each in engines for w in each.workers.values()]  # type: ignore[attr-defined]
    return not any(
        len(half._loads) or len(half._answers) or half._held or half._leaving or half.agent._live
        or half.agent._checks._open or half.agent.quarantined or half.agent._beside.is_busy
        for half in halves
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_what_is_right_passes_for_every_shape(
    engine: Make, prefill: dict[str, int], decode: dict[str, int], mode: str, way: str
) -> None:
    p, d = engine("p", LOCAL, **prefill), engine("d", checking(mode, way), **decode)
    assert d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS)) == TOKENS
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert (d.tokens(OURS, TOKENS) == p.tokens(THEIRS, TOKENS)).all()
    assert checks(d) == checks(d, outcome="ok") == len(d.ranks)
    assert holds_nothing(p, d)
    assert not p.expired


@pytest.mark.parametrize("way", WAYS)
def test_off_sends_nothing_and_makes_no_thread(engine: Make, way: str) -> None:
    """Nothing is packed either: that is done in the same thread."""
    p, d = engine("p", LOCAL), engine("d", {**checking("off", way), "staging_nbytes": 0})
    heard: list[int] = []
    when(p.workers[0, 0], DigestRequest, lambda: heard.append(1))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert not heard
    assert checks(d) == 0
    assert not [each.name for each in threading.enumerate() if each.name.startswith(THREAD)]


def test_a_prefix_that_is_here_already_is_not_compared(engine: Make) -> None:
    """Only what this load has moved: the blocks before it may be another engine's."""
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    params = p.prefill("r", [10, 11, 12], 12)
    assert d.load("r", [1, 2, 3], 12, params, here=8) == 4
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert (d.tokens([1, 2], 8) == -1).all()
    assert checks(d, outcome="ok") == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_one_byte_that_has_changed_is_found_and_named(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    prefill: dict[str, int],
    decode: dict[str, int],
    mode: str,
    way: str,
) -> None:
    """Layer 1, V of head 0, token 6; a request beside it is not touched."""
    monkeypatch.setattr(questions, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(questions, "SAMPLES", 64)
    p, d = engine("p", LOCAL, **prefill), engine("d", checking(mode, way), **decode)
    stage = (d.ranks[-1][0], 0)
    cell = d.memory[stage][-1, OURS[1], 1, 2, 0].view(np.uint8)

    def spoil() -> None:
        cell[5] = 0xA5

    before_it_is_compared(d.workers[stage], spoil)
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    d.load("other", [1, 2, 3], TOKENS, p.prefill("other", [10, 11, 12], TOKENS))
    run([p, d], lambda: len(d.loaded) == 2 and len(p.sent) == 2)
    assert d.loaded["r"].cause == "corrupt"
    heads = HEADS // max(prefill.get("tp", 1), decode.get("tp", 1))
    assert (
        "what has come from engine 'p' rank (0, 0) of request 'r#1' is not what it holds: layer 1 "
        f"'layers.1', component 'v', units [0, {heads}), tokens [4, 8): digest"
    ) in d.loaded["r"].error
    assert d.loaded["other"].ok, d.loaded["other"].error
    assert (d.tokens([1, 2, 3], TOKENS) == p.tokens([10, 11, 12], TOKENS)).all()
    assert checks(d, reason="corrupt") == 1
    run([p, d], lambda: holds_nothing(p, d))
    assert not p.expired


@pytest.mark.parametrize(("way", "on_failure"), [("pull", "recompute"), ("push", "fail")])
def test_blocks_that_their_owner_has_changed_are_found(
    engine: Make, way: str, on_failure: str
) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", checking("full", way, on_failure=on_failure))

    def spoil() -> None:
        p.memory[0, 1][0, THEIRS[0], 0, 1, 1, 3] += 1

    when(p.workers[0, 1], DigestRequest, spoil)
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "corrupt"
    assert d.loaded["r"].recompute == (on_failure == "recompute")
    assert "rank (0, 1)" in d.loaded["r"].error
    assert "layer 0 'layers.0'" in d.loaded["r"].error
    run([p, d], lambda: holds_nothing(p, d))  # another rank's answer may still be on its way


@pytest.mark.parametrize("what", ["drop", "duplicate", "reorder"])
@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_notices_that_get_lost_or_come_twice_cost_a_moment(
    engine: Make, what: str, side: str
) -> None:
    faults = {"inner": LOCAL, "seed": 3,
              "notifications": [{"what": what, "share": 0.5, "delay_s": 0.05}]}  # fmt: skip
    some = {"name": "local", "transport": "faulty", "options": faults, "lease_s": 3}
    fine = {**LOCAL, "name": "local", "lease_s": 3}
    check = {"payload_check": "full"}
    p = engine("p", some if side == "producer" else fine, tp=2)
    d = engine("d", (some if side == "consumer" else fine) | check)
    for n in range(6):
        d.load(f"r{n}", [2 * n, 2 * n + 1], 8, p.prefill(f"r{n}", [2 * n + 1, 2 * n], 8))
    run([p, d], lambda: len(d.loaded) == 6)
    assert [each.error for each in d.loaded.values()] == [""] * 6
    assert checks(d, outcome="ok") == 6
    run([p, d], lambda: holds_nothing(p, d))


@pytest.mark.parametrize("way", WAYS)
def test_blocks_of_which_digests_are_taken_are_in_use(engine: Make, way: str) -> None:
    """Their lease is over meanwhile. What was read is then worth nothing; what was written is."""
    held = Held()
    own = {**LOCAL, "lease_s": 2.0, "lease_longest_s": 2.0}
    p = engine("p", own, workers=working_in(held, **own))
    d = engine("d", {**checking("full", way), "staging_nbytes": 0})
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: bool(held.waiting))
    until_s = time.monotonic() + 2.5
    run([p, d], lambda: time.monotonic() > until_s)
    assert "r" not in p.sent
    assert "r" not in d.loaded
    assert not agents(p)[0]._kept
    with pytest.raises(MemoryBusyError, match="digests of its memory are being taken"):
        p.renew()
    held.go()
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert p.expired == {"r"}
    assert d.loaded["r"].cause == ("lease" if way == "pull" else "")
    assert holds_nothing(p, d)


def test_blocks_that_are_kept_no_longer_are_not_digested(engine: Make) -> None:
    p = engine("p", {**LOCAL, "lease_s": 0.5, "lease_longest_s": 0.5})
    d = engine("d", checking("full"))
    d.load("first", OURS, TOKENS, p.prefill("first", THEIRS, TOKENS))
    run([p, d], lambda: "first" in d.loaded)
    asked: list[int] = []
    when(p.workers[0, 0], DigestRequest, lambda: asked.append(1))
    params = p.prefill("r", THEIRS, TOKENS)
    run([p], lambda: "r" in p.sent)
    d.load("r", OURS, TOKENS, params)
    run([p, d], lambda: "r" in d.loaded)
    assert asked
    assert d.loaded["r"].cause == "lease"
    assert "kept no longer" in d.loaded["r"].error
    assert checks(d, outcome="failed", reason="lease") == 1


def test_another_lease_than_the_readers_is_not_digested(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    params = p.prefill("r", THEIRS, TOKENS)
    slot, epoch = params["kvbridge"]["children"]["local"]["remote_lease"]
    params["kvbridge"]["children"]["local"]["remote_lease"] = [slot, epoch ^ 1]
    d.load("r", OURS, TOKENS, params)
    run([p, d], lambda: "r" in d.loaded)
    assert "held under another lease" in d.loaded["r"].error
    assert d.loaded["r"].cause == "lease"


def test_a_producer_that_is_gone_fails_the_load(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, workers=working_in(held, **LOCAL))
    d = engine("d", checking("full", timeout_s=15))
    begun_s = time.monotonic()
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: bool(held.waiting))
    p.close()
    run([d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "transport"
    assert time.monotonic() - begun_s < 5.0, "long before its deadline"
    assert holds_nothing(d)


def test_a_producer_that_does_not_answer_costs_no_more_than_the_deadline(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, workers=working_in(held, **LOCAL))
    d = engine("d", checking("full", timeout_s=1.0))
    begun_s = time.monotonic()
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded)
    assert 0.9 < time.monotonic() - begun_s < 2.0
    assert d.loaded["r"].cause == "deadline"
    assert "digests of ranks [(0, 0)] had not come" in d.loaded["r"].error
    assert checks(d, outcome="failed", reason="deadline") == 1
    assert holds_nothing(d)
    held.go()
    run([p, d], lambda: "r" in p.sent and holds_nothing(p))
    stats = d.workers[0, 0].stats
    run([p, d], lambda: stats().value("kvbridge_notices_ignored_total", reason="unasked") == 1)


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks say that they cannot take digests."""
    monkeypatch.setattr(local_rank, "can_digest", lambda cache: False)


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("way", WAYS)
def test_samples_are_left_out_where_the_other_engine_cannot(
    engine: Make, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    p, d = engine("p", LOCAL), engine("d", checking("sampled", way))
    for name in ("r", "r2"):
        d.load(name, OURS, TOKENS, p.prefill(name, THEIRS, TOKENS))
        run([p, d], lambda name=name: name in d.loaded and name in p.sent)  # type: ignore[misc]
        assert d.loaded[name].ok
    assert checks(d, outcome="skipped", reason="unsupported") == checks(d) == 2
    said = [each.message for each in caplog.records if "is not checked" in each.message]
    assert len(said) == 1
    assert "engine 'p' says that it cannot take digests" in said[0]


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("way", WAYS)
def test_a_full_check_fails_where_the_other_engine_cannot(engine: Make, way: str) -> None:
    p, d = engine("p", LOCAL), engine("d", checking("full", way))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "incompatible"
    assert "upgrade it, or set payload_check" in d.loaded["r"].error
    assert checks(d, reason="incompatible") == 1
    assert holds_nothing(p, d)


FAR = {**LOCAL, "handshake": {"allowed_networks": ["10.0.0.0/8"]}}


def test_samples_are_left_out_where_the_other_engine_cannot_meet_us(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", FAR), engine("d", checking("sampled", timeout_s=2.0))
    seconds = []
    for name in ("r", "r2"):
        begun_s = time.monotonic()
        d.load(name, OURS, TOKENS, p.prefill(name, THEIRS, TOKENS))
        run([p, d], lambda name=name: name in d.loaded and name in p.sent)  # type: ignore[misc]
        seconds.append(time.monotonic() - begun_s)
        assert d.loaded[name].ok, d.loaded[name].error
    assert checks(d, outcome="skipped", reason="unanswered") == checks(d) == 2
    assert 0.4 < seconds[0] < 1.5
    assert seconds[1] < 0.4, "it is not asked again each time"
    said = [each.message for each in caplog.records if "must be able to meet" in each.message]
    assert len(said) == 1


def test_a_full_check_fails_where_the_other_engine_cannot_meet_us(engine: Make) -> None:
    p, d = engine("p", FAR), engine("d", checking("full", timeout_s=1.0))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "deadline"
    assert "must be able to meet this engine at 127.0.0.1:" in d.loaded["r"].error


def test_a_question_that_is_too_long_is_refused(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "NOTE_MAX_BYTES", 300)
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "refused"
    assert "set payload_check to 'sampled' or 'off'" in d.loaded["r"].error


def test_who_asks_for_another_is_not_answered(engine: Make) -> None:
    """A rank learns of its own requests, and is met as who it is."""
    p, d, thief = engine("p", LOCAL), engine("d", checking("full")), engine("t", LOCAL)
    for each in (d, thief):
        each.load("first", [1], 4, p.prefill(f"{each.engine_id}-first", [8], 4))
        run([p, each], lambda each=each: "first" in each.loaded)  # type: ignore[misc]
    (stranger,), (victim,) = agents(thief), agents(d)
    (peer,) = stranger.sessions["p"].peers.values()
    params = p.prefill("r", THEIRS, TOKENS)
    address = d.scheduler.scheduler_half.server.address  # type: ignore[attr-defined]
    asks = DigestRequest(
        7, params["remote_request_id"], "d", victim.incarnation, 1, (0, 0),
        (address.host, address.port),
    )  # fmt: skip
    stranger.tell(peer, asks)  # type: ignore[arg-type]
    stats = p.workers[0, 0].stats
    run([p, d], lambda: stats().value("kvbridge_notices_ignored_total", reason="stranger") == 1)
    (back,) = agents(p)[0].sessions["d"].peers.values()
    agents(p)[0].tell(back, Digests(99, b"12345678"))
    run(
        [p, d],
        lambda: d.workers[0, 0].stats().value(
            "kvbridge_notices_ignored_total", reason="unasked"
        ) == 1,
    )  # fmt: skip


def test_memory_that_the_host_cannot_read_is_refused_when_it_is_registered(engine: Make) -> None:
    d = engine("d", checking("sampled"))
    cache = d.cache((0, 0), 2, 4)
    far = replace(cache, regions=tuple(replace(r, memory_kind="cuda") for r in cache.regions))
    with pytest.raises(ConfigError, match=r"payload_check is 'sampled', but .* lies in cuda"):
        d.workers[0, 0].register_kv_caches(far)


def test_a_load_whose_engine_is_dropped_while_it_is_checked_fails(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, workers=working_in(held, **LOCAL))
    d = engine("d", checking("full"))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: bool(held.waiting))
    agents(d)[0].disconnect("p")
    run([d], lambda: "r" in d.loaded, timeout_s=5)
    assert d.loaded["r"].cause == "transport"
    assert "dropped before the payload was compared" in d.loaded["r"].error


def test_what_has_been_written_is_not_read_instead(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that cannot be done, in a push that could have been a pull: it cannot be there."""
    likes = replace(local_agent.CAPABILITIES, preferred_direction="write")
    monkeypatch.setattr(local_agent, "CAPABILITIES", likes)
    monkeypatch.setattr(payload, "NOTE_MAX_BYTES", 300)
    p, d = engine("p", LOCAL), engine("d", checking("full", "auto"))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    failed = (
        d.workers[0, 0]
        .stats()
        .value("kvbridge_transfers_total", direction="write", outcome="failed", reason="refused")
    )
    assert (d.loaded["r"].cause, failed) == ("refused", 1)


def test_another_connector_loads_what_came_wrong_over_the_first(engine: Make) -> None:
    both = [{**LOCAL, "name": name, "payload_check": "full"} for name in ("a", "b")]
    p, d = engine("p", both), engine("d", both)

    def spoil() -> None:
        d.memory[0, 0][0, OURS[0]] = 7

    when(d.workers[0, 0].children["a"], None, spoil)  # type: ignore[attr-defined]
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].error, d.loaded["r"].via) == ("", "b")
    assert (d.tokens(OURS, TOKENS) == p.tokens(THEIRS, TOKENS)).all()
    assert checks(d, connector="a", reason="corrupt") == checks(d, connector="b", outcome="ok") == 1


def test_who_asks_before_the_blocks_are_held_is_answered_then(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may be faster than the next step of the engine whose blocks it has read."""
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    monkeypatch.setattr(answers, "EARLY_S", 0.2)
    is_held, asked_s = RankAgent.is_held, []

    def not_yet(self: RankAgent, request_id: str) -> bool:
        asked_s.append(time.monotonic())
        return is_held(self, request_id) and asked_s[-1] > asked_s[0] + 1.0

    monkeypatch.setattr(RankAgent, "is_held", not_yet)
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert asked_s[-1] > asked_s[0] + 1.0


def test_questions_about_what_is_never_held_are_bounded_and_forgotten(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    monkeypatch.setattr(answers, "QUESTIONS_MAX", 2)
    monkeypatch.setattr(answers, "EARLY_S", 0.3)
    (ours,), half = agents(d), p.workers[0, 0].worker_half  # type: ignore[attr-defined]
    (peer,) = ours.sessions["p"].peers.values()
    address = d.scheduler.scheduler_half.server.address  # type: ignore[attr-defined]
    for number in (7, 8, 9):
        asks = DigestRequest(
            number, "nobody's", "d", ours.incarnation, 1, (0, 0), (address.host, address.port)
        )
        ours.tell(peer, asks)  # type: ignore[arg-type]
    run([p], lambda: len(half._answers) == 2)
    stats = p.workers[0, 0].stats
    run([p], lambda: stats().value("kvbridge_notices_ignored_total", reason="too_many") == 1)
    run([p], lambda: not len(half._answers), timeout_s=5)


def test_a_load_that_is_late_is_not_compared_any_more(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", checking("full", timeout_s=0.5))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    loads = d.workers[0, 0].worker_half._loads  # type: ignore[attr-defined]
    run([p, d], lambda: bool(loads._reading))
    time.sleep(0.6)
    d.step()
    assert d.loaded["r"].cause == "deadline"
    assert "no time was left" in d.loaded["r"].error


def test_two_ranks_that_gave_something_else_fail_a_load_once(engine: Make) -> None:
    """Both are found at the same moment."""
    held = Held()
    config = checking("full", staging_nbytes=0)
    p, d = engine("p", LOCAL, tp=2), engine("d", config, workers=working_in(held, **config))

    def spoil() -> None:
        d.memory[0, 0][:, OURS] = 7

    when(d.workers[0, 0], None, spoil)
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: len(held.waiting) == 2)
    held.go()
    checks_open = agents(d)[0]._checks._open
    run([p, d], lambda: all(a.theirs is not None for c in checks_open.values() for a in c.asked))
    held.go()
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].cause == "corrupt"
    assert checks(d) == checks(d, reason="corrupt") == 1


@pytest.mark.parametrize("said", ["lease", "fault", "shutdown", "", "nonsense"])
def test_an_answer_has_a_cause_that_can_be_counted(
    engine: Make, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    tell = RankAgent.tell

    def refuse(self: RankAgent, peer: Peer, answer: Given | Digests) -> bool:
        return tell(self, peer, Digests(answer.number, b"", "not today", said))

    monkeypatch.setattr(RankAgent, "tell", refuse)
    p, d = engine("p", LOCAL), engine("d", checking("full"))
    d.load("r", OURS, TOKENS, p.prefill("r", THEIRS, TOKENS))
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "lease"


@pytest.mark.parametrize(
    ("name", "way"), [("nixl", "pull"), ("ucx", "push"), ("mooncake", "pull")], ids=str
)
def test_what_is_right_passes_over_every_transport(name: str, way: str) -> None:
    decode = {"direction": way, "payload_check": "full"}
    outcome = {"outcome": "ok"}
    assert drivers.count_of_loads(name, "payload_checks_total", outcome, decode=decode) == 3
