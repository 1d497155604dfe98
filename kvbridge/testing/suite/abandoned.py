"""ABANDON: operations that nobody waits for any more."""

import time

from kvbridge.errors import MemoryBusyError
from kvbridge.testing.bench import MIB, Bench
from kvbridge.testing.rules import rule
from kvbridge.testing.violations import expect, expect_in
from kvbridge.transport import Op, State

BOTH = ("processes", "threads")
DEPTH = 4


def submit_large(bench: Bench, op: Op) -> tuple[list[int], int]:
    """Start operations that take a while; returns them, and how many bytes each moves."""
    nbytes = bench.fit(32 * MIB)
    count = min(DEPTH, bench.can.inflight_max or DEPTH)
    pieces = [(0, nbytes)]
    return [bench.here.submit(op, bench.peer, pieces, pieces) for _ in range(count)], nbytes


class AbandonRules:
    """ABANDON."""

    @rule(
        "ABANDON-01",
        "poll still reports an abandoned operation, exactly once, when it has become quiet.",
        placements=BOTH,
    )
    def test_abandoned_reported(self, bench: Bench) -> None:
        here = bench.here
        for op in bench.declared_ops() or (bench.any_op(),):
            handles, _ = submit_large(bench, op)
            for handle in handles:
                here.abandon(handle)
            for handle in handles:
                ended = here.wait(handle)
                expect_in(
                    "state of an abandoned operation", ended.state, (State.DONE, State.FAILED)
                )
                expect(ended.state is State.DONE or ended.reason, "it failed without a reason")
            here.call("poll_for", 0.05)  # which complains about a second report

    @rule(
        "ABANDON-02",
        "After an abandoned operation was reported its destination is quiet.",
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_abandoned_quiet(self, bench: Bench) -> None:
        here, there, op = bench.here, bench.there, bench.any_op()
        for _ in range(bench.rounds(3, 30)):
            handles, nbytes = submit_large(bench, op)
            for handle in handles:
                here.abandon(handle)
            target, source = (here, there) if op == "read" else (there, here)
            for handle in handles[:-1]:
                here.wait(handle)
            here.wait(handles[-1], fill=target.span(0, nbytes))
            source.data[:nbytes] = 0x55
            time.sleep(0.1)
            expect((target.data[:nbytes] == 7).all(), "bytes came after the end was reported")

    @rule(
        "ABANDON-03",
        "Memory of an abandoned operation stays busy until it is quiet, and is free once poll has "
        "reported that.",
    )
    def test_abandoned_memory(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        handles, _ = submit_large(bench, op)
        for handle in handles:
            here.abandon(handle)
        try:
            here.unregister(here.region)
        except MemoryBusyError:
            pass
        else:
            here.register(here.region)
            pending = here.call("pending", handles)
            expect(not pending, "unregister: took memory of operations that were still pending")
        for handle in handles:
            here.wait(handle)
        here.unregister(here.region)
        here.register(here.region)

    @rule(
        "ABANDON-04",
        "Abandoning an operation twice, or after its end was reported, is no error.",
    )
    def test_abandoned_twice(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        handles, _ = submit_large(bench, op)
        for handle in handles:
            here.abandon(handle)
            here.abandon(handle)
        for handle in handles:
            here.wait(handle)
            here.abandon(handle)
        here.call("poll_for", 0.05)
        bench.move(op, [(0, 100)], [(0, 100)])
