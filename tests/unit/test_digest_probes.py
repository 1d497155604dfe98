"""What is asked for of digests, all of it or a sample, and what cannot be."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvbridge.errors import BlockTableError, PlanError, UnsupportedLayoutError
from kvbridge.plan import (
    BlockTable,
    CellRange,
    Probe,
    TokenShare,
    digests_of,
    first_difference,
    sample_probes,
)
from tests.unit.held_values import (
    CONTENT,
    TOKENS,
    Held,
    differences,
    one_edge,
    shares,
)


def test_a_sample_is_bounded_and_follows_from_its_seed() -> None:
    probes = one_edge(Held(), Held(page=16), chunk_tokens=2)
    pairs = [{(p.cells, c) for p in sample_probes(probes, 5, seed=seed) for c in p.chunks}
             for seed in (1, 1, 2, -1, 1 << 70)]  # fmt: skip
    assert {len(chosen) for chosen in pairs} == {5}
    assert pairs[0] == pairs[1]
    assert len({frozenset(chosen) for chosen in pairs}) == 4
    assert sample_probes(probes, 1 << 40, seed=3) == probes
    assert sample_probes(probes, 0, seed=3) == sample_probes((), 9, seed=3) == ()


def test_digests_of_some_chunks_are_those_of_all() -> None:
    """Whatever other chunks are asked for at the same time, and in which order."""
    held = Held()
    probes = one_edge(held, Held(page=16))
    whole = dict(zip(probes, held.digests(probes), strict=True))
    some = tuple(Probe(p.cells, p.chunks[3 - i :][:1]) for i, p in enumerate(probes))
    for i, (probe, digests) in enumerate(zip(probes, held.digests(some), strict=True)):
        assert digests.tolist() == [whole[probe][3 - i]]


def test_all_are_sampled_alike() -> None:
    probes = one_edge(Held(), Held(page=16), chunk_tokens=4)
    times = dict.fromkeys([(p.cells, c) for p in probes for c in p.chunks], 0)
    for seed in range(400):
        for probe in sample_probes(probes, 4, seed=seed):
            for chunk in probe.chunks:
                times[probe.cells, chunk] += 1
    assert len(times) == 32
    assert 20 < min(times.values()) <= max(times.values()) < 90, "50 each, give or take"


def test_probes_can_travel() -> None:
    probes = one_edge(Held(), Held(page=16))
    text = msgspec.msgpack.encode(probes)
    assert msgspec.msgpack.decode(text, type=tuple[Probe, ...]) == probes
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([{**msgspec.to_builtins(probes[0]), "chunks": [[4, 2]]}], tuple[Probe, ...])


# --- what cannot be digested ----------------------------------------------------------------------


def test_what_the_consumer_takes_no_block_for_is_not_compared() -> None:
    producer, consumer = Held(), Held()
    ids = [int(block) for block in consumer.table.block_ids]
    ids[2], ids[5] = 99, 99
    consumer.table = BlockTable(ids, null_block_id=99)
    probes = one_edge(producer, consumer, chunk_tokens=16)
    assert {p.chunks for p in probes} == {((0, 8), (12, 16), (16, 20), (24, 32))}
    assert differences(probes, producer, consumer) == 0
    whole = Probe(probes[0].cells, ((0, TOKENS),))
    with pytest.raises(BlockTableError, match="null block for token 8"):
        consumer.digests((whole,))


def test_memory_that_the_host_cannot_read_is_refused() -> None:
    held = Held()
    probes = one_edge(held, Held(page=16))
    regions = (replace(held.cache.regions[0], memory_kind="cuda"), held.cache.regions[1])
    held.cache = replace(held.cache, regions=regions)
    with pytest.raises(UnsupportedLayoutError, match=r"'cuda' memory.*copy the request's blocks"):
        held.digests(probes)
    held.digests(tuple(p for p in probes if p.cells.layer == 1))


ONE = CellRange(0, "layers.0", "k", 0, 2, CONTENT * 2)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (replace(ONE, layer=7), "does not hold layer"),
        (replace(ONE, component="latent"), "'latent' is neither among"),
        (replace(ONE, unit_end=5), r"holds units \[0, 4\)"),
        (replace(ONE, cell_bytes=8), "cells have 16 bytes here and 8"),
    ],
)
def test_cells_that_a_rank_does_not_hold_are_refused(cells: CellRange, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Held().digests((Probe(cells, ((0, 4),)),))


def test_tokens_that_only_one_side_knows_to_be_shared_out_are_refused() -> None:
    with pytest.raises(PlanError, match="only the tokens of token share 1 of 2"):
        shares()[1].digests((Probe(ONE, ((0, 4),)),))


def test_tokens_beyond_the_table_are_refused() -> None:
    with pytest.raises(BlockTableError, match=r"covers tokens \[0, 32\)"):
        Held().digests((Probe(ONE, ((0, 4), (1 << 61, 1 << 62))),))
    with pytest.raises(BlockTableError, match="none for cache groups"):
        digests_of(Held().cache, [Probe(ONE, ((0, 4),))], [])


@pytest.mark.parametrize("chunks", [(), ((4, 2),), ((0, 4), (2, 6)), ((-1, 3),), ((1 << 70,) * 2,)])
def test_chunks_that_are_none_are_refused(chunks: Any) -> None:
    with pytest.raises(PlanError, match="no ranges of tokens in order"):
        Probe(ONE, chunks)


@pytest.mark.parametrize(
    "changes",
    [
        {"unit_start": 2},
        {"unit_start": -1},
        {"cell_bytes": 0},
        {"layer": -1},
        {"shares": (TokenShare(2, 2),)},
        {"shares": (TokenShare(0, 1 << 62, 1 << 62),)},
        {"shares": (TokenShare(0, 0, 0),)},
    ],
)
def test_cells_that_are_none_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="take those of a plan"):
        replace(ONE, **changes)


def test_a_side_that_digested_something_else_is_refused() -> None:
    held = Held()
    probes = one_edge(held, Held(page=16))
    digests = held.digests(probes)
    with pytest.raises(PlanError, match="12 digests there of 3 probes, but 4 probes ask for 16"):
        first_difference(probes, digests, digests[:-1])
    short = (*digests[:-1], digests[-1][:-1])
    with pytest.raises(PlanError, match="15 digests here of 4 probes"):
        first_difference(probes, short, digests)
    with pytest.raises(PlanError, match="chunk_tokens is 0"):
        one_edge(held, Held(page=16), chunk_tokens=0)
