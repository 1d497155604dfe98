"""Pushes of small cells: packed by whoever writes, put in their places by whoever reads."""

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.errors import MemoryBusyError, TransportError
from kvbridge.model import Rank, Region
from kvbridge.plan import PackedStream
from kvbridge.session import packing, portions, staging
from kvbridge.session.packing import Packing, streams_of
from kvbridge.transport.local import LocalTransport
from tests.integration import drivers
from tests.integration.test_aborted_loads import abort, failing
from tests.integration.test_staged_loads import (
    BLOCK,
    HEADS_FIRST,
    LOCAL,
    PIECE,
    SHAPES,
    agent_of,
    begin,
    loads,
    submitted,
    value,
)
from tests.integration.tiny_engine import HEADS, LAYERS, Make, TinyEngine, expected, run, worker_of
from tests.integration.working import Held, working_in

PUSH: dict[str, Any] = {**LOCAL, "direction": "push"}
DIRECT_COPIES = 2 * HEADS * LAYERS * 4
"""Cells of a block."""


def holds_no_staging(*engines: TinyEngine) -> bool:
    """Whether neither a reader's nor a writer's pool has anything in it."""
    agents = [worker_of(worker).agent for e in engines for worker in e.workers.values()]
    return not any(a.staged_nbytes or len(a._portions) or len(a._packing) for a in agents)


def steps(*engines: TinyEngine, count: int = 30) -> None:
    for _ in range(count):
        for each in engines:
            each.step()


def layers_written(engine: TinyEngine, blocks: list[int]) -> list[bool]:
    """Return of each layer whether all of some blocks is there: a stream is in this order."""
    return [bool((layer != -1).all()) for layer in engine.tokens(blocks, 4 * len(blocks))]


@pytest.fixture
def one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part take the whole pool of its reader."""
    monkeypatch.setattr(portions, "SHARE", 1)


@pytest.mark.parametrize("nbytes", [64 << 20, 4 * PIECE], ids=["one part", "many parts"])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES, ids=str)
def test_every_byte_is_in_its_place_whatever_the_two_shapes(
    engine: Make, prefill: dict[str, Any], decode: dict[str, Any], nbytes: int
) -> None:
    p = engine("p", LOCAL, axes=HEADS_FIRST, **prefill)
    d = engine("d", {**PUSH, "staging_nbytes": nbytes}, **decode)
    theirs, ours = ([7, 2, 3, 9, 12, 5][: 24 // each.page] for each in (p, d))
    assert begin(p, d, "r", theirs, ours, here=5) == 19
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].error == ""
    assert (d.tokens(ours, 24)[:, 5:] == p.tokens(theirs, 24)[:, 5:]).all()
    assert (d.tokens(ours, 24)[:, :5] == -1).all()
    others = [page for page in range(16) if page not in ours]
    assert all((memory[:, others] == -1).all() for memory in d.memory.values())
    moved = 19 * BLOCK // 4
    assert sum(source.nbytes for source in d.loaded["r"].sources) == moved
    pairs = len(p.ranks) * len(d.ranks)
    if nbytes > moved:
        assert submitted(d) <= pairs, "one write from each rank"
    else:
        assert moved // PIECE <= submitted(d) <= 2 * moved // PIECE + pairs
    assert value(p, "pushes_total", outcome="ok") == submitted(d)
    assert value(d, "transfers_total", direction="write", outcome="ok") == len(d.ranks)
    assert value(d, "staging_bytes") == value(p, "staging_bytes") == 0
    assert holds_no_staging(p, d)
    assert not p.expired


@pytest.mark.multi_process
@pytest.mark.parametrize("name", ["nixl", "ucx", "mooncake"])
def test_parts_are_written_over_every_transport(name: str) -> None:
    decode = {"direction": "push", "staging_nbytes": 4 * PIECE}
    stage = {"stage": "submitted"}
    copies = drivers.count_of_loads(
        name, "transfer_copies_total", stage, axes=HEADS_FIRST, decode=decode
    )
    each = -(-10 * BLOCK // 4 // 2 // PIECE)  # half of ten tokens, in parts of a quarter
    assert copies == 3 * 2 * each


# --- when it is chosen ----------------------------------------------------------------------------


def test_a_writer_without_staging_writes_every_cell_to_its_place(engine: Make) -> None:
    p, d = engine("p", {**LOCAL, "staging_nbytes": 0}, axes=HEADS_FIRST), engine("d", PUSH)
    begin(p, d, "r", [3, 1], [2, 7])
    run([p, d], lambda: loads(d, "r"))
    assert (d.tokens([2, 7], 8) == p.tokens([3, 1], 8)).all()
    assert value(d, "transfer_copies_total", stage="planned") == 2 * DIRECT_COPIES
    assert not agent_of(d).packs("p")


def test_what_is_not_computed_yet_is_written_to_its_place(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows yet where it is, so there is no stream that both could work out."""
    given: list[Any] = []
    monkeypatch.setattr(Packing, "give", lambda self, *rest: given.append(rest))
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", PUSH)
    d.load("r", [2], 4, expected(p, "x"))
    p.prefill("r", [3], 4, transfer_id="x")
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].ok
    assert (d.tokens([2], 4) == p.tokens([3], 4)).all()
    assert not given
    assert agent_of(d).packs("p")


