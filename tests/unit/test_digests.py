"""Digests of engines that hold the same values in layouts chosen by hand."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvbridge.errors import BlockTableError, PlanError, UnsupportedLayoutError
from kvbridge.model import (
    CacheGroup,
    LayerCache,
    Rank,
    RankCache,
    Region,
    StatePiece,
    TransferTopology,
    attention_layer,
    mamba_layer,
    opaque_layer,
)
from kvbridge.plan import (
    BlockTable,
    CellRange,
    Probe,
    RegionPlan,
    TokenShare,
    digest,
    digests_of,
    first_difference,
    generate_engine_transfer_plan,
    probes_of,
    sample_probes,
)

LAYERS, TOKENS, HEADS, CONTENT = 2, 32, 4, 8
VALUES: NDArray[np.uint16] = np.random.default_rng(7).integers(
    0, 1 << 16, (LAYERS, TOKENS, HEADS, 2, CONTENT), np.uint16
)
"""What every engine holds. Shape: [layers, tokens, heads, K/V, content]."""


@dataclass
class Held:
    """One rank that holds some heads and tokens of ``VALUES``, in a layout of its own."""

    axes: str = "BKHNC"
    page: int = 4
    heads: tuple[int, int] = (0, HEADS)
    rank: Rank = (0, 0)
    dcp: tuple[int, int, int] = (0, 1, 1)
    apart: bool = False
    name: str = "engine"
    tensors: list[NDArray[np.uint16]] = field(init=False)
    cache: RankCache = field(init=False)
    table: BlockTable = field(init=False)

    def __post_init__(self) -> None:
        share, size, interleave = self.dcp
        self.tokens = [t for t in range(TOKENS) if t // interleave % size == share]
        blocks = -(-len(self.tokens) // self.page)
        order = np.random.default_rng(blocks).permutation(blocks + 2)[:blocks]
        self.table = BlockTable(order.tolist())
        sizes = {"B": blocks + 2, "K": 2, "H": self.heads[1] - self.heads[0], "N": self.page}
        sizes["C"] = CONTENT if "K" in self.axes or self.apart else 2 * CONTENT
        shape = [sizes[axis] for axis in self.axes]
        self.tensors = [
            np.full(shape, 0xDEAD, np.uint16) for _ in range(LAYERS * (2 if self.apart else 1))
        ]
        for layer in range(LAYERS):
            for i, token in enumerate(self.tokens):
                for head in range(*self.heads):
                    self.cell(layer, i, head, 0)[:] = VALUES[layer, token, head, 0]
                    self.cell(layer, i, head, 1)[:] = VALUES[layer, token, head, 1]
        self.cache = RankCache(
            self.name, *self.rank, tuple(self._layer(i) for i in range(LAYERS)),
            (CacheGroup("attention", self.page),),
            tuple(Region(t.ctypes.data, t.nbytes) for t in self.tensors), *self.dcp,
        )  # fmt: skip

    def cell(self, layer: int, held_token: int, head: int, pair: int) -> NDArray[np.uint16]:
        """Return where K or V of a head and a token lies."""
        block = self.table.block_ids[held_token // self.page]
        at: dict[str, Any] = {"B": block, "N": held_token % self.page, "K": pair}
        at |= {"H": head - self.heads[0], "C": slice(None)}
        tensor = self.tensors[2 * layer + pair if self.apart else layer]
        cell: NDArray[np.uint16] = tensor[tuple(at[axis] for axis in self.axes)]
        return cell if cell.size == CONTENT else cell[pair * CONTENT :][:CONTENT]

    def _layer(self, layer: int) -> LayerCache:
        tensor: Any = self.tensors[layer]
        if self.apart:
            tensor = (self.tensors[2 * layer], self.tensors[2 * layer + 1])
        return attention_layer(tensor, axes=self.axes, layer=layer, name=f"layers.{layer}",
                               unit_start=self.heads[0], unit_total=HEADS)  # fmt: skip

    def digests(self, probes: tuple[Probe, ...]) -> tuple[NDArray[np.uint64], ...]:
        return digests_of(self.cache, probes, [self.table])


def edges(producers: list[Held], consumers: list[Held]) -> list[tuple[Held, Held, Any]]:
    """Return who gives which regions to whom."""
    found = []
    by_rank = {held.rank: held for held in producers}
    for consumer in consumers:
        plan = generate_engine_transfer_plan(
            TransferTopology(
                tp_rank=consumer.rank[1], tp_size=len(consumers), block_size=consumer.page,
                engine_id=consumer.name, is_mla=False, is_mamba=False, total_num_kv_heads=HEADS,
                dcp_size=consumer.dcp[1],
            ),
            consumer.cache,
            {rank: held.cache for rank, held in by_rank.items()},
            local_engine={held.rank: held.cache for held in consumers},
        )  # fmt: skip
        found += [(by_rank[source.rank], consumer, source.regions) for source in plan.sources]
    return found


def probes_for(
    consumer: Held, regions: tuple[RegionPlan, ...], **changes: Any
) -> tuple[Probe, ...]:
    options = {"end_token": TOKENS, "chunk_tokens": 8} | changes
    return probes_of(consumer.cache, regions, [consumer.table], **options)


def one_edge(producer: Held, consumer: Held, **changes: Any) -> tuple[Probe, ...]:
    ((_, _, regions),) = edges([producer], [consumer])
    return probes_for(consumer, regions, **changes)


def halves(**changes: Any) -> list[Held]:
    return [
        Held(heads=(0, 2), rank=(0, 0), **changes),
        Held(heads=(2, 4), rank=(0, 1), **changes),
    ]


def shares(**changes: Any) -> list[Held]:
    return [Held(rank=(0, r), dcp=(r, 2, 4), **changes) for r in range(2)]


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


# --- what differs is found, and named ------------------------------------------------------------


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


def differences(probes: tuple[Probe, ...], producer: Held, consumer: Held) -> int:
    here, there = (np.concatenate(held.digests(probes)) for held in (producer, consumer))
    return int((here != there).sum())


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


# --- the digest itself ---------------------------------------------------------------------------


def mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ value >> shift) * factor % 2**64
    return value


GOLDEN, UNIT = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def slow_digest(cells: dict[tuple[int, int], bytes], nbytes: int) -> int:
    """Digest cells by (token, unit) in plain arithmetic: what all peers must agree on."""
    words = -(-nbytes // 8)
    factors = [mixed(i * GOLDEN % 2**64) | 1 for i in range(1, 2 * words + 1)]
    total = 0
    for (token, unit), content in cells.items():
        padded = content.ljust(8 * words, b"\0")
        values = [int.from_bytes(padded[8 * i : 8 * i + 8], "little") for i in range(words)]
        content_hash = sum(v * factors[i] + (v >> 32) * factors[words + i]
                           for i, v in enumerate(values))  # fmt: skip
        total += mixed((content_hash + mixed((token * GOLDEN + unit * UNIT) % 2**64)) % 2**64)
    return mixed((total + mixed((len(cells) * GOLDEN + nbytes) % 2**64)) % 2**64)


def test_the_digest_is_what_it_says() -> None:
    """It must not change with the version of numpy, or the machine: two engines compare it."""
    cells = CellRange(1, "layers.1", "v", 1, 3, CONTENT * 2)
    chunks = ((0, 8), (8, 11))
    for held in (Held(), Held(axes="KBNHC", page=16)):
        (digests,) = held.digests((Probe(cells, chunks),))
        assert digests.tolist() == [
            slow_digest({(t, h): VALUES[1, t, h, 1].tobytes() for t in range(*chunk)
                         for h in (1, 2)}, CONTENT * 2)
            for chunk in chunks
        ]  # fmt: skip


def test_slabs_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    probes = one_edge(held, Held(page=16))
    whole = np.concatenate(held.digests(probes))
    for nbytes in (1, 48, 100):
        monkeypatch.setattr(digest, "SLAB_NBYTES", nbytes)
        assert (np.concatenate(held.digests(probes)) == whole).all()


@pytest.mark.parametrize("cell_bytes", [1, 2, 7, 8, 9, 13])
def test_cells_of_any_length_count_to_their_last_byte(cell_bytes: int) -> None:
    data = np.zeros((3, 4, 2, cell_bytes), np.uint8)
    layer = attention_layer(data, axes="BNHC", layer=0, name="x", unit_start=0, unit_total=2)
    part = replace(layer.components[0], name="scale")
    cache = RankCache(
        "e", 0, 0, (replace(layer, components=(part,)),), (CacheGroup("attention", 4),),
        (Region(data.ctypes.data, data.nbytes),),
    )  # fmt: skip
    probe = Probe(CellRange(0, "x", "scale", 0, 2, cell_bytes), ((0, 4), (4, 8)))
    (before,) = digests_of(cache, [probe], [BlockTable([2, 0])])
    data[0, 3, 1, -1] ^= 1
    (after,) = digests_of(cache, [probe], [BlockTable([2, 0])])
    assert (before != after).tolist() == [False, True]
    data[1] = 9  # another request's
    (same,) = digests_of(cache, [probe], [BlockTable([2, 0])])
    assert (same == after).all()


# --- state ---------------------------------------------------------------------------------------


class Mamba:
    """A state in block 1 of 3: 4 channels of 3 rows, and 2 heads of 4 numbers."""

    def __init__(self, order: Any, *, rows_in_cells: bool = False) -> None:
        self.data = np.zeros((3, 64), np.uint8)
        values = np.arange(12, dtype=np.uint8).reshape(4, 3) + 1
        conv = self.data[:, :12].reshape(3, 4, 3)
        if order == "tokens_first":
            conv = self.data[:, :12].reshape(3, 3, 4)
        conv[1] = values if order == "channels_first" else values.T
        ssm = self.data[:, 16:24].reshape(3, 2, 4)
        ssm[1] = np.arange(8).reshape(2, 4) + 100
        layer = mamba_layer(
            conv, ssm, layer=5, name="mamba", conv_order=order,
            conv_pieces=[StatePiece("x", 0, 4, 4)], ssm_piece=StatePiece("ssm", 0, 2, 2),
        )  # fmt: skip
        if rows_in_cells:
            conv_x = replace(layer.components[0], cell_bytes=3, token_count=1)
            layer = replace(layer, components=(conv_x, layer.components[1]))
        self.cache = RankCache("e", 0, 0, (layer,), (CacheGroup("state", 64),),
                               (Region(self.data.ctypes.data, self.data.nbytes),))  # fmt: skip

    def digests(self, probes: tuple[Probe, ...], block: int = 1) -> Any:
        return digests_of(self.cache, probes, [BlockTable([block])])


def mamba_probes(producer: Mamba, consumer: Mamba) -> tuple[Probe, ...]:
    topology = TransferTopology(
        tp_rank=0, tp_size=1, block_size=64, engine_id="e", is_mla=False, is_mamba=True,
        total_num_kv_heads=1,
    )  # fmt: skip
    plan = generate_engine_transfer_plan(topology, consumer.cache, {(0, 0): producer.cache})
    regions = plan.sources[0].regions
    return probes_of(consumer.cache, regions, [BlockTable([1])], end_token=100)


@pytest.mark.parametrize("rows_in_cells", [True, False])
def test_a_state_has_one_digest_whatever_the_order_of_its_axes(rows_in_cells: bool) -> None:
    producer, consumer = Mamba("channels_first", rows_in_cells=rows_in_cells), Mamba("tokens_first")
    probes = mamba_probes(producer, consumer)
    assert [(p.cells.component, p.chunks) for p in probes] == [
        ("conv.x", ((0, 100),)),
        ("ssm", ((0, 100),)),
    ]
    here, there = consumer.digests(probes), producer.digests(probes)
    assert first_difference(probes, here, there) is None
    data = consumer.data[1]
    data[0], data[4] = data[4], data[0]  # two rows of a channel
    message = first_difference(probes, consumer.digests(probes), there)
    assert message is not None
    assert message.startswith("layer 5 'mamba', component 'conv.x', units [0, 4)")
    assert message.endswith("1 of 2 digests differ")


def test_a_state_is_not_digested_in_parts() -> None:
    mamba = Mamba("channels_first")
    cells = mamba_probes(mamba, mamba)[1].cells
    with pytest.raises(PlanError, match="a state has one digest"):
        mamba.digests((Probe(cells, ((0, 4), (4, 8))),))
    with pytest.raises(BlockTableError, match="lists no block"):
        digests_of(mamba.cache, [Probe(cells, ((0, 4),))], [BlockTable([7], null_block_id=7)])


# --- pages that move whole ------------------------------------------------------------------------


def test_pages_that_move_whole_are_digested_whole() -> None:
    """A window of 6 tokens begins within the page of tokens 8 to 11, which moves and counts."""
    data = np.random.default_rng(3).integers(0, 256, (6, 24), np.uint8)
    region = Region(data.ctypes.data, data.nbytes)
    layer = opaque_layer(data, layer=0, name="quantized")
    cache = RankCache("e", 0, 0, (layer,), (CacheGroup("sliding_window", 4, 1, 6),), (region,))
    topology = TransferTopology(
        tp_rank=0, tp_size=1, block_size=4, engine_id="e", is_mla=False, is_mamba=False,
        total_num_kv_heads=1,
    )  # fmt: skip
    plan = generate_engine_transfer_plan(topology, cache, {(0, 0): cache})
    table = BlockTable([4, 0, 2, 3])
    probes = probes_of(cache, plan.sources[0].regions, [table], end_token=16, chunk_tokens=2)
    assert [p.chunks for p in probes] == [((8, 12), (12, 16))]
    (before,) = digests_of(cache, probes, [table])
    data[2, 23] ^= 1
    (after,) = digests_of(cache, probes, [table])
    assert (before != after).tolist() == [True, False]
    late = Probe(probes[0].cells, ((10, 12), (12, 16)))  # the page counts where it begins
    (digests,) = digests_of(cache, [late], [table])
    assert digests[1] == after[1]
    assert digests[0] == digests_of(cache, [Probe(late.cells, ((13, 14),))], [table])[0][0]


# --- samples -------------------------------------------------------------------------------------


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


# --- what cannot be digested ---------------------------------------------------------------------


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


def test_probes_can_travel() -> None:
    probes = one_edge(Held(), Held(page=16))
    text = msgspec.msgpack.encode(probes)
    assert msgspec.msgpack.decode(text, type=tuple[Probe, ...]) == probes
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([{**msgspec.to_builtins(probes[0]), "chunks": [[4, 2]]}], tuple[Probe, ...])
