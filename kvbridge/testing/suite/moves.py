"""READ and WRITE: bytes go where they belong, and nowhere else."""

import time
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from kvbridge.testing.agent import Span
from kvbridge.testing.bench import ARENA_NBYTES, MIB, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.remote import RemoteAgent, RemotePeer
from kvbridge.testing.rules import rule
from kvbridge.testing.violations import expect_at_most, expect_bytes, expect_equal
from kvbridge.transport import Op, State

Copies = Sequence[tuple[int, int, int]]
"""Offset in the source, offset in the destination, and length of each piece."""

BOTH = ("processes", "threads")
SCATTER_NBYTES = 64 << 10
TAIL_NBYTES = 4096
SIZES = (0, 1, 2, 3, 7, 8, 63, 64, 65, 511, 4095, 4096, 4097, 65_535, 65_536, 65_537, MIB + 1)


def check_copies(
    bench: Bench,
    op: Op,
    copies: Copies,
    *,
    agent: RemoteAgent | None = None,
    peer: RemotePeer | None = None,
) -> None:
    """Move pieces and compare all memory around them with what numpy makes of them."""
    here, peer = agent or bench.here, peer or bench.peer
    there = peer.owner
    extent = min(len(here.data), max((max(s, d) + n for s, d, n in copies), default=0) + 4096)
    before_here, before_there = pattern(1, extent), pattern(2, extent)
    here.data[:extent], there.data[:extent] = before_here, before_there
    source, model = (
        (before_there, before_here.copy()) if op == "read" else (before_here, before_there.copy())
    )
    for start, to, nbytes in copies:
        model[to : to + nbytes] = source[start : start + nbytes]
    sources = [(start, nbytes) for start, _, nbytes in copies]
    targets = [(to, nbytes) for _, to, nbytes in copies]
    local, remote = (targets, sources) if op == "read" else (sources, targets)
    bench.move(op, local, remote, agent=here, peer=peer)
    target, origin = (here, there) if op == "read" else (there, here)
    expect_bytes(f"destination of a {op} of {len(copies)} pieces", target.data[:extent], model)
    expect_bytes(f"source of a {op} of {len(copies)} pieces", origin.data[:extent], source)
    here.check_guards(f"{op}, the acting agent")
    there.check_guards(f"{op}, the owner")


