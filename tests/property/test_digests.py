"""Digests of random transfers: both ends of every edge agree, until a byte differs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.model import Rank, RankCache
from kvbridge.plan import Probe, digests_of, first_difference, probes_of, sample_probes
from tests.property.engines import GROUP_KINDS, Case, cases
from tests.property.oracle import PARTS, RankMemory, World, indices

PARTS_OF_TESTS = [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 10))]
in_parts = pytest.mark.parametrize("part", PARTS_OF_TESTS)
pytestmark = pytest.mark.timeout(85)
many = settings(max_examples=60)
some = settings(max_examples=30)
chunk_sizes = st.integers(1, 20)
picks = st.integers(0, (1 << 32) - 1)

COMPONENTS = {"K": {"k", "kv"}, "V": {"v", "kv"}}
"""What the oracle's parts are called in caches, where that is something else."""


def in_host_memory(memory: RankMemory) -> RankCache:
    """Return a rank's cache at the addresses that its bytes really have."""
    move = int(memory.data.ctypes.data) - memory.base
    return replace(
        memory.cache,
        layers=tuple(replace(x, base_address=x.base_address + move) for x in memory.cache.layers),
        regions=tuple(replace(r, address=r.address + move) for r in memory.cache.regions),
    )


class Edge(NamedTuple):
    """A producer rank and a consumer rank, what is compared, and the bytes that moved.

    Shape: at_producer, at_consumer [N], offsets of the same N bytes in both ranks' memory.
    """

    producer: Rank
    consumer: Rank
    probes: tuple[Probe, ...]
    at_producer: NDArray[np.int64]
    at_consumer: NDArray[np.int64]


class Compared:
    """A case whose bytes have been moved, and the digests of both its engines."""

    def __init__(self, case: Case, chunk_tokens: int) -> None:
        self.world = World(case)
        self.tables = {
            "producer": self.world.producer.block_tables(case.producer_tables),
            "consumer": self.world.consumer.block_tables(case.consumer_tables),
        }
        self.caches = {
            "producer": {r: in_host_memory(m) for r, m in self.world.producer.ranks.items()},
            "consumer": {r: in_host_memory(m) for r, m in self.world.consumer.ranks.items()},
        }
        plans = self.world.plans()
        lowered = {rank: self.world.lower(plan) for rank, plan in plans.items()}
        self.world.move(lowered)
        self.edges: list[Edge] = []
        nothing = np.empty(0, np.uint64)
        for ours, plan in plans.items():
            batches = {batch.remote_rank: batch for batch in lowered[ours]}
            for source in plan.sources:
                batch = batches.get(source.rank)
                here, there, nbytes = (
                    (batch.local_address, batch.remote_address, batch.nbytes)
                    if batch
                    else (nothing, nothing, nothing)
                )
                moved = (
                    indices(self.world.ours.ranks[ours], here, nbytes),
                    indices(self.world.theirs.ranks[source.rank], there, nbytes),
                )
                ranks = (ours, source.rank)
                if self.world.reads:
                    moved, ranks = moved[::-1], ranks[::-1]
                probes = probes_of(
                    self.caches["consumer"][ranks[1]],
                    source.regions,
                    self.tables["consumer"],
                    start_token=case.start,
                    end_token=case.end,
                    chunk_tokens=chunk_tokens,
                )
                self.edges.append(Edge(*ranks, probes, *moved))

    def digests(self, side: str, edge: Edge, probes: tuple[Probe, ...]) -> Any:
        rank = edge.producer if side == "producer" else edge.consumer
        return digests_of(self.caches[side][rank], probes, self.tables[side])

    def both(self, edge: Edge, probes: tuple[Probe, ...] | None = None) -> tuple[Any, Any]:
        chosen = edge.probes if probes is None else probes
        return self.digests("consumer", edge, chosen), self.digests("producer", edge, chosen)

    def off(self, edge: Edge) -> list[tuple[Probe, int]]:
        """Return which probes differ in which chunks."""
        sides = self.both(edge)
        return [
            (probe, int(chunk))
            for probe, *digests in zip(edge.probes, *sides, strict=True)
            for chunk in np.flatnonzero(np.not_equal(*digests))
        ]

    def memory(self, side: str, rank: Rank) -> RankMemory:
        fleet = self.world.producer if side == "producer" else self.world.consumer
        return fleet.ranks[rank]

    def moved(self, side: str) -> dict[Rank, NDArray[np.int64]]:
        """Return every byte that some edge moves, by rank; ranks without any are left out."""
        of_rank: dict[Rank, list[NDArray[np.int64]]] = {}
        for edge in self.edges:
            at = edge.at_producer if side == "producer" else edge.at_consumer
            if at.size:
                rank = edge.producer if side == "producer" else edge.consumer
                of_rank.setdefault(rank, []).append(at)
        return {rank: np.unique(np.concatenate(found)) for rank, found in of_rank.items()}

    def carriers(self, side: str, rank: Rank, at: int) -> Iterator[tuple[Edge, bool]]:
        """Return every edge, and whether it moves a byte."""
        for edge in self.edges:
            if side == "producer":
                yield edge, edge.producer == rank and at in edge.at_producer
            else:
                yield edge, edge.consumer == rank and at in edge.at_consumer


