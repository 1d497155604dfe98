"""Loads between engines that keep cells in another order: few large reads, arranged on arrival."""

import time
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.errors import MemoryBusyError, TransportError
from kvbridge.model import Region
from kvbridge.plan import BlockTable
from kvbridge.session import RankAgent, portions, staging
from kvbridge.session.staging import Staging
from kvbridge.transport import State
from kvbridge.transport.local import agent as local_agent
from tests.integration import drivers
from tests.integration.test_aborted_loads import abort, failing
from tests.integration.tiny_engine import (
    CONTENT,
    HEADS,
    LAYERS,
    PAGE,
    Make,
    TinyEngine,
    run,
    worker_of,
)
from tests.integration.working import Held, working_in

LOCAL: dict[str, Any] = {"transport": "local"}
PULL: dict[str, Any] = {**LOCAL, "direction": "pull"}
HEADS_FIRST = "BKHNC"
PIECE = 2 * PAGE * HEADS * CONTENT * 4
"""A page of one layer of an engine of one rank."""
BLOCK = LAYERS * PIECE


def agent_of(engine: TinyEngine) -> RankAgent:
    return worker_of(engine.workers[0, 0]).agent


def value(engine: TinyEngine, name: str, **labels: str) -> float:
    return sum(w.stats().value(f"kvbridge_{name}", **labels) for w in engine.workers.values())


def submitted(engine: TinyEngine) -> float:
    return value(engine, "transfer_copies_total", stage="submitted")


def loads(engine: TinyEngine, *requests: str) -> bool:
    return all(request in engine.loaded for request in requests)


def begin(
    p: TinyEngine, d: TinyEngine, name: str, theirs: list[int], ours: list[int], here: int = 0
) -> int:
    """Begin to load all tokens of some blocks; return how many are moved."""
    tokens = p.page * len(theirs)
    params = p.prefill(name, theirs, tokens)
    params.pop("kvbridge", None)
    return d.load(name, ours, tokens, params, here=here)


def holds_no_staging(d: TinyEngine) -> bool:
    agents = [worker_of(worker).agent for worker in d.workers.values()]
    return not any(agent.staged_nbytes or len(agent._portions) for agent in agents)


SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tp": 2}, {"tp": 4}),
    ({"tp": 4}, {"pp": 2}),
    ({"tp": 2, "pp": 2}, {"tp": 1}),
    ({"page": 8}, {}),
    ({}, {"page": 8}),
    ({"tp": 2, "page": 8}, {"tp": 1, "pp": 2}),
]


