"""The layers of one rank on paper: invented tensors, described by the builders that engines use."""

from typing import Any

from kvbridge.cli.model_files import (
    ITEM_BYTES,
    Attention,
    GatedDeltaNet,
    Latent,
    LayerKind,
    Mamba2,
)
from kvbridge.cli.shapes import PaperShape
from kvbridge.demo.shape import head_range
from kvbridge.errors import ConfigError
from kvbridge.model import LayerCache, StatePiece, attention_layer, mamba_layer, mla_layer

BASE = 1 << 32
# Tensors that touch would be merged across layers; real ones are allocated one by one.
_GAP = 1 << 12


class _Name:
    """An element type that numpy does not know."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Tensor:
    """What the builders of layers ask of a tensor: address, shape, strides, dtype."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
    ) -> None:
        self.dtype = _Name(dtype)
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{ITEM_BYTES[dtype]}",
            "version": 3,
        }


class PaperRank:
    """The memory of one rank, as far as it has been laid out.

    Attributes:
        end: One past the last byte of the last tensor.
    """

    def __init__(self, shape: PaperShape, tp: int, dtype: str, blocks: int) -> None:
        self._shape, self._tp, self._dtype, self._blocks = shape, tp, dtype, blocks
        self.end = BASE

    def _share(self, units: int) -> range:
        return head_range(units, self._shape.tp, self._tp)

    def _tensors(self, *shapes: tuple[int, ...]) -> tuple[_Tensor, ...]:
        """Allocate tensors of pages, those of one page side by side. Shape: [pages, ...] each."""
        item = ITEM_BYTES[self._dtype]
        steps = []
        for shape in shapes:
            stride = [item]
            for size in shape[:0:-1]:
                stride.insert(0, stride[0] * size)
            steps.append(stride)
        page = sum(stride[0] for stride in steps)
        address, made = self.end + _GAP, []
        for shape, stride in zip(shapes, steps, strict=True):
            made.append(_Tensor(address, shape, (page, *stride[1:]), self._dtype))
            address += stride[0]
        self.end += _GAP + shapes[0][0] * page
        return tuple(made)

    def layer(self, kind: LayerKind, layer: int, group: int) -> LayerCache:
        """Lay out one layer."""
        name = f"layers.{layer}"
        pages = self._blocks * self._shape.pages_per_block
        page_tokens = self._shape.page // self._shape.pages_per_block
        if isinstance(kind, Attention):
            return self._attention(kind, (pages, page_tokens), layer, group)
        if isinstance(kind, Latent):
            (tensor,) = self._tensors((pages, page_tokens, kind.latent_dim + kind.rope_dim))
            return mla_layer(tensor, layer=layer, name=name, group=group)
        if isinstance(kind, GatedDeltaNet):
            heads = {"q": kind.key_heads, "k": kind.key_heads, "v": kind.value_heads}
            widths = {"q": kind.key_head_dim, "k": kind.key_head_dim, "v": kind.value_head_dim}
            state = (kind.value_heads, kind.key_head_dim, kind.value_head_dim)
        elif isinstance(kind, Mamba2):
            heads = {"x": kind.heads, "b": kind.groups, "c": kind.groups}
            widths = {"x": kind.head_dim, "b": kind.state_size, "c": kind.state_size}
            state = (kind.heads, kind.head_dim, kind.state_size)
        else:
            raise ConfigError(f"layer {layer} of kind {kind} caches nothing")
        pieces = [_piece(p, self._share(heads[p]), widths[p], heads[p]) for p in heads]
        held = self._share(state[0])
        conv, ssm = self._tensors(
            (self._blocks, sum(piece.unit_count for piece in pieces), kind.conv_kernel - 1),
            (self._blocks, len(held), *state[1:]),
        )
        return mamba_layer(
            conv, ssm, layer=layer, name=name, group=group, conv_pieces=pieces,
            ssm_piece=StatePiece("ssm", held.start, len(held), state[0]),
        )  # fmt: skip

    def _attention(
        self, kind: Attention, pages: tuple[int, int], layer: int, group: int
    ) -> LayerCache:
        heads = self._share(kind.kv_heads)
        inner = {"nhd": "NHC", "hnd": "HNC"}[self._shape.layout]
        sizes = {"N": pages[1], "H": len(heads), "C": kind.head_dim}
        cells = tuple(sizes[axis] for axis in inner)
        tensor: Any
        if self._shape.kv == "together":
            (tensor,) = self._tensors((pages[0], 2, *cells))
        else:
            tensor = tuple(self._tensors((pages[0], *cells))[0] for _ in "kv")
        return attention_layer(
            tensor,
            axes=f"BK{inner}" if self._shape.kv == "together" else f"B{inner}",
            layer=layer,
            name=f"layers.{layer}",
            group=group,
            unit_start=heads.start,
            unit_total=kind.kv_heads,
        )


def _piece(name: str, heads: range, width: int, total: int) -> StatePiece:
    return StatePiece(name, heads.start * width, len(heads) * width, total * width)
