"""Ranks that hold the same values in layouts chosen by hand."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.model import (
    CacheGroup,
    LayerCache,
    Rank,
    RankCache,
    Region,
    TransferTopology,
    attention_layer,
)
from kvbridge.plan import (
    BlockTable,
    Probe,
    RegionPlan,
    digests_of,
    generate_engine_transfer_plan,
    probes_of,
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


def differences(probes: tuple[Probe, ...], producer: Held, consumer: Held) -> int:
    here, there = (np.concatenate(held.digests(probes)) for held in (producer, consumer))
    return int((here != there).sum())