class Cell(NamedTuple):
    """What the oracle has written into a cell."""

    layer: int
    part: str
    unit: int
    token: int


def name_at(memory: RankMemory, at: int) -> Cell:
    rest = int(memory.data[at - at % 4 :][:4].view(np.uint32)[0] - 1) // 8
    rest, token = divmod(rest, 4096)
    rest, unit = divmod(rest, 64)
    layer, part = divmod(rest, 16)
    return Cell(layer, PARTS[part], unit, token)


@in_parts
@many
@given(case=cases(), chunk_tokens=chunk_sizes)
def test_both_ends_of_every_edge_agree_after_a_right_transfer(
    part: int, case: Case, chunk_tokens: int
) -> None:
    compared = Compared(case, chunk_tokens)
    for edge in compared.edges:
        ours, theirs = compared.both(edge)
        assert first_difference(edge.probes, ours, theirs) is None
        assert sum(values.size for values in ours) == sum(len(p.chunks) for p in edge.probes)
        assert bool(edge.probes) == bool(edge.at_consumer.size), "what moves is compared, no more"


@in_parts
@many
@given(case=cases(), chunk_tokens=chunk_sizes, side=st.sampled_from(["producer", "consumer"]),
       pick=picks, bit=st.integers(0, 7))  # fmt: skip
def test_a_changed_byte_is_found_where_it_is_and_nowhere_else(
    part: int, case: Case, chunk_tokens: int, side: str, pick: int, bit: int
) -> None:
    compared = Compared(case, chunk_tokens)
    moved = compared.moved(side)
    assume(moved)
    rank = sorted(moved)[pick % len(moved)]
    at = int(moved[rank][pick // len(moved) % moved[rank].size])
    memory = compared.memory(side, rank)
    cell = name_at(memory, at)
    memory.data[at] ^= 1 << bit
    for edge, carries in compared.carriers(side, rank, at):
        off = compared.off(edge)
        message = first_difference(edge.probes, *compared.both(edge))
        assert len(off) == carries
        if not carries:
            assert message is None
            continue
        ((probe, chunk),) = off
        assert message is not None
        assert message.startswith(probe.where(chunk))
        assert probe.cells.layer == cell.layer
        assert probe.cells.component in COMPONENTS.get(cell.part, {cell.part})
        assert probe.cells.unit_start <= cell.unit < probe.cells.unit_end
        if GROUP_KINDS[case.model.layers[cell.layer]] != "state":
            start, end = probe.chunks[chunk]
            assert start <= cell.token < end


@in_parts
@some
@given(case=cases(), side=st.sampled_from(["producer", "consumer"]))
def test_bytes_that_do_not_move_are_not_compared(part: int, case: Case, side: str) -> None:
    compared = Compared(case, 8)
    moved = compared.moved(side)
    fleet = compared.world.producer if side == "producer" else compared.world.consumer
    for rank, memory in fleet.ranks.items():
        rest = np.ones(memory.data.size, bool)
        rest[moved.get(rank, [])] = False
        memory.data[rest] ^= 0xFF
    assert not any(compared.off(edge) for edge in compared.edges)


@in_parts
@some
@given(case=cases(), chunk_tokens=chunk_sizes, pick=st.tuples(picks, picks))
def test_swapped_words_are_found(
    part: int, case: Case, chunk_tokens: int, pick: tuple[int, int]
) -> None:
    """Every word has a value of its own, so a swap is two changes."""
    compared = Compared(case, chunk_tokens)
    edges = [edge for edge in compared.edges if edge.at_consumer.size > 4]
    assume(edges)
    edge = edges[pick[0] % len(edges)]
    words = np.unique(edge.at_consumer // 4)
    one, other = words[pick[0] % words.size], words[pick[1] % words.size]
    assume(one != other)
    data = compared.memory("consumer", edge.consumer).data
    at = [slice(4 * word, 4 * word + 4) for word in (one, other)]
    data[at[0]], data[at[1]] = data[at[1]].copy(), data[at[0]].copy()
    assert 1 <= len(compared.off(edge)) <= 2


@in_parts
@some
@given(case=cases(), chunk_tokens=chunk_sizes, count=st.integers(0, 30), seed=picks)
def test_a_sample_is_some_of_all_the_same_ones_for_one_seed(
    part: int, case: Case, chunk_tokens: int, count: int, seed: int
) -> None:
    compared = Compared(case, chunk_tokens)
    for edge in compared.edges:
        sample = sample_probes(edge.probes, count, seed=seed)
        assert sample == sample_probes(edge.probes, count, seed=seed)
        whole = dict(zip(edge.probes, compared.both(edge)[0], strict=True))
        all_of = {
            (p.cells, c): d for p, ds in whole.items() for c, d in zip(p.chunks, ds, strict=True)
        }
        assert sum(len(p.chunks) for p in sample) == min(count, len(all_of))
        ours, theirs = compared.both(edge, sample)
        assert first_difference(sample, ours, theirs) is None
        for probe, digests in zip(sample, ours, strict=True):
            for chunk, digest in zip(probe.chunks, digests, strict=True):
                assert all_of[probe.cells, chunk] == digest
