"""What a digest is: of cells, of states, and of pages that move whole."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import BlockTableError, PlanError
from kvbridge.model import (
    CacheGroup,
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
    digest,
    digests_of,
    first_difference,
    generate_engine_transfer_plan,
    probes_of,
)
from tests.unit.held_values import (
    CONTENT,
    VALUES,
    Held,
    one_edge,
)


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


# --- state ----------------------------------------------------------------------------------------


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