@st.composite
def scattered(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Pieces anywhere in the source, and apart from each other in the destination."""
    sizes = draw(st.lists(st.one_of(st.sampled_from([0, 1, 3, 4096, 4097]), st.integers(0, 9000))))
    gaps = draw(st.lists(st.integers(0, 70), min_size=len(sizes), max_size=len(sizes)))
    copies, position = [], 0
    for nbytes, gap in zip(sizes, gaps, strict=True):
        position += gap
        copies.append((draw(st.integers(0, SCATTER_NBYTES)), position, nbytes))
        position += nbytes
    return draw(st.permutations(copies))


NEIGHBOURS: dict[str, Copies] = {
    "as near on both sides": [(k * 64, k * 64, 60) for k in range(300)],
    "adjacent in the destination only": [(k * 100, k * 64, 64) for k in range(300)],
    "adjacent in the source only": [(k * 64, k * 100, 64) for k in range(300)],
}
"""What a transport that merges might join, and must not."""


def check_scattered(bench: Bench, op: Op) -> None:
    """Pieces at random, and pieces that look as if they could be merged."""
    for copies in NEIGHBOURS.values():
        check_copies(bench, op, copies)
    bench.for_all(scattered(), lambda copies: check_copies(bench, op, copies))


def check_sizes(bench: Bench, op: Op) -> None:
    """Every size, at offsets that are aligned to nothing on either side."""
    for nbytes in SIZES:
        for source, target in ((0, 0), (1, 0), (3, 5), (4093, 7)):
            check_copies(bench, op, [(source, target, nbytes)])


def check_thousands(bench: Bench, op: Op) -> None:
    """More descriptors than any vector call of the kernel takes, in random order."""
    order = np.random.default_rng(0).permutation(5000)
    check_copies(bench, op, [(int(i) * 801, k * 999, 777) for k, i in enumerate(order)])


def check_edges(bench: Bench, op: Op) -> None:
    """The first and the last byte of the registered memory of both sides."""
    here, there = bench.here, bench.there
    last = ARENA_NBYTES - 1
    here.data[[0, last]], there.data[[0, last]] = (1, 2), (3, 4)
    bench.move(op, [(0, 1), (last, 1)], [(last, 1), (0, 1)])
    target, wanted = (here, b"\x04\x03") if op == "read" else (there, b"\x02\x01")
    expect_bytes(f"first and last byte after a {op}", target.data[[0, last]], wanted)
    here.check_guards(f"{op} at the edges, the acting agent")
    there.check_guards(f"{op} at the edges, the owner")


def check_nothing_to_move(bench: Bench, op: Op) -> None:
    """An empty list, and a list of empty pieces."""
    bench.here.data[:100], bench.there.data[:100] = 1, 2
    for pieces in ([], [(0, 0), (7, 0)]):
        bench.here.move(op, bench.peer, pieces, pieces)
    expect_equal("bytes moved by operations without bytes", int(bench.here.data[:100].sum()), 100)
    expect_equal("bytes moved by operations without bytes", int(bench.there.data[:100].sum()), 200)


def tail_first(agent: RemoteAgent, nbytes: int) -> list[Span]:
    """Cut memory so that its picture begins with what is copied last.

    Taking a picture lasts as long as the copy: from the front, it would follow a copy that is
    still under way, and see nothing but bytes that are there.
    """
    tail = min(TAIL_NBYTES, nbytes)
    return [agent.span(nbytes - tail, tail), agent.span(0, nbytes - tail)]


def in_order(seen: bytes) -> bytes:
    """Return a picture that was taken tail first in the order of memory."""
    return seen[TAIL_NBYTES:] + seen[:TAIL_NBYTES]


def check_done_means_there(bench: Bench, op: Op) -> None:
    """The picture is taken by the acting agent's process, right when poll says DONE."""
    here, there, nbytes = bench.here, bench.there, bench.fit(8 * MIB)
    target, source = (here, there) if op == "read" else (there, here)
    for seed in range(bench.rounds(5, 50)):
        source.data[:nbytes] = pattern(seed, nbytes)
        target.data[:nbytes] = 0xEE
        handle = here.submit(op, bench.peer, [(0, nbytes)], [(0, nbytes)])
        ended = here.wait(handle, look=tail_first(target, nbytes))
        expect_equal(f"state of a {op}", ended.state, State.DONE)
        seen = in_order(ended.seen)
        expect_bytes(f"destination when poll reported the {op}", seen, pattern(seed, nbytes))


def check_quiet_after_done(bench: Bench, op: Op) -> None:
    """Whatever is done to the source after the end, the destination stays as it is."""
    here, there, nbytes = bench.here, bench.there, bench.fit(4 * MIB)
    target, source = (here, there) if op == "read" else (there, here)
    for seed in range(bench.rounds(3, 30)):
        source.data[:nbytes] = pattern(seed, nbytes)
        handle = here.submit(op, bench.peer, [(0, nbytes)], [(0, nbytes)])
        # Filled by the acting agent itself, so no time passes in which late bytes could hide.
        here.wait(handle, fill=target.span(0, nbytes))
        source.data[:nbytes] = 0x55
        time.sleep(0.05)
        here.call("poll_for", 0.02)
        expect_bytes(
            f"destination after the end of a {op}, which was overwritten with 0x07 since",
            target.data[:nbytes],
            np.full(nbytes, 7, np.uint8),
        )


def check_many_at_once(bench: Bench, op: Op) -> None:
    """Operations of their own pieces; each end is reported once, and nothing else ever."""
    here, there = bench.here, bench.there
    target, source = (here, there) if op == "read" else (there, here)
    count, nbytes = 200, bench.fit(5001)
    depth = bench.can.inflight_max or count
    extent = count * nbytes
    source.data[:extent] = pattern(3, extent)
    target.data[:extent] = 0xEE
    order = np.random.default_rng(1).permutation(count) * nbytes
    flying: list[int] = []
    for start in order.tolist():
        if len(flying) == depth:
            here.finish(flying.pop(0), f"a {op} among many")
        flying.append(here.submit(op, bench.peer, [(start, nbytes)], [(start, nbytes)]))
    for handle in flying:
        here.finish(handle, f"a {op} among many")
    here.call("poll_for", 0.05)  # which complains about a second report
    expect_bytes(f"destination of {count} {op}s", target.data[:extent], source.data[:extent])


def check_submit_returns(bench: Bench, op: Op) -> None:
    """The best of several tries: a busy machine may hold one of them up."""
    here, nbytes = bench.here, bench.fit(32 * MIB)
    size = 4096
    count = min(nbytes // size, bench.can.descriptors_max or nbytes)
    if count < 64:
        bench.not_applicable("an operation cannot be made large enough to take time")
    pieces = [(k * size, size) for k in range(count)]
    local, remote = here.pieces(pieces), bench.there.pieces(pieces)
    parts = [here.call("time_submit", op, bench.peer.id, local, remote) for _ in range(5)]
    expect_at_most(f"part of the time of a {op} that submit took", min(parts), 0.7)


class MoveRules:
    """READ and WRITE."""

    @rule(
        "READ-01",
        "A read of one piece, of any size and at any alignment on either side, brings exactly "
        "these bytes.",
        needs=("read",),
        placements=BOTH,
    )
    def test_read_sizes(self, bench: Bench) -> None:
        check_sizes(bench, "read")

    @rule(
        "READ-02",
        "A read of scattered pieces puts each where it belongs and changes no other byte, neither "
        "here nor at the owner.",
        needs=("read",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_read_scattered(self, bench: Bench) -> None:
        check_scattered(bench, "read")

    @rule(
        "READ-03",
        "A read of one large piece at odd offsets brings all of it.",
        needs=("read",),
    )
    def test_read_large(self, bench: Bench) -> None:
        check_copies(bench, "read", [(3, 12_345, 32 * MIB + 1)])

    @rule("READ-04", "A read may have thousands of descriptors in any order.", needs=("read",))
    def test_read_thousands(self, bench: Bench) -> None:
        check_thousands(bench, "read")

    @rule(
        "READ-05",
        "A read reaches the first and the last byte of a region.",
        needs=("read",),
        placements=BOTH,
    )
    def test_read_edges(self, bench: Bench) -> None:
        check_edges(bench, "read")

    @rule(
        "READ-06",
        "A read without bytes, be its list empty or all its pieces, is done and moves nothing.",
        needs=("read",),
    )
    def test_read_nothing(self, bench: Bench) -> None:
        check_nothing_to_move(bench, "read")

    @rule(
        "READ-07",
        "When poll reports a read as done, every byte of it is there.",
        needs=("read",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_read_done_means_there(self, bench: Bench) -> None:
        check_done_means_there(bench, "read")

    @rule(
        "READ-08",
        "After a read is done its destination is quiet, whatever the owner does to the source.",
        needs=("read",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_read_quiet(self, bench: Bench) -> None:
        check_quiet_after_done(bench, "read")

    @rule(
        "READ-09",
        "Each of many reads in flight brings its own bytes and is reported exactly once.",
        needs=("read",),
        placements=BOTH,
    )
    def test_read_many(self, bench: Bench) -> None:
        check_many_at_once(bench, "read")

    @rule("READ-10", "The submit of a read returns without waiting for the bytes.", needs=("read",))
    def test_read_submit_returns(self, bench: Bench) -> None:
        check_submit_returns(bench, "read")

    @rule(
        "WRITE-01",
        "A write of one piece, of any size and at any alignment on either side, delivers exactly "
        "these bytes.",
        needs=("write",),
        placements=BOTH,
    )
    def test_write_sizes(self, bench: Bench) -> None:
        check_sizes(bench, "write")

    @rule(
        "WRITE-02",
        "A write of scattered pieces puts each where it belongs and changes no other byte, neither "
        "here nor at the owner.",
        needs=("write",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_write_scattered(self, bench: Bench) -> None:
        check_scattered(bench, "write")

    @rule(
        "WRITE-03",
        "A write of one large piece at odd offsets delivers all of it.",
        needs=("write",),
    )
    def test_write_large(self, bench: Bench) -> None:
        check_copies(bench, "write", [(3, 12_345, 32 * MIB + 1)])

    @rule("WRITE-04", "A write may have thousands of descriptors in any order.", needs=("write",))
    def test_write_thousands(self, bench: Bench) -> None:
        check_thousands(bench, "write")

    @rule(
        "WRITE-05",
        "A write reaches the first and the last byte of a region.",
        needs=("write",),
        placements=BOTH,
    )
    def test_write_edges(self, bench: Bench) -> None:
        check_edges(bench, "write")

    @rule(
        "WRITE-06",
        "A write without bytes, be its list empty or all its pieces, is done and moves nothing.",
        needs=("write",),
    )
    def test_write_nothing(self, bench: Bench) -> None:
        check_nothing_to_move(bench, "write")

    @rule(
        "WRITE-07",
        "When poll reports a write as done, every byte of it is at the owner.",
        needs=("write",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_write_done_means_there(self, bench: Bench) -> None:
        check_done_means_there(bench, "write")

    @rule(
        "WRITE-08",
        "After a write is done its destination is quiet, whatever happens to the source.",
        needs=("write",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_write_quiet(self, bench: Bench) -> None:
        check_quiet_after_done(bench, "write")

    @rule(
        "WRITE-09",
        "Each of many writes in flight delivers its own bytes and is reported exactly once.",
        needs=("write",),
        placements=BOTH,
    )
    def test_write_many(self, bench: Bench) -> None:
        check_many_at_once(bench, "write")

    @rule(
        "WRITE-10", "The submit of a write returns without waiting for the bytes.", needs=("write",)
    )
    def test_write_submit_returns(self, bench: Bench) -> None:
        check_submit_returns(bench, "write")
