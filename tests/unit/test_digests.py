"""Digests of engines that hold the same values, and what differs between those that do not."""

import numpy as np
import pytest

from kvbridge.model import (
    TransferTopology,
)
from kvbridge.plan import (
    CellRange,
    Probe,
    TokenShare,
    first_difference,
    generate_engine_transfer_plan,
)
from tests.unit.held_values import (
    CONTENT,
    HEADS,
    LAYERS,
    TOKENS,
    VALUES,
    Held,
    differences,
    edges,
    halves,
    one_edge,
    probes_for,
    shares,
)

PAIRS = {
    "k and v apart against kv": ([Held(axes="BHNC", apart=True)], [Held(axes="BHNC")]),
    "kv against a pair axis": ([Held(axes="BNHC")], [Held(axes="KBNHC")]),
    "pages of 4 against 16": ([Held(page=4)], [Held(page=16)]),
    "pages of 16 against 5": ([Held(page=16, axes="BNHKC")], [Held(page=5)]),
    "tp 2 against 1": (halves(), [Held(axes="KBNHC", page=16)]),
    "tp 1 against 2": ([Held(axes="BHNC")], halves(page=8)),
    "dcp 2 against 1": (shares(), [Held(page=16)]),
    "dcp 2 against interleave 4": (
        [Held(rank=(0, r), dcp=(r, 2, 1)) for r in range(2)],
        shares(page=8),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_same_values_have_the_same_digests(pair: str) -> None:
    producers, consumers = PAIRS[pair]
    cells = 0
    for producer, consumer, regions in edges(producers, consumers):
        probes = probes_for(consumer, regions)
        ours, theirs = consumer.digests(probes), producer.digests(probes)
        assert first_difference(probes, ours, theirs) is None
        assert len({int(d) for digests in ours for d in digests}) == sum(map(len, ours))
        parts = 2 if probes[0].cells.component == "kv" else 1
        common = len(set(producer.tokens) & set(consumer.tokens))
        assert {p.cells.cell_bytes for p in probes} == {parts * CONTENT * 2}
        cells += sum(parts * (p.cells.unit_end - p.cells.unit_start) * common for p in probes)
    assert cells == LAYERS * TOKENS * HEADS * 2, "every cell is compared, on one edge"


def test_chunks_are_multiples_of_their_length_in_the_sequence() -> None:
    probes = one_edge(Held(), Held(axes="BHNC", apart=True), start_token=3, end_token=21)
    assert {p.cells.component for p in probes} == {"k", "v"}
    assert {p.chunks for p in probes} == {((3, 8), (8, 16), (16, 21))}


def test_both_ends_plan_the_same_cells() -> None:
    """What a plan calls local is the consumer where it reads, and the producer where it writes."""
    producers, consumers = shares(name="prefill"), [Held(name="decode", page=16)]
    (reads,) = [{CellRange.of(r) for r in regions}
                for p, _, regions in edges(producers, consumers) if p.rank == (0, 1)]  # fmt: skip
    topology = TransferTopology(
        tp_rank=1, tp_size=2, block_size=4, engine_id="prefill", is_mla=False, is_mamba=False,
        total_num_kv_heads=HEADS, dcp_size=2,
    )  # fmt: skip
    plan = generate_engine_transfer_plan(
        topology,
        producers[1].cache,
        {(0, 0): consumers[0].cache},
        local_engine={held.rank: held.cache for held in producers},
        direction="write",
    )
    assert {CellRange.of(region) for region in plan.sources[0].regions} == reads
    assert {cells.shares for cells in reads} == {(TokenShare(1, 2, 4),)}


# --- what differs is found, and named -------------------------------------------------------------


def test_a_difference_is_said_in_words() -> None:
    producer, consumer = Held(), Held(axes="KBNHC", page=16)
    probes = one_edge(producer, consumer)
    consumer.cell(1, 19, 2, 1)[3] ^= 1
    here, there = consumer.digests(probes), producer.digests(probes)
    message = first_difference(probes, here, there)
    (i,) = [i for i, p in enumerate(probes) if (p.cells.layer, p.cells.component) == (1, "v")]
    assert message == (
        "layer 1 'layers.1', component 'v', units [0, 4), tokens [16, 24): digest "
        f"{int(here[i][2]):#018x} here and {int(there[i][2]):#018x} there; 1 of 16 digests differ"
    )


def test_a_difference_among_shared_out_tokens_says_whose_they_are() -> None:
    producers, consumer = shares(), Held(page=16)
    _, _, regions = edges(producers, [consumer])[1]
    probes = probes_for(consumer, regions)
    producers[1].cell(0, 0, 0, 0)[0] ^= 1
    message = first_difference(probes, consumer.digests(probes), producers[1].digests(probes))
    assert message is not None
    assert message.startswith(
        "layer 0 'layers.0', component 'k', units [0, 4) of token share 1 of 2 (interleave 4), "
        "tokens [4, 8)"
    )


def swap(held: Held, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    here, there = held.cell(*one), held.cell(*other)
    here[:], there[:] = there.copy(), here.copy()


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ((0, 1, 2, 0), (0, 2, 2, 0), 1),  # two tokens of a chunk
        ((0, 1, 2, 0), (0, 1, 3, 0), 1),  # two heads
        ((0, 1, 2, 0), (0, 2, 1, 0), 1),  # both
        ((0, 1, 2, 0), (0, 1, 2, 1), 2),  # K and V
        ((0, 1, 2, 0), (1, 1, 2, 0), 2),  # two layers
        ((0, 1, 2, 0), (0, 17, 2, 0), 2),  # two chunks
    ],
)
def test_swapped_cells_are_found(one: tuple[int, ...], other: tuple[int, ...], count: int) -> None:
    producer, consumer = Held(), Held(page=16)
    probes = one_edge(producer, consumer)
    swap(consumer, one, other)
    assert differences(probes, producer, consumer) == count


def test_tokens_that_have_moved_on_by_one_are_found() -> None:
    producer, consumer = Held(), Held(page=16)
    probes = one_edge(producer, consumer)
    for layer in range(LAYERS):
        for token in range(TOKENS):
            for head in range(HEADS):
                consumer.cell(layer, token, head, 0)[:] = VALUES[layer, token - 1, head, 0]
    assert differences(probes, producer, consumer) == LAYERS * 4


@pytest.mark.parametrize("words", [(0, 1), (0, 4), (1, 5), (3, 7)])
def test_signs_that_change_together_are_found(words: tuple[int, int]) -> None:
    """The top bits of two words: with multipliers alone these would cancel out."""
    producer, consumer = Held(), Held(page=16)
    probes = one_edge(producer, consumer)
    for word in words:
        consumer.cell(0, 5, 1, 0)[word] ^= 0x8000
    assert differences(probes, producer, consumer) == 1


def test_zeros_count() -> None:
    """Cells of zeros differ from no cells, from other zeros' places and from none being there."""
    held = Held()
    for tensor in held.tensors:
        tensor[:] = 0
    probes = one_edge(held, Held(page=16))
    digests = [int(d) for d in np.concatenate(held.digests(probes))]
    assert len(set(digests[:4])) == 4
    (cells,) = {p.cells for p in probes if (p.cells.layer, p.cells.component) == (0, "k")}
    lengths = [held.digests((Probe(cells, ((0, n),)),))[0][0] for n in range(5)]
    assert len(set(lengths)) == 5


def test_every_bit_of_a_cell_counts() -> None:
    held = Held()
    (probe, *_) = one_edge(held, Held(page=16))
    known = {int(held.digests((probe,))[0][0])}
    cell = held.cell(0, 0, 0, 0)
    for word in range(CONTENT):
        for bit in range(16):
            cell[word] ^= 1 << bit
            known.add(int(held.digests((probe,))[0][0]))
            cell[word] ^= 1 << bit
    assert len(known) == 1 + CONTENT * 16
