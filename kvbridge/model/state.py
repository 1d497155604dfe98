"""State layers: Mamba 1, Mamba 2 and gated delta net.

A block of such a layer holds the state of one sequence: the last inputs of a causal convolution,
cut into pieces of different width, and the recurrent (*temporal*) state. Each piece is sharded by
itself, so each is a component by itself; a flat cut of the whole would take the wrong channels
(report B04).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model.arrays import ArrayView, view_of
from kvbridge.model.cache import CacheComponent, LayerCache

ConvOrder = Literal["channels_first", "tokens_first"]


@dataclass(frozen=True, slots=True)
class StatePiece:
    """One piece of a state that is sharded by itself.

    Attributes:
        name: ``"x"``, ``"b"``, ``"c"``, ``"q"``, ``"k"``, ``"v"``, ...
        unit_start: Global index of the first unit (channel) held.
        unit_count: Units held.
        unit_total: Units of the whole model; a rank that holds all is a replica.
    """

    name: str
    unit_start: int
    unit_count: int
    unit_total: int


@dataclass(frozen=True, slots=True)
class MambaConvSplitInfo:
    """How the convolution state of one rank is cut, in the numbers that engines know.

    Attributes:
        piece_widths: Channels of each piece on this rank, in their order in memory.
        conv_rows: Inputs that the convolution remembers.
        item_bytes: Bytes of one element of the convolution state.
        ssm_bytes: Bytes of the temporal state.

    Source: vLLM ``MambaConvSplitInfo``; report B04.
    """

    piece_widths: tuple[int, ...]
    conv_rows: int
    item_bytes: int
    ssm_bytes: int

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """Bytes of each piece."""
        return tuple(width * self.conv_rows * self.item_bytes for width in self.piece_widths)

    @property
    def piece_offsets(self) -> tuple[int, ...]:
        """Where each piece starts in a state whose channels come first."""
        return tuple(sum(self.piece_bytes[:i]) for i in range(len(self.piece_widths)))

    @property
    def ssm_sizes(self) -> tuple[int, int]:
        """Bytes of the convolution state and of the temporal state."""
        return (sum(self.piece_bytes), self.ssm_bytes)


def compute_physical_blocks_per_logical(ssm_sizes: Sequence[int], block_len: int) -> int:
    """Return how many attention pages hold one state, where both share memory.

    Args:
        ssm_sizes: Bytes of the convolution state and of the temporal state.
        block_len: Bytes of an attention page.

    Raises:
        UnsupportedLayoutError: A size is negative, or the page has no bytes.

    Source: vLLM ``compute_physical_blocks_per_logical``.
    """
    if block_len < 1 or min(ssm_sizes, default=0) < 0:
        raise UnsupportedLayoutError(
            f"state sizes {tuple(ssm_sizes)} must be >= 0 and block_len {block_len} >= 1"
        )
    return math.ceil(sum(ssm_sizes) / block_len)


def mamba_layer(
    conv: Any,
    ssm: Any,
    *,
    layer: int,
    name: str,
    group: int = 0,
    conv_pieces: Sequence[StatePiece],
    ssm_piece: StatePiece,
    conv_order: ConvOrder = "channels_first",
) -> LayerCache:
    """Describe the state of one Mamba or gated-delta-net layer.

    Mamba 1 has one convolution piece, Mamba 2 has x, B and C, a gated delta net Q, K and V. Each
    says which of its channels this rank holds: B and C of a single group, for instance, are held
    by every rank as a whole.

    Shape: conv [blocks, channels, rows], or [blocks, rows, channels] with ``tokens_first``;
    ssm [blocks, units, ...].

    Args:
        conv: Convolution states.
        ssm: Temporal states.
        layer: Global index of the layer.
        name: Name of the layer, the same in every engine that runs the model.
        group: Index of the cache group, of kind ``"state"``.
        conv_pieces: The pieces of the channels axis, in their order in memory.
        ssm_piece: Which units (heads, or channels) of the temporal state are held.
        conv_order: Whether channels or rows come first.

    Raises:
        UnsupportedLayoutError: The pieces do not add up to the tensors, the tensors do not share
            their blocks, or something is not contiguous.
    """
    conv_view, ssm_view = view_of(conv), view_of(ssm)
    base = min(conv_view.address, ssm_view.address)
    blocks = (conv_view.strides[0], conv_view.shape[0])
    if blocks != (ssm_view.strides[0], ssm_view.shape[0]):
        raise UnsupportedLayoutError(
            f"layer {name!r}: (stride, number) of blocks is {blocks} of the convolution and "
            f"{(ssm_view.strides[0], ssm_view.shape[0])} of the temporal state; both must be views "
            "of one buffer in which a block holds the two, so that one stride leads from block to "
            "block of either"
        )
    components = (
        *_conv_components(conv_view, name, conv_pieces, conv_order, conv_view.address - base),
        _ssm_component(ssm_view, name, ssm_piece, ssm_view.address - base),
    )
    return LayerCache(layer, name, group, base, *blocks, components)


def _conv_components(
    view: ArrayView, name: str, pieces: Sequence[StatePiece], order: ConvOrder, offset: int
) -> tuple[CacheComponent, ...]:
    if order not in ("channels_first", "tokens_first") or len(view.shape) != 3:
        raise UnsupportedLayoutError(
            f"layer {name!r}: a convolution state has 3 axes in order channels_first or "
            f"tokens_first, got shape {view.shape} and {order!r}"
        )
    channels, rows = (1, 2) if order == "channels_first" else (2, 1)
    widths = sum(piece.unit_count for piece in pieces)
    if widths != view.shape[channels]:
        raise UnsupportedLayoutError(
            f"layer {name!r}: pieces {[(p.name, p.unit_count) for p in pieces]} have {widths} "
            f"channels, the convolution state has {view.shape[channels]}"
        )
    components = []
    for piece in pieces:
        components.append(
            CacheComponent(
                name=f"conv.{piece.name}",
                dtype=view.dtype,
                offset=offset,
                cell_bytes=view.item_bytes,
                unit_start=piece.unit_start,
                unit_count=piece.unit_count,
                unit_total=piece.unit_total,
                unit_stride=view.strides[channels],
                token_count=view.shape[rows],
                token_stride=view.strides[rows],
            )
        )
        offset += piece.unit_count * view.strides[channels]
    return tuple(components)


def _ssm_component(view: ArrayView, name: str, piece: StatePiece, offset: int) -> CacheComponent:
    if len(view.shape) < 2 or view.shape[1] != piece.unit_count:
        raise UnsupportedLayoutError(
            f"layer {name!r}: the temporal state has shape {view.shape}, its second axis must be "
            f"the {piece.unit_count} units held"
        )
    unit = view.item_bytes
    for size, stride in zip(view.shape[:1:-1], view.strides[:1:-1], strict=True):
        if size > 1 and stride != unit:
            raise UnsupportedLayoutError(
                f"layer {name!r}: a unit of the temporal state has strides {view.strides[2:]}; "
                "it must be contiguous"
            )
        unit *= size
    return CacheComponent(
        name="ssm",
        dtype=view.dtype,
        offset=offset,
        cell_bytes=unit,
        unit_start=piece.unit_start,
        unit_count=piece.unit_count,
        unit_total=piece.unit_total,
        unit_stride=view.strides[1],
        token_count=1,
        token_stride=unit,
    )
