"""REFUSE: what is not declared, or cannot be right, is refused and moves nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvbridge.errors import NotSupportedError, OutOfBoundsError, TransportError
from kvbridge.testing.bench import ARENA_NBYTES, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.remote import Pieces
from kvbridge.testing.rules import rule
from kvbridge.testing.violations import expect, expect_bytes, expect_equal, expect_raises
from kvbridge.transport import Descriptors, Op, Region

LOOKED_AT_NBYTES = 4096

BAD_PIECES: dict[str, tuple[Pieces, Pieces]] = {
    "a remote piece that ends one byte too late": ([(0, 10)], [(ARENA_NBYTES - 9, 10)]),
    "a local piece that ends one byte too late": ([(ARENA_NBYTES - 9, 10)], [(0, 10)]),
    "a remote piece beyond the region": ([(0, 10), (20, 10)], [(0, 10), (ARENA_NBYTES + 1, 10)]),
    "a local piece beyond the region": ([(0, 10), (ARENA_NBYTES + 1, 10)], [(0, 10), (20, 10)]),
    "pieces that are larger than the region": (
        [(0, ARENA_NBYTES + 1)],
        [(0, ARENA_NBYTES + 1)],
    ),
    "a remote piece that is longer than the local one": ([(0, 10)], [(0, 11)]),
    "a local piece that is longer than the remote one": ([(0, 11)], [(0, 10)]),
    "more local than remote pieces": ([(0, 10), (20, 10)], [(0, 10)]),
    "more remote than local pieces": ([(0, 10)], [(0, 10), (20, 10)]),
    "pieces of which none has a partner": ([], [(0, 10)]),
}


@contextmanager
def nothing_moves(bench: Bench, what: str) -> Iterator[None]:
    """Break the rule where bytes or a notification come through."""
    here, there, n = bench.here, bench.there, LOOKED_AT_NBYTES
    there.notifications(10_000, 0.02)
    here.data[:n], there.data[:n] = pattern(1, n), pattern(2, n)
    yield
    here.call("poll_for", 0.03)
    expect_bytes(f"memory here after {what}", here.data[:n], pattern(1, n))
    expect_bytes(f"memory of the owner after {what}", there.data[:n], pattern(2, n))
    here.check_guards(what)
    there.check_guards(what)
    taken, _ = there.notifications(1, 0.02)
    expect_equal(f"notifications after {what}", taken, [])


def check_not_declared(bench: Bench, op: Op) -> None:
    """Everything about the operation is right, except that nobody offers it."""
    with nothing_moves(bench, f"a {op} that is not declared"):
        for pieces in ([(0, 100)], []):
            with expect_raises(f"{op}, which is not declared", NotSupportedError):
                bench.here.submit(op, bench.peer, pieces, pieces)


class RefusalRules:
    """REFUSE."""

    @rule(
        "REFUSE-01",
        "A read is refused with NotSupportedError where it is not declared, and moves nothing.",
        lacks=("read",),
    )
    def test_no_read(self, bench: Bench) -> None:
        check_not_declared(bench, "read")

    @rule(
        "REFUSE-02",
        "A write is refused with NotSupportedError where it is not declared, and moves nothing.",
        lacks=("write",),
    )
    def test_no_write(self, bench: Bench) -> None:
        check_not_declared(bench, "write")

    @rule(
        "REFUSE-03",
        "A free-standing notification is refused with NotSupportedError where it is not declared.",
        lacks=("notify",),
    )
    def test_no_notify(self, bench: Bench) -> None:
        with nothing_moves(bench, "a notification that is not declared"):
            for payload in (b"x", b""):
                with expect_raises("notify, which is not declared", NotSupportedError):
                    bench.here.notify(bench.peer, payload)

    @rule(
        "REFUSE-04",
        "A notification tied to a transfer is refused with NotSupportedError where it is not "
        "declared, and the transfer moves nothing.",
        lacks=("notify_with_transfer",),
    )
    def test_no_tied_notification(self, bench: Bench) -> None:
        op: Op = "read" if bench.can.read or not bench.can.write else "write"
        with (
            nothing_moves(bench, f"a {op} with a notification"),
            expect_raises("a tied notification, which is not declared", NotSupportedError),
        ):
            bench.here.submit(op, bench.peer, [(0, 100)], [(0, 100)], b"x")

    @rule(
        "REFUSE-05",
        "Memory of a kind that is not declared is not registered: NotSupportedError, and nothing "
        "of that call is registered.",
    )
    def test_memory_kind(self, bench: Bench) -> None:
        agent = bench.agent()
        strange = Region(agent.address, 4096, memory_kind="core rope")
        kinds = agent.call("capabilities").memory_kinds
        others = [Region(agent.address, 64, kind) for kind in ("dram",) if kind not in kinds]
        for region in (strange, *others):
            with expect_raises(f"register of {region.memory_kind!r} memory", NotSupportedError):
                agent.register(region)
        if "dram" in kinds:
            agent.unregister(agent.region)
            with expect_raises("register of good and strange memory", NotSupportedError):
                agent.register(agent.region, strange)
            agent.register(agent.region)

    @rule(
        "REFUSE-06",
        "An operation that is neither a read nor a write is refused with NotSupportedError, and "
        "moves nothing.",
    )
    def test_unknown_operation(self, bench: Bench) -> None:
        strange: Op = "swap"  # type: ignore[assignment]
        with (
            nothing_moves(bench, "the operation 'swap'"),
            expect_raises("submit of 'swap'", NotSupportedError),
        ):
            bench.here.submit(strange, bench.peer, [(0, 100)], [(0, 100)])

    @rule(
        "REFUSE-07",
        "A read or write with one piece out of bounds, or without a partner of its length, is "
        "refused with OutOfBoundsError, and nothing of it moves.",
        needs=("dram",),
    )
    def test_out_of_bounds(self, bench: Bench) -> None:
        tied = b"never" if bench.can.notify_with_transfer else b""
        for op in bench.declared_ops() or (bench.any_op(),):
            with nothing_moves(bench, f"{op}s that were refused"):
                for what, (local, remote) in BAD_PIECES.items():
                    with expect_raises(f"{op} with {what}", OutOfBoundsError, NotSupportedError):
                        bench.here.submit(op, bench.peer, local, remote, tied)

    @rule(
        "REFUSE-08",
        "An address whose end wraps around the address space is refused with OutOfBoundsError.",
        needs=("dram",),
    )
    def test_wrap(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        near_end = Descriptors(*np.array([[(1 << 64) - 16], [100]], np.uint64))
        huge = Descriptors(*np.array([[bench.there.address], [(1 << 64) - 1]], np.uint64))
        good = [here.pieces([(0, 100)]), bench.there.pieces([(0, 100)])]
        with nothing_moves(bench, f"a {op} at the end of the address space"):
            for local, remote in ((near_end, good[1]), (good[0], near_end), (huge, huge)):
                with expect_raises(
                    f"{op} at the end of the address space", OutOfBoundsError, NotSupportedError
                ):
                    here.call("submit", op, bench.peer.id, local, remote)

    @rule(
        "REFUSE-09",
        "Pieces of a memory kind other than the registered one are refused, and nothing moves.",
        needs=("dram",),
    )
    def test_other_kind(self, bench: Bench) -> None:
        here, there, op = bench.here, bench.there, bench.any_op()
        local, remote = here.pieces([(0, 100)]), there.pieces([(0, 100)])
        strange = [Descriptors(d.address, d.nbytes, "core rope") for d in (local, remote)]
        elsewhere = [Descriptors(d.address, d.nbytes, "dram", device=7) for d in (local, remote)]
        with nothing_moves(bench, "pieces of another memory kind or device"):
            for other in (strange, elsewhere):
                for pair in ((other[0], remote), (local, other[1])):
                    with expect_raises(
                        f"{op} with pieces of {other[0].memory_kind}:{other[0].device}",
                        OutOfBoundsError,
                        NotSupportedError,
                    ):
                        here.call("submit", op, bench.peer.id, *pair)

    @rule(
        "REFUSE-10",
        "A peer that another agent has added is refused with TransportError, and nothing moves.",
        needs=("dram",),
    )
    def test_stranger(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        pieces = here.pieces([(0, 100)])
        with (
            nothing_moves(bench, "an operation with a stranger"),
            expect_raises("submit to a peer of somebody else", TransportError),
        ):
            here.call("submit_to_stranger", op, here.registered, pieces)

    @rule(
        "REFUSE-11",
        "After all refusals the agent works as before.",
        needs=("dram",),
    )
    def test_goes_on(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        for local, remote in BAD_PIECES.values():
            with expect_raises("a bad operation", OutOfBoundsError, NotSupportedError):
                here.submit(op, bench.peer, local, remote)
        bench.move(op, [(0, 1000)], [(0, 1000)])
        expect((here.data[:1000] == bench.there.data[:1000]).all(), f"{op} brought other bytes")
        here.unregister(here.region)  # so no refused operation holds on to the memory
        here.register(here.region)
