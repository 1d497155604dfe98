"""Small engines whose caches lie in the agents' memory, and what their tokens are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvbridge.model import (
    CacheGroup,
    LayerCache,
    RankCache,
    TransferTopology,
    attention_layer,
    mla_layer,
)
from kvbridge.plan import BlockTable
from kvbridge.testing.remote import RemoteAgent

HEADS, HEAD_DIM, PAGES = 4, 8, 12
ITEM_BYTES = 2
Rank = tuple[int, int]
Cells = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine is cut up.

    Attributes:
        stages: Layers of each pipeline stage.
        tp: Ranks of each stage.
        page: Tokens of a page.
        axes: Order of the axes in memory: B page, K the K/V pair, H head, N token, C content;
            without H the cache is a latent that every rank holds whole.
    """

    stages: tuple[int, ...]
    tp: int
    page: int
    axes: str

    @property
    def ranks(self) -> list[Rank]:
        """All ranks of the engine."""
        return [(pp, tp) for pp in range(len(self.stages)) for tp in range(self.tp)]


@dataclass(frozen=True, slots=True)
class Pairing:
    """A producer and a consumer of one model."""

    name: str
    producer: Shape
    consumer: Shape


PAIRINGS = (
    Pairing(
        "two ranks to four, pages of 16 and 32 tokens, heads outside tokens and inside",
        Shape((2,), 2, 16, "BHNC"),
        Shape((2,), 4, 32, "BKNHC"),
    ),
    Pairing(
        "four ranks to one, pages of 32 and 8 tokens",
        Shape((1,), 4, 32, "BKHNC"),
        Shape((1,), 1, 8, "BKHNC"),
    ),
    Pairing(
        "two stages to one, K and V apart and together",
        Shape((2, 1), 1, 16, "KBNHC"),
        Shape((3,), 2, 16, "BNHC"),
    ),
    Pairing(
        "latents of two ranks to three",
        Shape((2,), 2, 16, "BNC"),
        Shape((2,), 3, 16, "BNC"),
    ),
)


class Engine:
    """One side of a pairing, in the memory of one agent."""

    def __init__(
        self, name: str, shape: Shape, agent: RemoteAgent, page_ids: Sequence[int]
    ) -> None:
        """Lay the caches of all ranks out, one after the other."""
        self.name, self.shape, self.agent = name, shape, agent
        self.page_ids = list(page_ids)
        self._arrays: dict[tuple[Rank, int], tuple[int, tuple[int, ...]]] = {}
        self.caches: dict[Rank, RankCache] = {}
        position = 0
        for rank in shape.ranks:
            layers = []
            for layer in self._layers_of(rank):
                sizes = self._sizes()
                self._arrays[rank, layer] = (position, sizes)
                layers.append(self._describe(rank, layer))
                position += int(np.prod(sizes)) * ITEM_BYTES + 64
            self.caches[rank] = RankCache(
                engine_id=name,
                pp_rank=rank[0],
                tp_rank=rank[1],
                layers=tuple(layers),
                groups=(CacheGroup("attention" if self._heads else "mla", shape.page),),
                regions=(agent.region,),
            )
        self.nbytes = position

    @property
    def table(self) -> BlockTable:
        """Which pages hold the sequence, in order."""
        return BlockTable(self.page_ids)

    def topology(self, rank: Rank) -> TransferTopology:
        """Return what a rank knows of its own engine."""
        return TransferTopology(
            pp_rank=rank[0],
            tp_rank=rank[1],
            pp_size=len(self.shape.stages),
            tp_size=self.shape.tp,
            block_size=self.shape.page,
            engine_id=self.name,
            is_mla=not self._heads,
            is_mamba=False,
            total_num_kv_heads=HEADS if self._heads else 1,
        )

    def store(self, memory: NDArray[np.uint8], truth: Cells, tokens: range) -> None:
        """Write tokens into a copy of the agent's memory, as the engine itself would."""
        page = np.array(self.page_ids)[np.array(tokens) // self.shape.page]
        row = np.array(tokens) % self.shape.page
        for (rank, layer), (start, sizes) in self._arrays.items():
            nbytes = int(np.prod(sizes)) * ITEM_BYTES
            array = memory[start : start + nbytes].view(np.uint16).reshape(sizes)
            for at_head, view in self._by_head(array, rank):
                # Shape: view [page, token, 2 * HEAD_DIM], truth [layer, head, token, 2 * HEAD_DIM]
                for part, cells in view:
                    cells[page, row] = truth[layer, at_head, tokens.start : tokens.stop, part]

    @property
    def _heads(self) -> int:
        return HEADS // self.shape.tp if "H" in self.shape.axes else 0

    def _layers_of(self, rank: Rank) -> range:
        ends = list(accumulate(self.shape.stages))
        return range(ends[rank[0]] - self.shape.stages[rank[0]], ends[rank[0]])

    def _sizes(self) -> tuple[int, ...]:
        content = HEAD_DIM if "K" in self.shape.axes else 2 * HEAD_DIM
        size = {"B": PAGES, "K": 2, "H": self._heads, "N": self.shape.page, "C": content}
        return tuple(size[axis] for axis in self.shape.axes)

    def _by_head(self, array: Cells, rank: Rank) -> Iterator[tuple[int, list[tuple[slice, Cells]]]]:
        """Yield each global head with its views ``[page, token, content]`` and what they hold."""
        axes = self.shape.axes
        order = [axes.index(axis) for axis in "HKBNC" if axis in axes]
        array = array.transpose(order)
        first = rank[1] * self._heads
        for at, of_head in enumerate(array if self._heads else [array]):
            if "K" in axes:
                parts = [
                    (slice(0, HEAD_DIM), of_head[0]),
                    (slice(HEAD_DIM, 2 * HEAD_DIM), of_head[1]),
                ]
            else:
                parts = [(slice(0, 2 * HEAD_DIM), of_head)]
            yield first + at, parts

    def _describe(self, rank: Rank, layer: int) -> LayerCache:
        start, sizes = self._arrays[rank, layer]
        nbytes = int(np.prod(sizes)) * ITEM_BYTES
        array = self.agent.data[start : start + nbytes].view(np.float16).reshape(sizes)
        name = f"layers.{layer}"
        if self._heads:
            described = attention_layer(
                array,
                axes=self.shape.axes,
                layer=layer,
                name=name,
                unit_start=rank[1] * self._heads,
                unit_total=HEADS,
            )
        else:
            described = mla_layer(array, axes=self.shape.axes, layer=layer, name=name)
        # The agent's process has the same memory at another address.
        elsewhere = self.agent.address - int(self.agent.data.ctypes.data)
        return replace(described, base_address=described.base_address + elsewhere)
