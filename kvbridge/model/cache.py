"""What one rank of an engine holds: components in pages, pages in layers, layers in a rank.

A rank *announces* the units (KV heads, channels) and layers it holds, so nothing about another
engine's sharding is ever assumed from its sizes.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model.memory import Region

WINDOW_KINDS = ("sliding_window", "chunked")
GROUP_KINDS = ("attention", *WINDOW_KINDS, "mla", "state")

LayerKey = tuple[int, str]
Rank = tuple[int, int]
"""Coordinate ``(pp_rank, tp_rank)`` in an engine."""


@dataclass(frozen=True, slots=True)
class CacheComponent:
    """One tensor inside a page: a grid of cells, shard unit x token.

    The cell of unit ``u`` (global index) and token ``t`` (within the page) starts at
    ``offset + (u - unit_start) * unit_stride + t * token_stride`` bytes from the page.

    Attributes:
        name: ``"kv"``, ``"k"``, ``"v"``, ``"latent"``, ``"conv.x"``, ``"ssm"``, ``"k_scale"``, ...
            ``k`` and ``v`` are the two parts, in this order, of every cell of ``kv``.
        dtype: Element type, such as ``"bfloat16"``; compared, never converted.
        offset: Byte offset of the first cell from the page's base; may lie beyond the page stride
            where K and V have regions of their own.
        cell_bytes: Contiguous bytes of one cell.
        unit_start: Global index of the first unit held.
        unit_count: Number of units held.
        unit_total: Number of units of the whole model; a replica holds all.
        unit_stride: Bytes between neighbouring units.
        token_count: Tokens per page; 1 for state and for pages without a token axis.
        token_stride: Bytes between neighbouring tokens.

    Raises:
        UnsupportedLayoutError: The numbers describe no grid, or its cells overlap.
    """

    name: str
    dtype: str
    offset: int
    cell_bytes: int
    unit_start: int
    unit_count: int
    unit_total: int
    unit_stride: int
    token_count: int
    token_stride: int

    def __post_init__(self) -> None:
        """Refuse grids that no tensor can have."""
        if (
            min(self.cell_bytes, self.unit_count, self.token_count) < 1
            or min(self.offset, self.unit_stride, self.token_stride) < 0
        ):
            raise UnsupportedLayoutError(
                f"component {self.name!r}: cell_bytes {self.cell_bytes}, unit_count "
                f"{self.unit_count} and token_count {self.token_count} must be >= 1, offset "
                f"{self.offset}, unit_stride {self.unit_stride} and token_stride "
                f"{self.token_stride} >= 0"
            )
        if self.unit_start < 0 or self.unit_end > self.unit_total:
            raise UnsupportedLayoutError(
                f"component {self.name!r} holds units [{self.unit_start}, {self.unit_end}) of "
                f"{self.unit_total}; the shard must lie within the total"
            )
        span_of((self.unit_count, self.unit_stride), (self.token_count, self.token_stride),
                cell_bytes=self.cell_bytes, what=f"component {self.name!r}")  # fmt: skip

    @property
    def unit_end(self) -> int:
        """One past the last unit held."""
        return self.unit_start + self.unit_count

    @property
    def steps(self) -> tuple[Any, ...]:
        """All of the component but its offset, which may depend on the number of pages."""
        return (
            self.name,
            self.dtype,
            self.cell_bytes,
            self.unit_start,
            self.unit_count,
            self.unit_total,
            self.unit_stride,
            self.token_count,
            self.token_stride,
        )

    @property
    def span(self) -> int:
        """Bytes from the first cell's first byte to one past the last cell's last."""
        return (
            (self.unit_count - 1) * self.unit_stride
            + (self.token_count - 1) * self.token_stride
            + self.cell_bytes
        )


def span_of(*axes: tuple[int, int], cell_bytes: int, what: str) -> int:
    """Return the span of a strided grid, after checking that its cells do not overlap.

    Args:
        axes: ``(count, stride in bytes)`` of each axis, in any order.
        cell_bytes: Bytes of one cell.
        what: What the grid is, for the error message.

    Raises:
        UnsupportedLayoutError: A stride is smaller than what it steps over.
    """
    span = cell_bytes
    for count, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if stride < span:
            raise UnsupportedLayoutError(
                f"{what}: a stride of {stride} bytes steps over {span} bytes, so cells overlap; "
                "strides must be at least as large as what they step over"
            )
        span += (count - 1) * stride
    return span


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The pages of one layer.

    Attributes:
        layer: Global index of the layer in the model.
        name: Name of the layer, equal in every engine that runs the model.
        group: Index of its cache group within the rank.
        base_address: Address of page 0; page ``i`` starts at ``base_address + i * page_stride``.
        page_stride: Bytes between neighbouring pages.
        page_count: Number of pages.
        components: The tensors inside a page.

    Raises:
        UnsupportedLayoutError: No components, two of one name, or pages that overlap.
    """

    layer: int
    name: str
    group: int
    base_address: int
    page_stride: int
    page_count: int
    components: tuple[CacheComponent, ...]

    def __post_init__(self) -> None:
        """Refuse layers whose pages are no pages."""
        _keep_tuples(self, "components")
        what = f"layer {self.layer} {self.name!r}"
        if self.layer < 0 or self.group < 0 or self.base_address < 0 or self.page_count < 1:
            raise UnsupportedLayoutError(
                f"{what}: layer, group {self.group} and base_address {self.base_address} must be "
                f">= 0, page_count {self.page_count} >= 1"
            )
        if self.page_stride < 1:
            raise UnsupportedLayoutError(f"{what}: page_stride {self.page_stride} must be >= 1")
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise UnsupportedLayoutError(
                f"{what}: components {names} must be one or more of different names"
            )
        for c in self.components:
            span_of((c.unit_count, c.unit_stride), (c.token_count, c.token_stride),
                    (self.page_count, self.page_stride),
                    cell_bytes=c.cell_bytes, what=f"{what}, component {c.name!r}")  # fmt: skip

    @property
    def key(self) -> LayerKey:
        """What pairs this layer with the same layer elsewhere: global index and name."""
        return (self.layer, self.name)

    def extent(self, component: CacheComponent) -> tuple[int, int]:
        """Return the address range that a component's cells occupy over all pages."""
        start = self.base_address + component.offset
        return start, start + (self.page_count - 1) * self.page_stride + component.span


