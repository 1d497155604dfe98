"""Two engines in one process, over every real transport: paired, read, told, and parted."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import (
    BlockTableError,
    ConfigError,
    HandshakeError,
    IncompatibleError,
    TransportError,
    UnknownEngineError,
)
from kvbridge.handshake import HandshakeMetadata, RankPayload
from kvbridge.handshake.metadata import decode_body, decode_factors, seal
from kvbridge.model import CacheGroup, RankCache, TransferTopology, attention_layer, memory_region
from kvbridge.plan import BlockTable
from kvbridge.session import RankAgent, Transfer
from kvbridge.transport import Handle, Poll, State, Transport, open_transport

HEADS, PAGE, PAGES, CONTENT = 4, 4, 8, 8


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rank:
    """One rank of a small engine, its memory and what it is made of."""

    topology: TransferTopology
    cache: RankCache
    memory: np.ndarray[Any, np.dtype[np.float32]]
    transport: Transport
    agent: RankAgent

    @property
    def metadata(self) -> dict[tuple[int, int], HandshakeMetadata]:
        data = self.agent.metadata()
        return {data.rank: data}


def make_rank(
    transport: Transport, engine_id: str, *, tp_rank: int = 0, tp_size: int = 1, **changes: Any
) -> Rank:
    heads = HEADS if changes.get("replicated") else HEADS // tp_size
    memory = np.full((PAGES, 2, PAGE, heads, CONTENT), -1, np.float32)
    layer = attention_layer(
        memory,
        axes="BKNHC",
        layer=0,
        name=changes.get("name", "layers.0"),
        unit_start=0 if changes.get("replicated") else tp_rank * heads,
        unit_total=HEADS,
    )
    cache = RankCache(
        engine_id, 0, tp_rank, (layer,), (CacheGroup("attention", PAGE),), (memory_region(memory),)
    )
    topology = TransferTopology(
        tp_rank=tp_rank,
        tp_size=tp_size,
        block_size=PAGE,
        engine_id=engine_id,
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
    )
    agent = RankAgent(
        topology,
        cache,
        transport,
        model=changes.get("model", "m"),
        incarnation=changes.get("incarnation", "1"),
        clock=changes.get("clock", time.monotonic),
    )
    return Rank(topology, cache, memory, transport, agent)


MakeRank = Callable[..., Rank]


@pytest.fixture
def rank(transport_name: str) -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(engine_id: str, **changes: Any) -> Rank:
        transport = changes.pop("transport", None)
        transport = transport or open_transport({"transport": transport_name})
        made.append(make_rank(transport, engine_id, **changes))
        return made[-1]

    yield make
    for each in made:
        each.agent.close()


def finish(consumer: Rank, transfer: Transfer) -> None:
    deadline_s = time.monotonic() + 20
    while transfer.state is State.PENDING:
        assert time.monotonic() < deadline_s, "the transfer neither ends nor fails"
        consumer.agent.poll()


def released(producer: Rank) -> tuple[str, ...]:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        found = producer.agent.poll().released
        if found:
            return found
    return ()


def test_a_request_moves_and_both_producers_are_told(rank: MakeRank) -> None:
    producers = [rank("p", tp_rank=t, tp_size=2) for t in range(2)]
    consumer = rank("d")
    for producer in producers:
        producer.memory[:] = np.arange(producer.memory.size).reshape(producer.memory.shape)
        producer.memory += 10_000 * producer.cache.tp_rank
        producer.agent.releases.hold("r")
    consumer.agent.connect({**producers[0].metadata, **producers[1].metadata})
    transfer = consumer.agent.pull(
        "p", "r", [BlockTable([5, 2])], [BlockTable([7, 1])], end_token=6
    )
    finish(consumer, transfer)
    assert (transfer.state, transfer.reason) == (State.DONE, "")
    assert [source.rank for source in transfer.sources] == [(0, 0), (0, 1)]
    expected = np.concatenate([p.memory[[7, 1]] for p in producers], axis=3)
    assert (consumer.memory[5] == expected[0]).all()
    assert (consumer.memory[2][:, :2] == expected[1][:, :2]).all()
    untouched = np.delete(consumer.memory, [5, 2], axis=0)
    assert (untouched == -1).all()
    assert (consumer.memory[2][:, 2:] == -1).all()
    assert [released(producer) for producer in producers] == [("r",), ("r",)]


def test_ranks_that_are_only_given_to_are_not_told_of_what_was_read(rank: MakeRank) -> None:
    """Three replicas read from two in another way than they would write to them."""
    theirs = [rank("p", tp_rank=t, tp_size=2, replicated=True) for t in range(2)]
    ours = [rank("d", tp_rank=t, tp_size=3, replicated=True) for t in range(3)]
    published = {key: value for each in theirs for key, value in each.metadata.items()}
    mine = {key: value for each in ours for key, value in each.metadata.items()}
    for each in ours:
        each.agent.share_engine(mine)
        for direction in ("read", "write"):
            each.agent.connect(published, direction=direction)
    extra = [each for each in ours if len(each.agent.sessions["p"].peers) > 1]
    assert extra
    for each in theirs:
        each.agent.hold("r")
    for each in extra:
        plan = each.agent.sessions["p"].plan
        (told,) = {source.rank for source in plan.sources} | set(plan.notify_only)
        each.agent.decline("p", "r")
        (untold,) = (p for p in theirs if p.cache.rank != told)
        for _ in range(20):
            each.agent.poll()
            assert untold.agent.poll().released == ()


def test_zero_tokens_move_nothing_and_the_producer_is_told(rank: MakeRank) -> None:
    """B25: a request with nothing to move still releases its producer."""
    producer, consumer = rank("p"), rank("d")
    producer.agent.releases.hold("r")
    consumer.agent.connect(producer.metadata)
    transfer = consumer.agent.pull("p", "r", [BlockTable([])], [BlockTable([])], end_token=0)
    polled = consumer.agent.poll()
    assert polled.finished == (transfer,)
    assert transfer.state is State.DONE
    assert consumer.agent.poll().finished == ()
    assert released(producer) == ("r",)


def test_a_bad_table_starts_nothing(rank: MakeRank) -> None:
    producer, consumer = rank("p"), rank("d")
    consumer.agent.connect(producer.metadata)
    with pytest.raises(BlockTableError, match="block 8"):
        consumer.agent.pull("p", "r", [BlockTable([PAGES])], [BlockTable([0])], end_token=4)
    assert consumer.agent.poll().finished == ()


def test_an_unknown_engine_is_refused(rank: MakeRank) -> None:
    with pytest.raises(UnknownEngineError, match="'p' is not connected"):
        rank("d").agent.pull("p", "r", [], [], end_token=0)


@pytest.mark.parametrize(("engine", "model"), [("q", "m"), ("p", "")])
def test_an_agent_is_of_its_topology_s_engine_and_has_a_model(
    rank: MakeRank, engine: str, model: str
) -> None:
    made = rank("p")
    with pytest.raises(ConfigError, match=f"engine 'p'.*of engine '{engine}'.*{model!r}"):
        RankAgent(
            made.topology if engine == "p" else rank("q").topology,
            made.cache,
            made.transport,
            model=model,
        )


# --- a failure leaves nothing behind -----------------------------------------------------------


def assert_nothing_left(consumer: Rank) -> None:
    assert consumer.topology.remote_engines == ()
    with pytest.raises(UnknownEngineError):
        consumer.agent.pull("p", "r", [], [], end_token=0)


def test_other_factors_are_refused_before_the_body_is_read(rank: MakeRank) -> None:
    producer, consumer = rank("p", model="n"), rank("d")
    data = producer.agent.metadata()
    factors = decode_factors(data.payload)
    garbled = replace(data, payload=seal(factors, RankPayload(producer.cache, b"?"))[:-9])
    with pytest.raises(HandshakeError):
        consumer.agent.connect({(0, 0): garbled})
    with pytest.raises(IncompatibleError, match="model is 'm' here and 'n' there"):
        consumer.agent.connect(producer.metadata)
    assert_nothing_left(consumer)


def test_layers_of_other_names_are_refused_and_the_right_ones_work_after(rank: MakeRank) -> None:
    wrong, right, consumer = rank("p", name="other.0"), rank("p"), rank("d")
    with pytest.raises(IncompatibleError, match=r"layers is .*layers\.0.* here and .*other\.0"):
        consumer.agent.connect(wrong.metadata)
    assert_nothing_left(consumer)
    consumer.agent.connect(right.metadata)


def test_a_peer_that_cannot_be_reached_leaves_nothing_behind(rank: MakeRank) -> None:
    producers = [rank("p", tp_rank=t, tp_size=2) for t in range(2)]
    consumer = rank("d")
    good, data = producers[0].metadata, producers[1].agent.metadata()
    body = decode_body(data.payload)
    broken = seal(
        decode_factors(data.payload), RankPayload(body.cache, body.agent_info[:-1] + b"?")
    )
    with pytest.raises(TransportError):
        consumer.agent.connect({**good, (0, 1): replace(data, payload=broken)})
    assert_nothing_left(consumer)
    consumer.agent.connect({**good, **producers[1].metadata})


def test_metadata_that_speaks_of_another_rank_is_refused(rank: MakeRank) -> None:
    producer, consumer = rank("p"), rank("d")
    data = replace(producer.agent.metadata(), engine_id="q")
    with pytest.raises(HandshakeError, match=r"'q'.*carries an envelope of 'p'"):
        consumer.agent.connect({(0, 0): data})
    assert_nothing_left(consumer)


# --- engines come and go -----------------------------------------------------------------------


def test_connecting_twice_keeps_the_session(rank: MakeRank) -> None:
    producer, consumer = rank("p"), rank("d")
    first = consumer.agent.connect(producer.metadata)
    assert consumer.agent.connect(producer.metadata) is first


def test_b48_another_incarnation_takes_the_place_of_the_old_one(rank: MakeRank) -> None:
    old, consumer = rank("p"), rank("d")
    consumer.agent.connect(old.metadata)
    old.agent.close()
    new = rank("p", incarnation="2")
    new.memory[:] = 7
    consumer.agent.connect(new.metadata)
    transfer = consumer.agent.pull("p", "r", [BlockTable([0])], [BlockTable([3])], end_token=4)
    finish(consumer, transfer)
    assert transfer.state is State.DONE
    assert (consumer.memory[0] == 7).all()


def test_a_disconnected_engine_is_gone(rank: MakeRank) -> None:
    producer, consumer = rank("p"), rank("d")
    consumer.agent.connect(producer.metadata)
    consumer.agent.disconnect("p")
    assert_nothing_left(consumer)
    consumer.agent.connect(producer.metadata)


def test_a_notification_that_cannot_be_read_is_counted(rank: MakeRank) -> None:
    producer, consumer = rank("p"), rank("d")
    session = consumer.agent.connect(producer.metadata)
    consumer.transport.notify(session.peers[0, 0], b"\xff noise")
    deadline_s = time.monotonic() + 20
    while not producer.agent.unreadable and time.monotonic() < deadline_s:
        producer.agent.poll()
    assert producer.agent.unreadable == 1


# --- deadlines ---------------------------------------------------------------------------------


def test_a_late_transfer_fails_once_and_stays_in_quarantine_until_it_is_quiet(
    rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    producer, consumer = rank("p"), rank("d", clock=clock)
    consumer.agent.connect(producer.metadata)
    abandoned: list[Handle] = []
    poll = consumer.transport.poll
    monkeypatch.setattr(consumer.transport, "poll", Poll)
    monkeypatch.setattr(consumer.transport, "abandon", abandoned.append)
    transfer = consumer.agent.pull(
        "p", "r", [BlockTable([0])], [BlockTable([0])], end_token=4, timeout_s=5
    )
    clock.now_s += 4.9
    assert consumer.agent.poll().finished == ()
    clock.now_s += 0.2
    assert consumer.agent.poll().finished == (transfer,)
    assert transfer.state.value == "failed"
    assert "had not ended after 5.1 s" in transfer.reason
    assert set(abandoned) == transfer.pending != set()
    assert consumer.agent.quarantined == 1
    monkeypatch.setattr(consumer.transport, "poll", poll)
    deadline_s = time.monotonic() + 20
    while not transfer.quiet and time.monotonic() < deadline_s:
        assert consumer.agent.poll().finished == ()
    assert transfer.quiet
    assert consumer.agent.quarantined == 0
