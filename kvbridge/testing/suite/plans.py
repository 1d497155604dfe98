"""PLAN: the planner's copies, carried by the transport, compared with numpy."""

from typing import Literal

import numpy as np

from kvbridge.plan import generate_engine_transfer_plan
from kvbridge.testing.bench import Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.engines import HEAD_DIM, HEADS, PAIRINGS, Engine, Pairing
from kvbridge.testing.violations import expect, expect_bytes
from kvbridge.transport import Op

TOKENS = range(16, 75)  # a prefix is there already, and the last pages are not full


def move_tokens(
    bench: Bench, acting: Engine, other: Engine, direction: Literal["read", "write"]
) -> None:
    """Let every rank of the acting engine do its part of the plan."""
    for rank, cache in acting.caches.items():
        plan = generate_engine_transfer_plan(
            acting.topology(rank),
            cache,
            other.caches,
            local_engine=acting.caches,
            direction=direction,
        )
        batches = plan.lower(
            [acting.table], [other.table], start_token=TOKENS.start, end_token=TOKENS.stop
        )
        for batch in batches:
            pieces = [
                list(zip((address - base).tolist(), batch.nbytes.tolist(), strict=True))
                for address, base in (
                    (batch.local_address, np.uint64(acting.agent.address)),
                    (batch.remote_address, np.uint64(other.agent.address)),
                )
            ]
            bench.move(direction, *pieces)


def check_pairing(bench: Bench, pairing: Pairing, op: Op) -> None:
    """Fill the producer as its engine would, move, and compare all of the consumer's memory."""
    chance = np.random.default_rng(1)
    roles = [bench.there, bench.here] if op == "read" else [bench.here, bench.there]
    engines = []
    for name, shape, agent in zip(
        ("prefill", "decode"), (pairing.producer, pairing.consumer), roles, strict=True
    ):
        pages = chance.permutation(12)[: -(-TOKENS.stop // shape.page)].tolist()
        engines.append(Engine(name, shape, agent, pages))
    producer, consumer = engines
    layers = sum(pairing.producer.stages)
    truth = chance.integers(0, 1 << 16, (layers, HEADS, TOKENS.stop, 2 * HEAD_DIM), np.uint16)
    for engine, seed in ((producer, 1), (consumer, 2)):
        engine.agent.data[: engine.nbytes] = pattern(seed, engine.nbytes)
    producer.store(producer.agent.data, truth, range(TOKENS.stop))
    model = consumer.agent.data[: consumer.nbytes].copy()
    consumer.store(model, truth, TOKENS)
    expect((model != pattern(2, consumer.nbytes)).any(), "the suite's own model moves nothing")
    acting, other = (consumer, producer) if op == "read" else (producer, consumer)
    move_tokens(bench, acting, other, op)
    expect_bytes(
        f"caches of the consumer, {pairing.name}", consumer.agent.data[: consumer.nbytes], model
    )
    consumer.agent.check_guards(pairing.name)


class PlanRules:
    """PLAN."""

    @rule(
        "PLAN-01",
        "Whole plans of consumers that read, for engines of different shapes, bring every token "
        "where it belongs and change no other byte.",
        needs=("read", "dram"),
        placements=("processes", "threads"),
    )
    def test_pull(self, bench: Bench) -> None:
        for pairing in PAIRINGS:
            check_pairing(bench, pairing, "read")

    @rule(
        "PLAN-02",
        "Whole plans of producers that write, for engines of different shapes, bring every token "
        "where it belongs and change no other byte.",
        needs=("write", "dram"),
        placements=("processes", "threads"),
    )
    def test_push(self, bench: Bench) -> None:
        for pairing in PAIRINGS:
            check_pairing(bench, pairing, "write")
