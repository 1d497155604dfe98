"""The caches of simulated engines: every cell says whose it is."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvbridge.model import CacheGroup, Rank, RankCache, attention_layer, memory_region
from kvbridge.testing.simulation.scenario import LAYERS, TOKENS_MAX, Shape

Cells = NDArray[np.uint64]

POISON = 0xDEAD_DEAD_DEAD_DEAD
_HEADS_MAX = 4
_CELLS: Cells = (
    np.random.default_rng(1)
    .integers(0, 1 << 64, (LAYERS, TOKENS_MAX, _HEADS_MAX, 2), np.uint64)
)  # fmt: skip


class Arena:
    """The cache of one rank.

    A cell is 8 bytes: the key of a request's content, XOR a number that stands for its layer,
    token, head, and whether it is K or V. So what is found in a cell tells whose it is, whatever
    the shape of the engine.

    Attributes:
        cache: What the rank announces.
        shape: The engine.
        own: What stands for each of its cells, [layer, token, head, K or V].
    """

    def __init__(self, engine_id: str, rank: Rank, shape: Shape, heads: int) -> None:
        """Start with poison."""
        self.shape = shape
        pages = shape.blocks * shape.pages_per_block
        layers = LAYERS // shape.pp
        first_layer = rank[0] * layers
        count = max(1, heads // shape.tp)
        first_head = rank[1] * heads // shape.tp
        size = {"B": pages, "H": count, "N": shape.page_tokens, "K": 2}
        size["C"] = 1 if "K" in shape.axes else 2
        array = np.full((layers, *(size[axis] for axis in shape.axes)), POISON, np.uint64)
        self._array = array
        pairs = "K" if "K" in shape.axes else "C"
        order = [0, *(1 + shape.axes.index(axis) for axis in f"BNH{pairs}")]
        rest = [axis for axis in range(array.ndim) if axis not in order]
        # Shape: [layer, page, token, head, K or V], whatever the order of axes.
        self._cells: Cells = array.transpose(*order, *rest).reshape(
            layers, pages, shape.page_tokens, count, 2
        )
        if not np.shares_memory(self._cells, array):
            raise AssertionError("a view was wanted")
        self.own = _CELLS[first_layer : first_layer + layers, :, first_head : first_head + count]
        self._stride = array.strides[1 + shape.axes.index("B")]
        self._pages = pages
        self.address = int(array.ctypes.data)
        self.end = self.address + array.nbytes
        self.cache = RankCache(
            engine_id,
            *rank,
            tuple(
                attention_layer(
                    array[i],
                    axes=shape.axes,
                    layer=first_layer + i,
                    name=f"layers.{first_layer + i}",
                    unit_start=first_head,
                    unit_total=heads,
                )
                for i in range(layers)
            ),
            (CacheGroup("attention", shape.block_tokens, shape.pages_per_block),),
            (memory_region(array),),
        )

    def write(self, blocks: Sequence[int], start: int, end: int, key: int) -> None:
        """Compute some tokens of a request."""
        page, offset = self._where(blocks, start, end)
        own = self.own[:, start:end] ^ np.uint64(key)
        self._cells[:, page, offset] = own

    def keys(self, blocks: Sequence[int], start: int, end: int) -> Cells:
        """Return whose each cell of some tokens is. Shape: [layer, token, head, K or V]."""
        page, offset = self._where(blocks, start, end)
        return self._cells[:, page, offset] ^ self.own[:, start:end]

    def poison(self, blocks: Sequence[int] | None = None) -> None:
        """Overwrite blocks, or all of them."""
        if blocks is None:
            self._cells[:] = POISON
            return
        ratio = self.shape.pages_per_block
        first = np.asarray(blocks, np.intp) * ratio
        for i in range(ratio):
            self._cells[:, first + i] = POISON

    def blocks_of(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Return which blocks some ranges of memory lie in, as bits; what is elsewhere is none."""
        mask, ratio = 0, self.shape.pages_per_block
        for address, nbytes in pieces:
            if self.address <= address < self.end and nbytes:
                first = (address - self.address) // self._stride
                last = (address + nbytes - 1 - self.address) // self._stride
                for page in range(first, last + 1):
                    mask |= 1 << page % self._pages // ratio
        return mask

    def _where(
        self, blocks: Sequence[int], start: int, end: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        token = np.arange(start, end)
        page = token // self.shape.page_tokens
        ratio = self.shape.pages_per_block
        block = np.asarray(blocks, np.intp)[page // ratio]
        return block * ratio + page % ratio, token % self.shape.page_tokens


def bits(blocks: Iterable[int]) -> int:
    """Return blocks as bits."""
    mask = 0
    for block in blocks:
        mask |= 1 << block
    return mask


class Pool:
    """The blocks of an engine. What is given back is given out next.

    Attributes:
        free: Blocks that nobody has, the next one last.
    """

    def __init__(self, count: int) -> None:
        """Start with all of them free."""
        self.free = list(range(count))

    def take(self, count: int) -> list[int] | None:
        """Return blocks, or None if there are not as many."""
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken
