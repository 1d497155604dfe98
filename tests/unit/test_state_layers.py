"""Builders of state, latent and opaque layers, with the numbers that the field works with."""

from typing import Any

import numpy as np
import pytest

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model import (
    CacheComponent,
    LayerCache,
    MambaConvSplitInfo,
    StatePiece,
    compute_physical_blocks_per_logical,
    mamba_layer,
    mla_layer,
    opaque_layer,
)

BLOCKS = 3
WIDTHS, ROWS = (8, 2, 2), 3
PIECES = [StatePiece("x", 0, 8, 16), StatePiece("b", 2, 2, 4), StatePiece("c", 0, 2, 2)]
SSM = StatePiece("ssm", 4, 4, 8)


def cells(layer: LayerCache) -> dict[str, CacheComponent]:
    return {component.name: component for component in layer.components}


# --- the field's own numbers ---------------------------------------------------------------------


def test_a_conv_state_is_cut_into_pieces() -> None:
    info = MambaConvSplitInfo(WIDTHS, conv_rows=3, item_bytes=2, ssm_bytes=512)
    assert info.piece_bytes == (48, 12, 12)
    assert info.piece_offsets == (0, 48, 60)
    assert info.ssm_sizes == (72, 512)
    other = MambaConvSplitInfo((4, 1, 1), conv_rows=3, item_bytes=2, ssm_bytes=256)
    assert other.piece_bytes == (24, 6, 6)
    assert other.ssm_sizes == (36, 256)


@pytest.mark.parametrize(
    ("ssm_sizes", "block_len", "pages"),
    [
        ((72, 512), 1000, 1),
        ((72, 512), 584, 1),
        ((72, 512), 583, 2),
        ((72, 512), 200, 3),
        ((72, 512), 1, 584),
        ((0, 0), 8, 0),
    ],
)
def test_pages_of_a_state_are_rounded_up(
    ssm_sizes: tuple[int, int], block_len: int, pages: int
) -> None:
    assert compute_physical_blocks_per_logical(ssm_sizes, block_len) == pages


@pytest.mark.parametrize(("ssm_sizes", "block_len"), [((72, 512), 0), ((-1, 512), 8)])
def test_pages_of_a_state_need_sizes(ssm_sizes: tuple[int, int], block_len: int) -> None:
    with pytest.raises(UnsupportedLayoutError, match=rf"must be >= 0 and block_len {block_len}"):
        compute_physical_blocks_per_logical(ssm_sizes, block_len)


# --- state ---------------------------------------------------------------------------------------


def state(*, tokens_first: bool = False, page: int = 1000) -> tuple[Any, Any]:
    """Return the two tensors of a state in pages of ``page`` bytes: 72 B of conv, 512 B of ssm."""
    pool = np.zeros((BLOCKS, page), np.uint8)
    conv = pool[:, :72].view(np.float16)
    shape = (BLOCKS, ROWS, 12) if tokens_first else (BLOCKS, 12, ROWS)
    return conv.reshape(shape), pool[:, 72:584].view(np.float32).reshape(BLOCKS, 4, 4, 8)


def mamba(conv: Any, ssm: Any, **changes: Any) -> LayerCache:
    arguments: dict[str, Any] = {"layer": 5, "name": "m", "group": 1}
    arguments |= {"conv_pieces": PIECES, "ssm_piece": SSM} | changes
    return mamba_layer(conv, ssm, **arguments)


def test_channels_first_pieces_lie_behind_each_other() -> None:
    conv, ssm = state()
    layer = mamba(conv, ssm)
    assert (layer.layer, layer.name, layer.group) == (5, "m", 1)
    assert layer.base_address == conv.ctypes.data
    assert (layer.page_stride, layer.page_count) == (1000, BLOCKS)
    assert layer.components == (
        CacheComponent("conv.x", "float16", 0, 2, 0, 8, 16, 6, 3, 2),
        CacheComponent("conv.b", "float16", 48, 2, 2, 2, 4, 6, 3, 2),
        CacheComponent("conv.c", "float16", 60, 2, 0, 2, 2, 6, 3, 2),
        CacheComponent("ssm", "float32", 72, 128, 4, 4, 8, 128, 1, 128),
    )
    info = MambaConvSplitInfo(WIDTHS, ROWS, 2, 512)
    assert tuple(c.offset for c in layer.components[:3]) == info.piece_offsets
    assert layer.components[3].offset == info.ssm_sizes[0]


def test_tokens_first_pieces_lie_beside_each_other() -> None:
    layer = mamba(*state(tokens_first=True), conv_order="tokens_first")
    assert layer.components[:3] == (
        CacheComponent("conv.x", "float16", 0, 2, 0, 8, 16, 2, 3, 24),
        CacheComponent("conv.b", "float16", 16, 2, 2, 2, 4, 2, 3, 24),
        CacheComponent("conv.c", "float16", 20, 2, 0, 2, 2, 2, 3, 24),
    )


def test_the_temporal_state_may_come_first_in_memory() -> None:
    pool = np.zeros((BLOCKS, 8), np.float32)
    ssm, conv = pool[:, :4].reshape(BLOCKS, 4, 1), pool[:, 4:].reshape(BLOCKS, 1, 4)
    layer = mamba(conv, ssm, conv_pieces=[StatePiece("x", 0, 1, 1)])
    assert layer.base_address == ssm.ctypes.data
    assert {name: c.offset for name, c in cells(layer).items()} == {"conv.x": 16, "ssm": 0}


def test_a_temporal_state_may_have_units_alone() -> None:
    pool = np.zeros((BLOCKS, 5), np.float32)
    layer = mamba(pool[:, :1, None], pool[:, 1:], conv_pieces=[StatePiece("x", 0, 1, 1)])
    assert cells(layer)["ssm"] == CacheComponent("ssm", "float32", 4, 4, 4, 4, 8, 4, 1, 4)