def _keep_tuples(value: object, *names: str) -> None:
    """Turn lists into tuples, so that the value can be hashed and nobody changes it later."""
    for name in names:
        if isinstance(getattr(value, name), list):
            object.__setattr__(value, name, tuple(getattr(value, name)))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table.

    Attributes:
        kind: ``"attention"``, ``"sliding_window"``, ``"chunked"``, ``"mla"`` or ``"state"``.
        block_tokens: Tokens of one logical block, the unit of the block table. Where ranks share
            out the tokens of a sequence, those of its own that a rank keeps in a block.
        pages_per_block: Kernel pages that one logical block is made of.
        window_tokens: Tokens that a window or chunk keeps, or None for all; only for those kinds.

    Raises:
        UnsupportedLayoutError: An unknown kind, a size below 1 or that is no whole number, or a
            window of a kind that has none.
    """

    kind: str
    block_tokens: int
    pages_per_block: int = 1
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse unknown kinds and impossible sizes."""
        if self.kind not in GROUP_KINDS:
            raise UnsupportedLayoutError(
                f"cache group kind {self.kind!r} is unknown; known: {', '.join(GROUP_KINDS)}"
            )
        try:
            for name in ("block_tokens", "pages_per_block", "window_tokens"):
                value = getattr(self, name)
                if type(value) is not int and value is not None:
                    object.__setattr__(self, name, index(value))
        except TypeError:
            raise UnsupportedLayoutError(
                f"cache group {self.kind!r}: {name} is {value!r}; it must be a whole number"
            ) from None
        if self.block_tokens < 1 or self.pages_per_block < 1:
            raise UnsupportedLayoutError(
                f"cache group {self.kind!r}: block_tokens {self.block_tokens} and "
                f"pages_per_block {self.pages_per_block} must be >= 1"
            )
        if self.window_tokens is not None and self.window_tokens < 1:
            raise UnsupportedLayoutError(
                f"cache group {self.kind!r}: window_tokens {self.window_tokens} must be >= 1"
            )
        if self.window_tokens is not None and self.kind not in WINDOW_KINDS:
            raise UnsupportedLayoutError(
                f"cache group {self.kind!r} has window_tokens {self.window_tokens}, which only "
                f"{' and '.join(WINDOW_KINDS)} have; leave it out, or choose one of those kinds"
            )


class Geometry:
    """What caches of one shape have in common; equal shapes are one object.

    Comparing two ranks' caches then takes no longer than comparing two pointers, however many
    layers they have.
    """

    __slots__ = ("__weakref__", "_content")

    _known: ClassVar["WeakValueDictionary[tuple[Any, ...], Geometry]"] = WeakValueDictionary()

    def __init__(self, content: tuple[Any, ...]) -> None:
        """Keep the content, which is what is looked up by."""
        self._content = content

    @classmethod
    def of(cls, content: tuple[Any, ...]) -> "Geometry":
        """Return the one object for some content."""
        return cls._known.setdefault(content, cls(content))


class _HasGeometry:
    """A slot beside the fields of a value, which is no part of it."""

    __slots__ = ("_geometry",)
    _geometry: Geometry


