"""Builders: from an engine's tensors to the layers that a rank announces."""

from typing import Any, NamedTuple

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model.arrays import ArrayView, view_of
from kvbridge.model.cache import CacheComponent, LayerCache

AXES = {
    "B": "block",
    "K": "K/V pair",
    "H": "head",
    "N": "token",
    "C": "content",
}


def attention_layer(
    tensor: Any,
    *,
    axes: str,
    layer: int,
    name: str,
    group: int = 0,
    unit_start: int,
    unit_total: int,
) -> LayerCache:
    """Describe the attention cache of one layer.

    Without a K axis the content holds K then V of a head and token (one component, ``kv``). With
    one, K and V are components of their own, unless the K axis lies right outside the content,
    where each cell again holds K then V. K and V in tensors of their own are given as a pair.

    Args:
        tensor: The cache, or a pair ``(k, v)`` of caches, of pages.
        axes: What each axis of the tensor is, in order: B block, K the K/V pair, H head, N token,
            C content; ``"BHNC"``, ``"KBNHC"``, ...
        layer: Global index of the layer.
        name: Name of the layer, the same in every engine that runs the model.
        group: Index of the cache group.
        unit_start: Global index of the first KV head held.
        unit_total: KV heads of the whole model.

    Raises:
        UnsupportedLayoutError: The axes do not spell the tensor, the content is not contiguous,
            or K and V differ in more than their content, or overlap.
    """
    if isinstance(tensor, tuple | list):
        spelled = tuple(_Spelled(view_of(t), axes, name) for t in tensor)
        base, pages, parts = _apart(spelled, name)
    else:
        spelled = (_Spelled(view_of(tensor), axes, name),)
        base, pages, parts = _together(spelled[0], name)
    _check_apart(parts, name)
    components = tuple(
        CacheComponent(
            name=part.name,
            dtype=part.of.view.dtype,
            offset=part.offset,
            cell_bytes=part.cell_bytes,
            unit_start=unit_start,
            unit_count=part.of.size.get("H", 1),
            unit_total=unit_total,
            unit_stride=part.of.stride.get("H", part.cell_bytes),
            token_count=part.of.size["N"],
            token_stride=part.of.stride["N"],
        )
        for part in parts
    )
    return LayerCache(layer, name, group, base, *pages, components)


def mla_layer(
    tensor: Any,
    *,
    axes: str = "BNC",
    layer: int,
    name: str,
    group: int = 0,
    component: str = "latent",
) -> LayerCache:
    """Describe a cache that every rank holds whole, such as the latent vectors of MLA.

    Args:
        tensor: The cache of pages.
        axes: What each axis of the tensor is, in order: B block, N token, C content.
        layer: Global index of the layer.
        name: Name of the layer, the same in every engine that runs the model.
        group: Index of the cache group.
        component: What the cache holds.

    Raises:
        UnsupportedLayoutError: The axes do not spell the tensor, or its content is not contiguous.
    """
    spelled = _Spelled(view_of(tensor), axes, name)
    if set(axes) != set("BNC"):
        raise UnsupportedLayoutError(
            f"layer {name!r}: a cache without heads has axes B, N and C, got {axes!r}"
        )
    whole = CacheComponent(
        name=component,
        dtype=spelled.view.dtype,
        offset=0,
        cell_bytes=spelled.content_bytes,
        unit_start=0,
        unit_count=1,
        unit_total=1,
        unit_stride=spelled.content_bytes,
        token_count=spelled.size["N"],
        token_stride=spelled.stride["N"],
    )
    return LayerCache(layer, name, group, spelled.view.address, *spelled.pages, (whole,))


def opaque_layer(
    tensor: Any,
    *,
    layer: int,
    name: str,
    group: int = 0,
    component: str = "opaque",
    unit_start: int = 0,
    unit_count: int | None = None,
    unit_total: int = 1,
) -> LayerCache:
    """Describe pages whose inside is nobody's business: they are copied whole, or not at all.

    Both engines must cut the sequence into pages alike. Ranks may share a page out: its second axis
    is then one of units, such as heads, and each of them is copied whole. Without, the ranks of
    both engines must have the same shares.

    Shape: tensor [pages, ...], each page contiguous; or [pages, unit_count, ...], each unit is.

    Args:
        tensor: The cache of pages.
        layer: Global index of the layer.
        name: Name of the layer, the same in every engine that runs the model.
        group: Index of the cache group.
        component: What the pages hold; equal names must mean equal formats.
        unit_start: The first of the model's units that this rank holds.
        unit_count: How many it holds, along the second axis; None if a page is one unit.
        unit_total: How many there are; 1 where every rank holds the same.

    Raises:
        UnsupportedLayoutError: A page, or a unit of it, is not contiguous; or the second axis has
            another size.
    """
    view = view_of(tensor)
    if unit_count is not None and (len(view.shape) < 2 or view.shape[1] != unit_count):
        raise UnsupportedLayoutError(
            f"layer {name!r}: pages have shape {view.shape[1:]}, their first axis must be the "
            f"{unit_count} units held"
        )
    outer, what = (1, "page") if unit_count is None else (2, "unit")
    nbytes = view.item_bytes
    for size, stride in zip(
        view.shape[: outer - 1 : -1], view.strides[: outer - 1 : -1], strict=True
    ):
        if size > 1 and stride != nbytes:
            raise UnsupportedLayoutError(
                f"layer {name!r}: a {what} has shape {view.shape[outer:]} and strides "
                f"{view.strides[outer:]}; an opaque {what} must be contiguous"
            )
        nbytes *= size
    page = CacheComponent(
        name=component,
        dtype=view.dtype,
        offset=0,
        cell_bytes=nbytes,
        unit_start=unit_start,
        unit_count=unit_count or 1,
        unit_total=unit_total,
        unit_stride=nbytes if unit_count is None else view.strides[1],
        token_count=1,
        token_stride=nbytes,
    )
    return LayerCache(layer, name, group, view.address, view.strides[0], view.shape[0], (page,))