def test_units_of_the_temporal_state_may_be_padded() -> None:
    pool = np.zeros((BLOCKS, 4, 8), np.float32)
    layer = mamba(pool[:, :1, :1], pool[:, :, :6], conv_pieces=[StatePiece("x", 0, 1, 1)])
    ssm = cells(layer)["ssm"]
    assert (ssm.cell_bytes, ssm.unit_stride) == (24, 32)


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (state(), {"conv_pieces": PIECES[:2]}, r"'m': pieces .*\('b', 2\)\] have 10 .* has 12"),
        (state(), {"conv_order": "tokens_first"}, "12 channels, the convolution state has 3"),
        (state(), {"conv_order": "rows_first"}, "channels_first or tokens_first, got .*rows_first"),
        ((state()[0][:, 0], state()[1]), {}, r"has 3 axes .* got shape \(3, 3\)"),
        (state(), {"ssm_piece": StatePiece("ssm", 0, 3, 8)}, r"\(3, 4, 4, 8\).* the 3 units held"),
        ((state()[0], state()[1][:, :, :, ::2]), {}, r"unit .* strides \(32, 8\).*contiguous"),
        ((state()[0], state()[1][:, :, :2].swapaxes(2, 3)), {}, "must be contiguous"),
        ((state()[0], state()[1][:2]), {}, r"\(1000, 3\) of the convolution and \(1000, 2\) of"),
        ((state()[0], state(page=2000)[1]), {}, r"\(1000, 3\) of the convolution and \(2000, 3\)"),
        (([[1.0]], state()[1]), {}, "list has neither data_ptr"),
    ],
)
def test_states_that_cannot_be_described_are_refused(
    tensors: tuple[Any, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        mamba(*tensors, **changes)


def test_a_temporal_state_needs_units() -> None:
    flat = np.zeros(BLOCKS, np.float32)
    conv = np.zeros((BLOCKS, 1, 1), np.float32)
    with pytest.raises(UnsupportedLayoutError, match=r"has shape \(3,\), its second axis"):
        mamba(conv, flat, conv_pieces=[StatePiece("x", 0, 1, 1)])


# --- latents -------------------------------------------------------------------------------------


def test_a_latent_is_one_unit_that_every_rank_holds() -> None:
    cache = np.zeros((BLOCKS, 4, 6), np.float16)
    layer = mla_layer(cache, layer=2, name="l", group=1)
    assert layer == LayerCache(
        2, "l", 1, cache.ctypes.data, 48, BLOCKS,
        (CacheComponent("latent", "float16", 0, 12, 0, 1, 1, 12, 4, 12),),
    )  # fmt: skip


def test_a_latent_may_have_another_order_and_name() -> None:
    cache = np.zeros((4, BLOCKS, 6), np.float16)
    layer = mla_layer(cache, axes="NBC", layer=0, name="l", component="index_k")
    assert (layer.page_stride, layer.page_count) == (12, BLOCKS)
    (latent,) = layer.components
    assert latent.name == "index_k"
    assert (latent.token_count, latent.token_stride) == (4, 36)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((3, 4, 1, 6), "BNHC", "without heads has axes B, N and C, got 'BNHC'"),
        ((3, 4), "BN", "must name B, N and C"),
        ((3, 4, 6), "BBC", "each once"),
        ((3, 4, 6, 1), "BNC", r"name 3 axes, the tensor has shape \(3, 4, 6, 1\)"),
    ],
)
def test_latents_that_cannot_be_described_are_refused(
    shape: tuple[int, ...], axes: str, message: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        mla_layer(np.zeros(shape, np.float16), axes=axes, layer=0, name="l")


def test_the_content_of_a_latent_is_contiguous() -> None:
    with pytest.raises(UnsupportedLayoutError, match="stride of 4 bytes, elements have 2"):
        mla_layer(np.zeros((3, 4, 6), np.float16)[..., ::2], layer=0, name="l")


# --- opaque pages --------------------------------------------------------------------------------


def test_an_opaque_page_is_one_cell() -> None:
    cache = np.zeros((BLOCKS, 4, 6), np.uint8)
    layer = opaque_layer(cache, layer=2, name="o", group=1)
    assert layer == LayerCache(
        2, "o", 1, cache.ctypes.data, 24, BLOCKS,
        (CacheComponent("opaque", "uint8", 0, 24, 0, 1, 1, 24, 1, 24),),
    )  # fmt: skip


def test_opaque_pages_may_be_padded_and_shared_out() -> None:
    cache = np.zeros((BLOCKS, 32), np.uint8)[:, :20]
    layer = opaque_layer(cache, layer=0, name="o", component="nvfp4", unit_start=1, unit_total=2)
    assert layer.page_stride == 32
    assert layer.components == (CacheComponent("nvfp4", "uint8", 0, 20, 1, 1, 2, 20, 1, 20),)


def test_an_opaque_page_is_contiguous() -> None:
    cache = np.zeros((BLOCKS, 4, 6), np.uint8)
    with pytest.raises(UnsupportedLayoutError, match=r"strides \(6, 1\); an opaque page must be"):
        opaque_layer(cache[:, :, :5], layer=0, name="o")
    with pytest.raises(UnsupportedLayoutError, match="must be contiguous"):
        opaque_layer(cache[:, :, ::2], layer=0, name="o")
    assert opaque_layer(cache[:, :1, :5], layer=0, name="o").components[0].cell_bytes == 5


def test_states_in_buffers_of_their_own_are_told_how_to_lie() -> None:
    conv, ssm = np.zeros((4, 8, 3), np.float32), np.zeros((4, 2, 5), np.float32)
    with pytest.raises(
        UnsupportedLayoutError, match="must be views of one buffer in which a block"
    ):
        mamba_layer(
            conv, ssm, layer=0, name="zero", conv_pieces=[StatePiece("x", 0, 8, 8)],
            ssm_piece=StatePiece("ssm", 0, 2, 2),
        )  # fmt: skip


def test_units_of_an_opaque_page_are_copied_whole() -> None:
    cache = np.zeros((3, 4, 8, 6), np.float32)
    layer = opaque_layer(
        cache, layer=0, name="o", component="packed", unit_start=4, unit_count=4, unit_total=8
    )
    (heads,) = layer.components
    assert (heads.unit_start, heads.unit_count, heads.unit_total) == (4, 4, 8)
    assert heads.cell_bytes == heads.unit_stride == 8 * 6 * 4
    assert heads.token_count == 1
    with pytest.raises(UnsupportedLayoutError, match="first axis must be the 5 units held"):
        opaque_layer(cache, layer=0, name="o", unit_count=5)
    with pytest.raises(UnsupportedLayoutError, match="an opaque unit must be contiguous"):
        opaque_layer(cache.transpose(0, 2, 1, 3), layer=0, name="o", unit_count=8)