@dataclass(frozen=True, slots=True)
class RankCache(_HasGeometry):
    """Everything that one rank holds, and the memory it lies in.

    Attributes:
        engine_id: The engine that the rank belongs to.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank within the stage.
        layers: The layers of this stage.
        groups: The cache groups that the layers name by index.
        regions: The memory to register; holds every cell of every layer.
        dcp_rank: Decode-context-parallel rank.
        dcp_size: Ranks that share out the tokens of a sequence.
        dcp_interleave_tokens: Tokens that stay together in that round-robin.

    Raises:
        UnsupportedLayoutError: A layer is listed twice, names a missing group, disagrees with its
            group's block size, or reaches outside the regions.
    """

    engine_id: str
    pp_rank: int
    tp_rank: int
    layers: tuple[LayerCache, ...]
    groups: tuple[CacheGroup, ...]
    regions: tuple[Region, ...]
    dcp_rank: int = 0
    dcp_size: int = 1
    dcp_interleave_tokens: int = 1

    def __post_init__(self) -> None:
        """Refuse caches that contradict themselves."""
        _keep_tuples(self, "layers", "groups", "regions")
        if min(self.pp_rank, self.tp_rank) < 0:
            raise UnsupportedLayoutError(
                f"rank ({self.pp_rank}, {self.tp_rank}) of engine {self.engine_id!r} is negative"
            )
        if not 0 <= self.dcp_rank < self.dcp_size or self.dcp_interleave_tokens < 1:
            raise UnsupportedLayoutError(
                f"{self.where}: dcp_rank {self.dcp_rank} must be in [0, dcp_size "
                f"{self.dcp_size}), dcp_interleave_tokens {self.dcp_interleave_tokens} >= 1"
            )
        seen: set[LayerKey] = set()
        for layer in self.layers:
            if layer.key in seen:
                raise UnsupportedLayoutError(f"{self.where}: layer {layer.key} is listed twice")
            seen.add(layer.key)
            self._check_group(layer)
        self._check_bounds()
        self.geometry  # noqa: B018 - worked out here, so that planning need not

    @property
    def geometry(self) -> Geometry:
        """All of the cache but where its pages lie, how many there are, and whose it is."""
        try:
            return self._geometry
        except AttributeError:
            layers = tuple(
                (
                    layer.layer,
                    layer.name,
                    layer.group,
                    layer.page_stride,
                    tuple(component.steps for component in layer.components),
                )
                for layer in self.layers
            )
            tokens = (self.dcp_rank, self.dcp_size, self.dcp_interleave_tokens)
            geometry = Geometry.of((self.rank, layers, self.groups, tokens))
            object.__setattr__(self, "_geometry", geometry)
            return geometry

    @property
    def rank(self) -> Rank:
        """Coordinate of the rank."""
        return (self.pp_rank, self.tp_rank)

    @property
    def where(self) -> str:
        """The rank in words, for messages."""
        return f"engine {self.engine_id!r} rank (pp {self.pp_rank}, tp {self.tp_rank})"

    def _check_group(self, layer: LayerCache) -> None:
        if layer.group >= len(self.groups):
            raise UnsupportedLayoutError(
                f"{self.where}: layer {layer.key} names cache group {layer.group}, "
                f"there are {len(self.groups)}"
            )
        group = self.groups[layer.group]
        if group.kind == "state":
            return
        if group.block_tokens % group.pages_per_block:
            raise UnsupportedLayoutError(
                f"{self.where}: cache group {layer.group} has {group.block_tokens} tokens a block "
                f"in {group.pages_per_block} pages; each page must hold the same number"
            )
        for component in layer.components:
            tokens = group.pages_per_block * component.token_count
            if component.token_count > 1 and tokens != group.block_tokens:
                raise UnsupportedLayoutError(
                    f"{self.where}: layer {layer.key} component {component.name!r} holds "
                    f"{component.token_count} tokens a page, {group.pages_per_block} pages a "
                    f"block, but its group has {group.block_tokens} tokens a block"
                )

    def _check_bounds(self) -> None:
        regions = sorted(self.regions, key=lambda region: region.address)
        starts = [region.address for region in regions]
        for layer, component, start, end in _extents(self.layers):
            at = bisect.bisect_right(starts, start) - 1
            if at < 0 or end > regions[at].end:
                raise UnsupportedLayoutError(
                    f"{self.where}: layer {layer.key} component {component.name!r} occupies "
                    f"[{start:#x}, {end:#x}), which no single region of {len(regions)} holds; "
                    "list the memory that the cache lies in as regions"
                )


def _extents(
    layers: Sequence[LayerCache],
) -> Iterator[tuple[LayerCache, CacheComponent, int, int]]:
    for layer in layers:
        for component in layer.components:
            yield (layer, component, *layer.extent(component))
