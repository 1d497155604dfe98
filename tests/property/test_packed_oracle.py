"""Packed writes of random requests: both sides work out one stream, and its parts move it all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.model import Rank
from kvbridge.plan import PackedStream
from kvbridge.session.packing import streams_of
from tests.property.engines import Case, Direction, cases
from tests.property.oracle import POISON, World, indices

pytestmark = pytest.mark.timeout(85)
STAGING, PACKING = 1 << 50, 1 << 51
Pair = tuple[Rank, Rank]
"""Who has the bytes, and who wants them."""


def streams(case: Case, direction: Direction) -> tuple[World, dict[Pair, PackedStream]]:
    """Return what goes from rank to rank as one of the two sides works it out."""
    world = World(replace(case, direction=direction, assume_even=False))
    found: dict[Pair, PackedStream] = {}
    for rank, plan in world.plans().items():
        ours = world.ours.block_tables(world.our_tables)
        theirs = world.theirs.block_tables(world.their_tables)
        for remote, stream in streams_of(plan, ours, theirs, case.start, case.end).items():
            found[(remote, rank) if direction == "read" else (rank, remote)] = stream
    return world, found


def bytes_of(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.int64]:
    sizes = nbytes.astype(np.int64)
    before = sizes.cumsum() - sizes
    return np.repeat(address.astype(np.int64) - before, sizes) + np.arange(sizes.sum())


@settings(max_examples=150)
@given(case=cases(), most=st.integers(1, 4096))
def test_both_sides_mean_the_same_stream_and_its_parts_bring_all_of_it(
    case: Case, most: int
) -> None:
    world, wanted = streams(case, "read")
    _, written = streams(case, "write")
    assert {pair: (each.nbytes, each.digest) for pair, each in wanted.items()} == {
        pair: (each.nbytes, each.digest) for pair, each in written.items()
    }
    counts = {r: np.zeros(m.data.size, np.int64) for r, m in world.consumer.ranks.items()}
    for (giver, taker), stream in wanted.items():
        source, target = world.producer.ranks[giver], world.consumer.ranks[taker]
        parts = list(stream.cut(most))
        assert [0, *(stop for _, stop in parts)] == [*(start for start, _ in parts), stream.nbytes]
        for start, stop in parts:
            assert 0 < stop - start <= most
            gather = written[giver, taker].gather(start, stop, PACKING)
            packed = np.full(stop - start, POISON, np.uint8)
            times = np.zeros(stop - start, np.int64)
            into = bytes_of(gather.target_address - np.uint64(PACKING), gather.nbytes)
            np.add.at(times, into, 1)
            assert (times == 1).all(), "every byte of a part is packed, once"
            packed[into] = source.data[indices(source, gather.source_address, gather.nbytes)]
            scatter = stream.scatter(start, stop, STAGING)
            assert scatter.nbytes.size == stream.count(start, stop)
            out_of = bytes_of(scatter.source_address - np.uint64(STAGING), scatter.nbytes)
            here = indices(target, scatter.target_address, scatter.nbytes)
            np.add.at(counts[taker], here, 1)
            target.data[here] = packed[out_of]
    for rank, memory in world.consumer.ranks.items():
        world._check(rank, memory, counts[rank])


@settings(max_examples=50)
@given(case=cases())
def test_a_part_is_cut_only_where_a_piece_is_longer_than_one(case: Case) -> None:
    for stream in streams(case, "read")[1].values():
        lengths = np.diff(stream.end, prepend=0)
        most = int(lengths.max())
        ends = set(stream.end.tolist())
        assert all(stop in ends for _, stop in stream.cut(most))
