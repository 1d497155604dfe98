"""A rank's paged KV cache, laid out as its engine's shape says, and the allocator of its pages."""

from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from kvbridge.demo.shape import EngineShape

Halves = npt.NDArray[np.float16]

# As float16 it reads NaN, so a cell used before it was written (or moved) spoils every result.
POISON_BYTE = 0xFF


class PagedCache:
    """The KV pages of the layers and heads that one rank holds.

    All arrays are views into one buffer, so that a single region can be registered.

    Attributes:
        layers: Global indices of the layers held.
        heads: Global indices of the KV heads held.
        shape: Page size and layout.
        buffer: All bytes, uint8 [nbytes].
        axes: Order of the axes of each array: B page, K key/value, H head, N token, C content.
        parts: What the arrays of a layer are called, ``("kv",)`` or ``("k", "v")``.
        arrays: Per global layer its float16 arrays, in the order of ``parts``.
    """

    def __init__(
        self, layers: range, heads: range, head_dim: int, shape: EngineShape, pages: int
    ) -> None:
        """Lay out and poison ``pages`` pages per layer.

        Raises:
            ValueError: If there is not at least one page.
        """
        if pages < 1:
            raise ValueError(f"cache: pages is {pages}; it must be >= 1")
        self.layers, self.heads, self.shape = layers, heads, shape
        inner = {"nhd": "NHC", "hnd": "HNC"}[shape.layout]
        together = shape.kv == "together"
        self.axes = ("BK" if together else "B") + inner
        self.parts = ("kv",) if together else ("k", "v")
        sizes = {"B": pages, "K": 2, "N": shape.page, "H": len(heads), "C": head_dim}
        array_shape = tuple(sizes[axis] for axis in self.axes)
        count = prod(array_shape)
        total = len(layers) * len(self.parts) * count
        self.buffer = np.full(total * np.dtype(np.float16).itemsize, POISON_BYTE, np.uint8)
        chunks = iter(self.buffer.view(np.float16).reshape(-1, *array_shape))
        self.arrays: dict[int, tuple[Halves, ...]] = {
            layer: tuple(next(chunks) for _ in self.parts) for layer in layers
        }

    def write(
        self, layer: int, page_ids: Sequence[int], start_token: int, k: Halves, v: Halves
    ) -> None:
        """Store K and V of consecutive tokens of one sequence.

        Shape: k and v [tokens, heads, head_dim].

        Args:
            layer: Global index of the layer.
            page_ids: Pages of the sequence, in order from its token 0.
            start_token: Position of the first token stored.
            k: Keys.
            v: Values.

        Raises:
            ValueError: If the pages do not reach so far.
        """
        where = self._locate(page_ids, start_token, start_token + len(k))
        for view, content in zip(self._token_views(layer), (k, v), strict=True):
            view[where] = content

    def gather(self, layer: int, page_ids: Sequence[int], tokens: int) -> tuple[Halves, Halves]:
        """Return K and V of the first ``tokens`` tokens of a sequence, copied, as stored.

        Shape: both float16 [tokens, heads, head_dim].

        Raises:
            ValueError: If the pages do not reach so far.
        """
        where = self._locate(page_ids, 0, tokens)
        key_view, value_view = self._token_views(layer)
        return key_view[where], value_view[where]

    def _token_views(self, layer: int) -> tuple[Halves, Halves]:
        """View K and V of a layer as [page, token, head, content] each, whatever the layout."""
        arrays = self.arrays[layer]
        key, value = (arrays[0][:, 0], arrays[0][:, 1]) if len(arrays) == 1 else arrays
        if self.shape.layout == "hnd":
            return key.swapaxes(1, 2), value.swapaxes(1, 2)
        return key, value

    def _locate(
        self, page_ids: Sequence[int], start_token: int, end_token: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return page id and place in the page of each token in a range of a sequence."""
        reach = len(page_ids) * self.shape.page
        if end_token > reach:
            raise ValueError(
                f"cache: {len(page_ids)} page(s) of {self.shape.page} tokens hold {reach} tokens;"
                f" token {end_token - 1} lies beyond"
            )
        positions = np.arange(start_token, end_token)
        return np.asarray(page_ids, np.int64)[positions // self.shape.page], (
            positions % self.shape.page
        )


class PageAllocator:
    """Hands out page ids in a scattered order, as the cache of a busy engine would."""

    def __init__(self, pages: int, seed: int = 0) -> None:
        """Start with all of ``pages`` free, in an order drawn from ``seed``."""
        order = default_rng(seed).permutation(pages)
        self._free = deque(int(page_id) for page_id in order)
        self._held: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages.

        Raises:
            ValueError: If fewer are free; none is taken then.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"page allocator: {count} pages asked for, {len(self._free)} free")
        taken = [self._free.popleft() for _ in range(count)]
        self._held.update(taken)
        return taken

    def free(self, page_ids: Sequence[int]) -> None:
        """Give pages back; they are handed out again after all others.

        Raises:
            ValueError: If a page is not held, or listed twice; none is given back then.
        """
        given = set(page_ids)
        if len(given) < len(page_ids) or not given <= self._held:
            wrong = sorted(given - self._held)
            fault = f"not held: {wrong}" if wrong else f"listed twice in {list(page_ids)}"
            raise ValueError(f"page allocator: cannot free pages {fault}")
        self._held -= given
        self._free.extend(page_ids)