def test_parts_fit_into_the_smaller_pool_of_the_two(engine: Make) -> None:
    p = engine("p", {**LOCAL, "staging_nbytes": BLOCK}, axes=HEADS_FIRST)
    d = engine("d", PUSH)
    begin(p, d, "r", [3, 1, 5], [2, 7, 4])
    run([p, d], lambda: loads(d, "r"))
    assert d.loaded["r"].error == ""
    assert (d.tokens([2, 7, 4], 12) == p.tokens([3, 1, 5], 12)).all()
    assert submitted(d) == 3
    assert holds_no_staging(p, d)


def test_the_readers_pool_is_there_at_once_and_the_writers_when_it_is_needed(engine: Make) -> None:
    p = engine("p", {**LOCAL, "direction": "pull"}, axes=HEADS_FIRST)
    own = {**PUSH, "staging_nbytes": 1 << 20}
    d = engine("d", own)
    pool = agent_of(d)._staging.region
    assert pool is not None
    assert pool.nbytes == 1 << 20
    assert pool in worker_of(d.workers[0, 0])._transport.memory.regions
    assert agent_of(p)._staging.region is None, "nobody writes there"
    q = engine("q", {**LOCAL, "role": "producer"}, axes=HEADS_FIRST)
    assert agent_of(q)._staging.region is None
    begin(q, d, "r", [3], [2])
    assert agent_of(q)._packed.region is None
    run([q, d], lambda: loads(d, "r"))
    assert agent_of(q)._packed.region is not None
    assert agent_of(q)._staging.region is None


def cannot_register(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    register = LocalTransport.register

    def limited(self: LocalTransport, regions: Sequence[Region]) -> None:
        if any(region.nbytes == nbytes for region in regions):
            raise TransportError("no memory can be pinned any more")
        register(self, regions)

    monkeypatch.setattr(LocalTransport, "register", limited)


def test_a_readers_pool_that_cannot_be_registered_costs_copies_and_no_request(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cannot_register(monkeypatch, 12345)
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", {**PUSH, "staging_nbytes": 12345})
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: loads(d, "r"))
    assert (d.tokens([2], 4) == p.tokens([3], 4)).all()
    assert value(d, "transfer_copies_total", stage="planned") == DIRECT_COPIES


def test_a_writers_pool_that_cannot_be_registered_costs_one_request(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that it packs; once it turns out that it cannot, it is not asked to any more."""
    cannot_register(monkeypatch, 12345)
    p, d = engine("p", {**LOCAL, "staging_nbytes": 12345}, axes=HEADS_FIRST), engine("d", PUSH)
    begin(p, d, "first", [3], [2])
    run([p, d], lambda: loads(d, "first"))
    assert d.loaded["first"].cause == "refused"
    assert "cannot be packed in 0 bytes of staging memory (staging_nbytes)" in (
        d.loaded["first"].error
    )
    begin(p, d, "second", [3], [4])
    run([p, d], lambda: loads(d, "second"))
    assert d.loaded["second"].error == ""
    assert (d.tokens([4], 4) == p.tokens([3], 4)).all()
    assert value(d, "transfer_copies_total", stage="planned") == DIRECT_COPIES
    assert holds_no_staging(p, d)


# --- more than there is room for ------------------------------------------------------------------


@pytest.mark.usefixtures("one_part")
@pytest.mark.parametrize("small", ["reader", "writer"])
def test_b60_two_prompts_that_fit_one_by_one_do_not_block_each_other(
    engine: Make, small: str
) -> None:
    """Room for four blocks, and two prompts of three at once."""
    sizes = {"staging_nbytes": 4 * BLOCK}
    p = engine("p", LOCAL | (sizes if small == "writer" else {}), axes=HEADS_FIRST)
    d = engine("d", PUSH | (sizes if small == "reader" else {}))
    for name, theirs, ours in (("a", [3, 1, 5], [2, 7, 4]), ("b", [6, 8, 9], [1, 3, 5])):
        assert begin(p, d, name, theirs, ours) == 12
    run([p, d], lambda: loads(d, "a", "b") and {"a", "b"} <= set(p.sent))
    assert (d.loaded["a"].error, d.loaded["b"].error) == ("", "")
    assert (d.tokens([2, 7, 4], 12) == p.tokens([3, 1, 5], 12)).all()
    assert (d.tokens([1, 3, 5], 12) == p.tokens([6, 8, 9], 12)).all()
    assert submitted(d) == 2
    assert holds_no_staging(p, d)


@pytest.mark.usefixtures("one_part")
def test_b60_the_second_is_packed_when_the_first_has_been_written(engine: Make) -> None:
    config, held = {**LOCAL, "staging_nbytes": 4 * BLOCK}, Held()
    p = engine("p", config, axes=HEADS_FIRST, workers=working_in(held, **config))
    d = engine("d", PUSH)
    begin(p, d, "a", [3, 1, 5], [2, 7, 4])
    begin(p, d, "b", [6, 8, 9], [1, 3, 5])
    run([p, d], lambda: bool(held.waiting))
    steps(p, d)
    assert len(held.waiting) == 1
    assert value(p, "staging_bytes") == 3 * BLOCK
    assert value(d, "staging_bytes") == 6 * BLOCK, "both are asked for: there is room here"
    held.go()
    run([p, d], lambda: loads(d, "a") and bool(held.waiting))
    assert value(p, "staging_bytes") == value(d, "staging_bytes") == 3 * BLOCK
    held.go()
    run([p, d], lambda: loads(d, "b"))
    assert (d.tokens([1, 3, 5], 12) == p.tokens([6, 8, 9], 12)).all()
    assert holds_no_staging(p, d)


@pytest.mark.usefixtures("one_part")
def test_b60_the_second_is_asked_for_when_the_first_is_in_its_place(engine: Make) -> None:
    config, held = {**PUSH, "staging_nbytes": 4 * BLOCK}, Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", config, workers=working_in(held, **config))
    begin(p, d, "a", [3, 1, 5], [2, 7, 4])
    begin(p, d, "b", [6, 8, 9], [1, 3, 5])
    for name in ("a", "b"):
        run([p, d], lambda: len(held.waiting) == 2 or bool(value(d, "staging_bytes")))
        held.go()  # what each consists of, and then what is to be put in its place
        run([p, d], lambda: bool(held.waiting))
        steps(p, d)
        assert len(agent_of(d)._wants) == 0
        assert value(p, "pushes_total") == (1 if name == "a" else 2)
        assert value(d, "staging_bytes") == 3 * BLOCK
        held.go()
        run([p, d], lambda name=name: loads(d, name))  # type: ignore[misc]
    assert (d.tokens([1, 3, 5], 12) == p.tokens([6, 8, 9], 12)).all()
    assert holds_no_staging(p, d)


@pytest.mark.usefixtures("one_part")
def test_b60_two_engines_that_take_from_each_other_have_room_for_what_they_give(
    engine: Make,
) -> None:
    """Each has room for one block that comes, and all of it is taken; and for one that it packs."""
    config = {**PUSH, "staging_nbytes": BLOCK}
    p, d = engine("p", config, axes=HEADS_FIRST), engine("d", config)
    for n in range(3):
        begin(p, d, f"from-p-{n}", [n, n + 3], [n, n + 6])
        begin(d, p, f"from-d-{n}", [n + 9, n + 12], [n + 6, n + 9])
    run([p, d], lambda: len(d.loaded) == len(p.loaded) == 3 and len(p.sent) == len(d.sent) == 3)
    assert {each.error for e in (p, d) for each in e.loaded.values()} == {""}
    for n in range(3):
        assert (d.tokens([n, n + 6], 8) == p.tokens([n, n + 3], 8)).all()
        assert (p.tokens([n + 6, n + 9], 8) == d.tokens([n + 9, n + 12], 8)).all()
    assert submitted(p) == submitted(d) == 6
    assert holds_no_staging(p, d)


# --- given up -------------------------------------------------------------------------------------


def test_what_is_aborted_while_it_is_packed_is_quiet_only_then(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST, workers=working_in(held, **LOCAL))
    d = engine("d", PUSH)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    abort(d, "r", [2])
    steps(p, d, count=100)
    assert not loads(d, "r"), "nobody has said that it will not be written"
    assert "r" not in p.sent, "its blocks are being read"
    assert value(d, "quarantined_operations") == 1
    assert value(d, "staging_bytes") == value(p, "staging_bytes") == BLOCK
    for each, why in ((p, "1 requests are being read"), (d, "1 loads into it")):
        with pytest.raises(MemoryBusyError, match=why):
            each.sleep()
    held.go()
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].cause == "aborted"
    assert (d.memory[0, 0] == -1).all(), "what was withdrawn is not written, nor put anywhere"
    assert value(p, "pushes_total", reason="deadline") == 1
    assert holds_no_staging(p, d)


@pytest.mark.usefixtures("one_part")
@pytest.mark.parametrize("why", ["aborted", "deadline"])
def test_staging_is_nobody_elses_while_a_write_may_still_land_there(engine: Make, why: str) -> None:
    late_s = 4.5
    p = engine("p", failing("delay", delay_s=late_s), axes=HEADS_FIRST)
    own = {**PUSH, "name": "a", "staging_nbytes": BLOCK}
    d = engine("d", {**own, "timeout_s": 20 if why == "aborted" else 3})
    begin(p, d, "first", [3], [2])
    run([p, d], lambda: len(agent_of(p)._operations) == 1)
    written_s = time.monotonic()
    if why == "aborted":
        abort(d, "first", [2])
    run([p, d], lambda: value(d, "quarantined_operations") == 1)
    begin(p, d, "second", [6], [1])
    run([p, d], lambda: loads(d, "first"))
    assert time.monotonic() - written_s > late_s / 2, "not before its write was quiet"
    assert "second" not in d.loaded
    run([p, d], lambda: loads(d, "second"))
    assert d.loaded["first"].cause == why
    assert d.loaded["second"].error == ""
    assert (d.tokens([2], 4) == -1).all(), "what nobody wants is not put in its place"
    assert (d.tokens([1], 4) == p.tokens([6], 4)).all()
    assert holds_no_staging(p, d)


@pytest.mark.usefixtures("one_part")
def test_a_lease_that_is_over_midway_takes_the_rest_with_it(engine: Make) -> None:
    """Of two parts, a layer each, one has been written, and the other is being packed."""
    config, held = {**LOCAL, "lease_s": 1.0, "lease_longest_s": 1.0}, Held()
    p = engine("p", config, axes=HEADS_FIRST, workers=working_in(held, **config))
    d = engine("d", {**PUSH, "staging_nbytes": BLOCK})
    begin(p, d, "r", [3, 1], [2, 7])
    for _ in range(2):
        run([p, d], lambda: bool(held.waiting))
        if value(p, "pushes_total") == 0:
            held.go()
            run([p, d], lambda: value(p, "pushes_total") == 1)
    over_s = time.monotonic() + 1.2
    run([p, d], lambda: time.monotonic() > over_s)
    assert "r" not in p.sent, "its blocks are being read"
    assert value(p, "staging_bytes") == BLOCK
    held.go()
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert p.expired == {"r"}
    assert d.loaded["r"].cause == "lease"
    assert "kept no longer" in d.loaded["r"].error
    assert layers_written(d, [2, 7]) == [True, False]
    assert value(p, "pushes_total", outcome="ok") == 1
    assert holds_no_staging(p, d)


def test_blocks_are_free_once_they_are_packed_and_memory_is_not(engine: Make) -> None:
    """What is on its way to the reader is a copy."""
    slow = {**failing("delay", delay_s=1.5), "lease_s": 0.5, "lease_longest_s": 0.5}
    p, d = engine("p", slow, axes=HEADS_FIRST), engine("d", {**PUSH, "name": "a"})
    begin(p, d, "r", [3], [2])
    expected_tokens = p.tokens([3], 4).copy()
    run([p, d], lambda: "r" in p.sent)
    assert not loads(d, "r")
    assert len(agent_of(p)._operations) == 1
    p.fill([3], value=0.5)
    with pytest.raises(MemoryBusyError, match="being packed and written for others"):
        p.renew()
    run([p, d], lambda: loads(d, "r"))
    assert d.loaded["r"].error == "", "all of it was packed before its lease was over"
    assert (d.tokens([2], 4) == expected_tokens).all()
    assert holds_no_staging(p, d)


PRODUCER = """
    import json, sys
    from tests.integration.tiny_engine import TinyEngine
    p = TinyEngine("p", {config!r}, axes="BKHNC")
    print(json.dumps(p.prefill("r", [3, 1], 8)), flush=True)
    while sys.stdin.readline():
        for _ in range(20):
            p.step()
        print(len(p.workers[0, 0].worker_half.agent._operations), flush=True)
"""


@contextmanager
def producer(config: dict[str, Any]) -> Iterator["subprocess.Popen[str]"]:
    """Run an engine that steps when it is told to, and says then how many writes it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRODUCER.format(config=config))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.multi_process
def test_staging_comes_back_when_its_writer_was_killed_and_others_go_on(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts, a layer each, one has been written, and the other is on its way."""
    monkeypatch.setattr(portions, "SHARE", 2)
    options = {"inner": LOCAL, "operations": [{"what": "drop", "at": [1]}]}
    hangs = {"name": "local", "transport": "faulty", "options": options}
    d = engine("d", {**PUSH, "staging_nbytes": 2 * BLOCK, "timeout_s": 2.0})
    with producer(hangs) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        d.load("r", [2, 7], 8, json.loads(process.stdout.readline()))
        deadline_s, hanging = time.monotonic() + 20, 0
        while not (hanging and any(layers_written(d, [2, 7]))):
            assert time.monotonic() < deadline_s
            process.stdin.write("step\n")
            hanging = int(process.stdout.readline())
            d.step()
    assert value(d, "staging_bytes") == BLOCK
    q = engine("q", LOCAL, axes=HEADS_FIRST)
    begin(q, d, "other", [6], [1])
    run([q, d], lambda: loads(d, "other") and value(d, "quarantined_operations") == 1)
    assert not loads(d, "r"), "what was begun may still land"
    assert value(d, "staging_bytes") == BLOCK
    run([q, d], lambda: loads(d, "r"))
    assert not d.loaded["r"].ok
    assert d.loaded["r"].recompute
    assert d.loaded["other"].error == ""
    assert (d.tokens([1], 4) == q.tokens([6], 4)).all()
    assert holds_no_staging(d, q)
    assert value(d, "quarantined_operations") == 0


def test_staging_that_may_still_be_written_to_outlives_its_agent(engine: Make) -> None:
    held = Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST, workers=working_in(held, **LOCAL))
    d = engine("d", PUSH)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    content = agent_of(d)._staging.content
    d.close()
    assert any(each is content for each in staging._kept)
    staging._kept.clear()


# --- what does not fit together -------------------------------------------------------------------


def test_two_engines_that_mean_other_bytes_are_told_apart_before_any_is_written(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer, whose code is another version, say, takes one cell to belong elsewhere."""
    meant: list[PackedStream] = []

    def otherwise(*plan: Any) -> dict[Rank, PackedStream]:
        found = streams_of(*plan)
        meant.extend(found.values())
        return {rank: replace(each, digest=b"\x07" * 8) for rank, each in found.items()}

    monkeypatch.setattr(packing, "streams_of", otherwise)
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", PUSH)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].cause == "incompatible"
    for words in (meant[0].digest.hex(), "07" * 8, f"[0, {BLOCK})", "the engines disagree"):
        assert words in d.loaded["r"].error
    assert (d.memory[0, 0] == -1).all()
    assert value(p, "pushes_total", reason="incompatible") == 1
    assert holds_no_staging(p, d)


def test_blocks_that_are_none_fail_their_own_request_alone(engine: Make) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", PUSH)
    begin(p, d, "met", [3], [2])
    run([p, d], lambda: loads(d, "met"))
    begin(p, d, "wrong", [3, 1], [1 << 32, 5], here=4)  # of which one is not even needed
    begin(p, d, "right", [6], [1])
    run([p, d], lambda: loads(d, "wrong", "right"))
    assert d.loaded["wrong"].cause == "refused"
    assert d.loaded["right"].error == ""
    assert (d.tokens([1], 4) == p.tokens([6], 4)).all()
    assert holds_no_staging(p, d)


# --- beside the rest ------------------------------------------------------------------------------


@pytest.mark.parametrize("spoils", [False, True])
def test_a_payload_check_compares_what_has_been_put_in_its_place(
    engine: Make, spoils: bool
) -> None:
    config, held = {**PUSH, "payload_check": "full", "staging_nbytes": BLOCK}, Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", config, workers=working_in(held, **config))
    begin(p, d, "r", [3, 1, 5], [2, 7, 4])

    def has_ended() -> bool:
        if agent_of(d).staged_nbytes and not len(agent_of(d)._wants):
            if spoils:
                agent_of(d)._staging.content[:64] ^= 1
            held.go()
        elif not agent_of(d).staged_nbytes:
            held.go()
        return loads(d, "r")

    run([p, d], has_ended)
    assert d.loaded["r"].cause == ("corrupt" if spoils else "")
    assert value(d, "payload_checks_total", outcome="failed" if spoils else "ok") == 1
    assert holds_no_staging(p, d)


def test_what_is_counted(engine: Make) -> None:
    p = engine("p", LOCAL, axes=HEADS_FIRST)
    d = engine("d", {**PUSH, "staging_nbytes": 4 * BLOCK})
    begin(p, d, "r", [3, 1, 5], [2, 7, 4])
    run([p, d], lambda: loads(d, "r"))
    (source,) = d.loaded["r"].sources
    assert (source.merged, source.nbytes) == (3, 3 * BLOCK)
    assert submitted(d) == value(p, "pushes_total", outcome="ok") == 3, "parts"
    assert value(d, "transfers_total", direction="write", outcome="ok") == 1
    arranging = [
        counted
        for key, counted in d.workers[0, 0].stats().spreads.items()
        if key[0] == "kvbridge_transfer_seconds" and key[-1] == "arranging"
    ]
    assert sum(sum(each.counts) for each in arranging) == 1


def test_engines_that_wake_up_pack_and_unpack_in_pools_of_their_new_registration(
    engine: Make,
) -> None:
    p, d = engine("p", LOCAL, axes=HEADS_FIRST), engine("d", PUSH)
    for n, renewed in enumerate([(), (p,), (d,), (p, d)]):
        for each in renewed:
            each.renew()
        begin(p, d, f"r{n}", [6, 8], [1, 3])
        run([p, d], lambda n=n: loads(d, f"r{n}") and f"r{n}" in p.sent)  # type: ignore[misc]
        assert d.loaded[f"r{n}"].error == ""
        assert (d.tokens([1, 3], 8) == p.tokens([6, 8], 8)).all()
        d.fill([1, 3], 0.25)
    assert submitted(d) == 4
    assert holds_no_staging(p, d)


def test_what_could_not_be_packed_is_not_written(engine: Make) -> None:
    """The thread was shut down before; in the memory to pack into there may be anything."""
    held = Held()
    p = engine("p", LOCAL, axes=HEADS_FIRST, workers=working_in(held, **LOCAL))
    d = engine("d", PUSH)
    begin(p, d, "r", [3], [2])
    run([p, d], lambda: bool(held.waiting))
    held.shutdown()
    run([p, d], lambda: loads(d, "r") and "r" in p.sent)
    assert d.loaded["r"].cause == "transport"
    assert "the writer was shut down" in d.loaded["r"].error
    assert (d.memory[0, 0] == -1).all()
    assert holds_no_staging(p, d)