class _Spelled:
    """A tensor whose axes have been named.

    Attributes:
        size: Size of each axis, by its letter.
        stride: Bytes between neighbours along each axis, by its letter.
        content_bytes: Bytes of the content axis, which is contiguous.
    """

    def __init__(self, view: ArrayView, axes: str, name: str) -> None:
        if len(set(axes)) != len(axes) or not set("BNC") <= set(axes) <= set(AXES):
            legend = ", ".join(f"{letter} {meaning}" for letter, meaning in AXES.items())
            raise UnsupportedLayoutError(
                f"layer {name!r}: axes {axes!r} must name B, N and C, may name H and K, each once "
                f"({legend})"
            )
        if len(axes) != len(view.shape):
            raise UnsupportedLayoutError(
                f"layer {name!r}: axes {axes!r} name {len(axes)} axes, the tensor has shape "
                f"{view.shape}"
            )
        self.view, self.axes = view, axes
        self.size = dict(zip(axes, view.shape, strict=True))
        self.stride = dict(zip(axes, view.strides, strict=True))
        if self.size["C"] > 1 and self.stride["C"] != view.item_bytes:
            raise UnsupportedLayoutError(
                f"layer {name!r}: content has a stride of {self.stride['C']} bytes, elements have "
                f"{view.item_bytes}; the content of a cell must be contiguous"
            )
        self.content_bytes = self.size["C"] * view.item_bytes

    @property
    def pages(self) -> tuple[int, int]:
        """Stride and number of pages."""
        return (self.stride["B"], self.size["B"])


class _Part(NamedTuple):
    name: str
    of: _Spelled
    offset: int
    cell_bytes: int


_Layout = tuple[int, tuple[int, int], list[_Part]]
"""Base address, (stride, number) of pages, and the parts of a page."""


def _together(tensor: _Spelled, name: str) -> _Layout:
    content = tensor.content_bytes
    if "K" not in tensor.size:
        parts = [_Part("kv", tensor, 0, content)]
    elif tensor.size["K"] != 2:
        raise UnsupportedLayoutError(
            f"layer {name!r}: axis K of {tensor.axes!r} has size {tensor.size['K']}, K and V need 2"
        )
    elif tensor.stride["K"] == content:
        parts = [_Part("kv", tensor, 0, 2 * content)]
    else:
        parts = [_Part("k", tensor, 0, content), _Part("v", tensor, tensor.stride["K"], content)]
    return tensor.view.address, tensor.pages, parts


def _apart(tensors: tuple[_Spelled, ...], name: str) -> _Layout:
    if len(tensors) != 2 or "K" in tensors[0].size:
        raise UnsupportedLayoutError(
            f"layer {name!r}: K and V apart are a pair of tensors without an axis K, "
            f"got {len(tensors)} tensors with axes {tensors[0].axes if tensors else ''!r}"
        )
    k, v = tensors
    if k.pages != v.pages:
        raise UnsupportedLayoutError(
            f"layer {name!r}: K has (page stride, pages) {k.pages}, V has {v.pages}; "
            "one block table serves both, so they must be equal"
        )
    base = min(k.view.address, v.view.address)
    parts = [
        _Part(p, t, t.view.address - base, t.content_bytes)
        for p, t in zip("kv", tensors, strict=True)
    ]
    return base, k.pages, parts


def _check_apart(parts: list[_Part], name: str) -> None:
    """Refuse K and V that step through memory alike and meet, such as one tensor given twice."""
    if len(parts) < 2:
        return
    k, v = parts
    axes = [sorted(((p.of.stride[a], p.of.size[a]) for a in p.of.axes if a in "BHN"), reverse=True)
            for p in parts]  # fmt: skip
    if axes[0] == axes[1] and _meet(v.offset - k.offset, axes[0], k.cell_bytes, v.cell_bytes):
        raise UnsupportedLayoutError(
            f"layer {name!r}: K and V overlap, V begins {v.offset - k.offset} bytes behind K; give "
            "each its own memory"
        )


def _meet(distance: int, axes: list[tuple[int, int]], before: int, behind: int) -> bool:
    """Whether a grid of cells and the same grid some bytes further on have bytes in common.

    Args:
        distance: How many bytes further on.
        axes: ``(stride, count)`` of each axis, the largest stride first.
        before: Bytes of the first grid's cells.
        behind: Bytes of the second grid's cells.
    """
    if not axes:
        return -behind < distance < before
    (stride, count), *inner = axes
    if count == 1:
        return _meet(distance, inner, before, behind)
    # What the inner axes span is at most a stride, so only the two nearest steps come close.
    return any(
        abs(step) < count and _meet(distance - step * stride, inner, before, behind)
        for step in (distance // stride, distance // stride + 1)
    )