@pytest.mark.parametrize("nbytes", [64 << 20, 4 * PIECE], ids=["one portion", "many portions"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_every_byte_is_in_its_place_whatever_the_two_shapes(
    engine: Make, prefill: dict[str, Any], decode: dict[str, Any], nbytes: int
) -> None:
    p = engine("p", LOCAL, axes=HEADS_FIRST, **prefill)
    d = engine("d", {**LOCAL, "staging_nbytes": nbytes}, **decode)
    theirs, ours = ([7, 2, 3, 9, 12, 5][: 24 // each.page] for each in (p, d))
    assert begin(p, d, "r", theirs, ours, here=5) == 19
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].error == ""
    assert (d.tokens(ours, 24)[:, 5:] == p.tokens(theirs, 24)[:, 5:]).all()
    assert (d.tokens(ours, 24)[:, :5] == -1).all()
    others = [page for page in range(16) if page not in ours]
    assert all((memory[:, others] == -1).all() for memory in d.memory.values())
    pages = 6 if p.page == PAGE else 3
    assert submitted(d) <= 2 * pages * LAYERS * len(p.ranks) * len(d.ranks), "pages, not cells"
    assert holds_no_staging(d)
    assert value(d, "staging_bytes") == 0
    assert not p.expired


def test_how_large_the_reads_are_is_counted_as_it_is(engine: Make) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "r", [3, 1, 5], [2, 7, 4])
    run([p, d], lambda: loads(d, "r"))
    assert submitted(d) == 3 * LAYERS
    (source,) = d.loaded["r"].sources
    assert (source.merged, source.nbytes) == (3 * LAYERS, 3 * BLOCK)
    spread = [
        counted
        for key, counted in d.workers[0, 0].stats().spreads.items()
        if key[0] == "kvbridge_transfer_seconds" and key[-1] == "arranging"
    ]
    assert sum(sum(each.counts) for each in spread) == 1
    assert sum(each.total for each in spread) <= d.loaded["r"].seconds


@pytest.mark.parametrize("nbytes", [0, PIECE - 1], ids=["no staging", "less than a page"])
def test_without_room_for_a_page_cells_are_read_directly(engine: Make, nbytes: int) -> None:
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", {**LOCAL, "staging_nbytes": nbytes})
    begin(p, d, "r", [3, 1], [2, 7])
    run([p, d], lambda: loads(d, "r"))
    assert (d.tokens([2, 7], 8) == p.tokens([3, 1], 8)).all()
    assert value(d, "transfer_copies_total", stage="planned") == 8 * HEADS * 2 * LAYERS


def test_the_pool_is_made_for_the_first_load_that_needs_it_and_is_no_cache(engine: Make) -> None:
    """Where nobody may write here: see test_packed_pushes.py for the opposite."""
    p, alike = engine("p", LOCAL, axes=HEADS_FIRST), engine("a", LOCAL)
    d = engine("d", {**PULL, "staging_nbytes": 1 << 20})
    transport = worker_of(d.workers[0, 0])._transport
    begin(alike, d, "direct", [3], [2])
    run([alike, d], lambda: loads(d, "direct"))
    before = set(transport.memory.regions)
    begin(p, d, "staged", [3], [4])
    run([p, d], lambda: loads(d, "staged"))
    (pool,) = set(transport.memory.regions) - before
    assert pool.nbytes == 1 << 20
    assert pool not in agent_of(d)._local.cache.regions


def test_a_pool_that_cannot_be_registered_costs_copies_and_no_request(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", {**PULL, "staging_nbytes": 12345})
    transport = worker_of(d.workers[0, 0])._transport
    register = transport.register

    def limited(regions: Any) -> None:
        if any(region.nbytes == 12345 for region in regions):
            raise TransportError("no memory can be pinned any more")
        register(regions)

    transport.register = limited  # type: ignore[method-assign]
    for name, ours in (("first", [2]), ("second", [4])):
        begin(p, d, name, [3], ours)
        run([p, d], lambda name=name: loads(d, name))  # type: ignore[misc]
        assert (d.tokens(ours, 4) == p.tokens([3], 4)).all()
    assert caplog.text.count("12345 bytes of staging memory cannot be had") == 1


def test_memory_that_can_only_be_read_is_left_to_the_transport(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses to read into it; the host would crash when it puts cells there."""
    monkeypatch.setattr(staging, "find_read_only", frozenset)
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "r", [3, 1], [2, 7])
    run([p, d], lambda: loads(d, "r"))
    assert value(d, "transfer_copies_total", stage="planned") == 8 * HEADS * 2 * LAYERS


@pytest.mark.multi_process
@pytest.mark.parametrize("name", ["nixl", "ucx", "mooncake"])
def test_pages_are_read_over_every_transport(name: str) -> None:
    stage, decode = {"stage": "submitted"}, {"staging_nbytes": 4 * PIECE}
    copies = drivers.count_of_loads(
        name, "transfer_copies_total", stage, axes=HEADS_FIRST, decode=decode
    )
    assert copies == 3 * 3 * LAYERS * 2


# --- more than there is room for -----------------------------------------------------------------


@pytest.mark.parametrize("share", [1, 4], ids=["a load at a time", "block by block"])
def test_b60_two_prompts_that_fit_one_by_one_do_not_block_each_other(
    engine: Make, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Room for four pieces, and two prompts of three at once."""
    monkeypatch.setattr(portions, "SHARE", share)
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", {**LOCAL, "staging_nbytes": 4 * BLOCK})
    for name, theirs, ours in (("a", [3, 1, 5], [2, 7, 4]), ("b", [6, 8, 9], [1, 3, 5])):
        assert begin(p, d, name, theirs, ours) == 12
    run([p, d], lambda: loads(d, "a", "b") and {"a", "b"} <= set(p.sent))
    assert (d.loaded["a"].error, d.loaded["b"].error) == ("", "")
    assert (d.tokens([2, 7, 4], 12) == p.tokens([3, 1, 5], 12)).all()
    assert (d.tokens([1, 3, 5], 12) == p.tokens([6, 8, 9], 12)).all()
    assert holds_no_staging(d)


def test_b60_the_second_begins_when_the_first_has_given_back_all(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "SHARE", 1)
    config, held = {**LOCAL, "staging_nbytes": 4 * BLOCK}, Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", config, workers=working_in(held, **config))
    begin(p, d, "a", [3, 1, 5], [2, 7, 4])
    begin(p, d, "b", [6, 8, 9], [1, 3, 5])
    run([p, d], lambda: bool(held.waiting))
    for _ in range(20):
        d.step()
    assert len(held.waiting) == 1
    assert value(d, "staging_bytes") == 3 * BLOCK
    assert value(d, "transfers_pending", phase="arranging") == 1
    assert value(d, "transfers_pending", phase="reading") == 1
    held.go()
    run([p, d], lambda: loads(d, "a") and bool(held.waiting))
    assert value(d, "staging_bytes") == 3 * BLOCK
    held.go()
    run([p, d], lambda: loads(d, "b"))
    assert (d.tokens([1, 3, 5], 12) == p.tokens([6, 8, 9], 12)).all()
    assert holds_no_staging(d)


def test_who_does_not_get_a_turn_fails_at_its_own_deadline_and_is_quiet(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "SHARE", 1)
    p = engine("p", {**LOCAL, "name": "a"}, axes=HEADS_FIRST)
    hangs = failing("drop")
    d = engine("d", {**hangs, "staging_nbytes": 2 * BLOCK, "timeout_s": 3})
    begin(p, d, "stuck", [3, 1], [2, 7])
    run([p, d], lambda: value(d, "staging_bytes") > 0)
    begin(p, d, "waits", [6], [1])
    run([p, d], lambda: loads(d, "waits"))
    assert d.loaded["waits"].cause == "deadline"
    assert "1 of 1 portions had not got their turn" in d.loaded["waits"].error
    assert "staging_nbytes" in d.loaded["waits"].error
    assert (d.memory[0, 0] == -1).all()
    assert not loads(d, "stuck"), "its read may still land"
    assert value(d, "staging_bytes") == 2 * BLOCK
    assert value(d, "quarantined_operations") == 1
    with pytest.raises(MemoryBusyError, match="portions of loads"):
        d.renew()


# --- given up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["aborted", "deadline"])
def test_staging_is_nobody_elses_while_a_read_may_still_land_there(
    engine: Make, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(portions, "SHARE", 1)
    late_s = 4.5
    p = engine("p", {**LOCAL, "name": "a"}, axes=HEADS_FIRST)
    slow = failing("delay", delay_s=late_s)
    d = engine("d", {**slow, "staging_nbytes": BLOCK, "timeout_s": 20 if why == "aborted" else 3})
    begin(p, d, "first", [3], [2])
    run([p, d], lambda: value(d, "staging_bytes") > 0)
    read_s = time.monotonic()
    if why == "aborted":
        abort(d, "first", [2])
    run([p, d], lambda: value(d, "quarantined_operations") == 1)
    begin(p, d, "second", [6], [1])
    run([p, d], lambda: loads(d, "first"))
    assert time.monotonic() - read_s > late_s / 2, "not before its read was quiet"
    assert "second" not in d.loaded
    run([p, d], lambda: loads(d, "second"))
    assert d.loaded["first"].cause == why
    assert d.loaded["second"].error == ""
    assert (d.tokens([2], 4) == -1).all(), "what nobody wants is not arranged"
    assert (d.tokens([1], 4) == p.tokens([6], 4)).all()
    assert holds_no_staging(d)


def test_what_is_aborted_before_it_is_arranged_never_is(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", LOCAL, workers=working_in(held, **LOCAL))
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    abort(d, "r", [2])
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    held.go()
    assert d.loaded["r"].cause == "aborted"
    assert (d.memory[0, 0] == -1).all()
    assert holds_no_staging(d)


def test_what_is_aborted_while_it_is_arranged_is_quiet_only_then(engine: Make) -> None:
    held = Held(begins=True)
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", LOCAL, workers=working_in(held, **LOCAL))
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    abort(d, "r", [2])
    run([p, d], lambda: "r" in p.sent)
    assert not loads(d, "r"), "its blocks are being written to"
    assert value(d, "quarantined_operations") == 1
    assert agent_of(d).is_busy("p")
    with pytest.raises(MemoryBusyError, match="1 portions of loads"):
        d.renew()
    held.go()
    run([p, d], lambda: loads(d, "r"))
    assert d.loaded["r"].cause == "aborted"
    assert holds_no_staging(d)


def test_the_lease_is_looked_at_after_the_last_portion(engine: Make) -> None:
    """Blocks that are given away after the first portions were read."""
    config, held = {**LOCAL, "staging_nbytes": PIECE}, Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", config, workers=working_in(held, **config))
    begin(p, d, "r", [3, 1], [2, 7])
    run([p, d], lambda: bool(held.waiting))
    (transfer,) = agent_of(d)._live._live
    assert transfer.seen is None
    (name,) = worker_of(p.workers[0, 0])._held
    agent_of(p).expire(name)
    p.fill([3, 1], value=0.5)

    def has_ended() -> bool:
        held.go()
        return loads(d, "r")

    run([d], has_ended)
    assert d.loaded["r"].cause == "lease"
    assert "its lease was over" in d.loaded["r"].error
    assert holds_no_staging(d)


def test_a_read_that_fails_takes_the_rest_of_the_load_out_of_the_line(engine: Make) -> None:
    p = engine("p", {**LOCAL, "name": "a"}, axes=HEADS_FIRST)
    d = engine("d", {**failing("fail"), "staging_nbytes": PIECE})
    begin(p, d, "fails", [3, 1, 5], [2, 7, 4])
    begin(p, d, "fine", [6], [1])
    run([p, d], lambda: loads(d, "fails", "fine"))
    assert d.loaded["fails"].cause == "transport"
    assert (d.loaded["fine"].error, (d.tokens([1], 4) == p.tokens([6], 4)).all()) == ("", True)
    assert holds_no_staging(d)


def test_an_arrangement_that_raises_fails_the_load(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("a fault of this code")

    monkeypatch.setattr(portions, "_arrange", breaks)
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert "putting what has come in its place failed: ZeroDivisionError" in (d.loaded["r"].error)
    assert holds_no_staging(d)


# --- beside the rest ------------------------------------------------------------------------------


def test_an_engine_that_wakes_up_stages_into_a_pool_of_its_new_registration(engine: Make) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "before", [3], [2])
    run([p, d], lambda: loads(d, "before"))
    transport = worker_of(d.workers[0, 0])._transport
    old, content = set(transport.memory.regions), agent_of(d)._staging.content
    d.renew()
    assert agent_of(d)._staging.content is not content
    assert len(set(transport.memory.regions) & old) == 1, "the words of leases alone"
    begin(p, d, "after", [6, 8], [1, 3])
    run([p, d], lambda: loads(d, "after"))
    assert d.loaded["after"].error == ""
    assert (d.tokens([1, 3], 8) == p.tokens([6, 8], 8)).all()
    assert submitted(d) == 3 * LAYERS


@pytest.mark.parametrize("spoils", [False, True])
def test_a_payload_check_compares_what_has_been_arranged(engine: Make, spoils: bool) -> None:
    config, held = {**LOCAL, "payload_check": "full", "staging_nbytes": BLOCK}, Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", config, workers=working_in(held, **config))
    begin(p, d, "r", [3, 1, 5], [2, 7, 4])

    def has_ended() -> bool:
        if spoils and held.waiting and agent_of(d).staged_nbytes:
            agent_of(d)._staging.content[:64] ^= 1
        held.go()
        return loads(d, "r")

    run([p, d], has_ended)
    assert d.loaded["r"].cause == ("corrupt" if spoils else "")
    assert value(d, "payload_checks_total", outcome="failed" if spoils else "ok") == 1


@pytest.mark.parametrize(
    ("packs", "stages", "way", "copies"),
    [
        (1 << 20, 1 << 20, "write", range(1, 2)),
        (0, 1 << 20, "read", range(LAYERS, LAYERS + 1)),
        (1 << 20, 0, "write", range(2 * PAGE * LAYERS, 2 * PAGE * LAYERS * HEADS + 1)),
    ],
    ids=["packed", "the other one cannot pack", "cell by cell"],
)
def test_auto_reads_what_is_staged_where_it_cannot_be_packed_though_writing_is_preferred(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    packs: int,
    stages: int,
    way: str,
    copies: range,
) -> None:
    likes = replace(local_agent.CAPABILITIES, preferred_direction="write")
    monkeypatch.setattr(local_agent, "CAPABILITIES", likes)
    p = engine("p", {**LOCAL, "staging_nbytes": packs}, axes=HEADS_FIRST)
    d = engine("d", {**LOCAL, "staging_nbytes": stages})
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: loads(d, "r"))
    assert value(d, "transfers_total", direction=way, outcome="ok") == 1
    assert submitted(d) in copies
    assert (d.tokens([2], 4) == p.tokens([3], 4)).all()


def test_staging_that_is_not_proven_quiet_outlives_its_agent(engine: Make) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: loads(d, "r"))
    pool: Staging = agent_of(d)._staging
    content, region = pool.content, pool.region
    assert isinstance(region, Region)
    pool.close([region])
    assert any(each is content for each in staging._kept)
    staging._kept.clear()


def test_an_agent_that_is_closed_arranges_nothing_more(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", LOCAL, workers=working_in(held, **LOCAL))
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    agent = agent_of(d)
    (transfer,) = agent._live._live
    assert agent.close() == ()
    agent.poll()
    assert (transfer.state, transfer.cause, transfer.quiet) == (State.FAILED, "shutdown", True)
    assert (d.memory[0, 0] == -1).all()


def test_an_agent_alone_stages_too(engine: Make) -> None:
    """Without a connector: ``pull``, ``poll``, and the bytes are there."""
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", LOCAL)
    begin(p, d, "meets", [3], [2])
    run([p, d], lambda: loads(d, "meets"))
    agent = agent_of(d)
    transfer = agent.pull("p", "r", [BlockTable([5, 4])], [BlockTable([3, 3])], end_token=8)
    assert not transfer.quiet
    deadline_s = time.monotonic() + 30
    while transfer.state is State.PENDING:
        assert time.monotonic() < deadline_s
        agent.poll()
    assert (transfer.state, transfer.quiet) == (State.DONE, True)
    assert (d.tokens([5, 4], 8) == p.tokens([3, 3], 8)).all()
