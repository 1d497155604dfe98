"""What a rank announces: values that refuse the impossible, and builders that read tensors."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model import (
    CacheComponent,
    CacheGroup,
    LayerCache,
    RankCache,
    Region,
    attention_layer,
    memory_region,
)

KV = CacheComponent(
    name="kv", dtype="bfloat16", offset=0, cell_bytes=16,
    unit_start=2, unit_count=2, unit_total=8, unit_stride=16,
    token_count=4, token_stride=32,
)  # fmt: skip
LAYER = LayerCache(
    layer=3, name="layers.3", group=0, base_address=4096, page_stride=128, page_count=10,
    components=(KV,),
)  # fmt: skip
CACHE = RankCache(
    engine_id="here", pp_rank=0, tp_rank=1, layers=(LAYER,), groups=(CacheGroup("attention", 4),),
    regions=(Region(4096, 1280),),
)  # fmt: skip


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": -1}, "at -0x1 of 16 bytes"),
        ({"nbytes": 0}, "0x1000 of 0 bytes"),
        ({"nbytes": -5}, "of -5 bytes"),
        ({"address": (1 << 64) - 8}, "0xfffffffffffffff8 of 16 bytes"),
    ],
)
def test_region_is_a_range_of_memory(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        replace(Region(0x1000, 16), **changes)


def test_region_may_end_where_memory_does() -> None:
    assert Region((1 << 64) - 16, 16).end == 1 << 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell_bytes": 0}, "'kv': cell_bytes 0"),
        ({"unit_count": 0}, "unit_count 0"),
        ({"token_count": 0}, "token_count 0"),
        ({"offset": -1}, "offset -1"),
        ({"unit_start": -1}, r"units \[-1, 1\) of 8"),
        ({"unit_start": 7}, r"units \[7, 9\) of 8"),
        ({"unit_total": 3}, r"units \[2, 4\) of 3"),
        ({"unit_stride": 8}, "stride of 8 bytes steps over 16"),
        ({"token_stride": 16, "unit_stride": 16}, "stride of 16 bytes steps over 32"),
        ({"token_stride": 0}, "stride of 0 bytes steps over 16"),
        ({"unit_stride": -16}, "unit_stride -16"),
        ({"token_count": 1, "token_stride": -1}, "token_stride -1 >= 0"),
        ({"unit_stride": 60, "token_stride": 16}, "stride of 60 bytes steps over 64"),
    ],
)
def test_component_is_a_grid_of_cells(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        replace(KV, **changes)


def test_component_of_one_unit_or_token_may_have_any_stride_there() -> None:
    assert replace(KV, unit_count=1, unit_stride=0).span == 3 * 32 + 16
    assert replace(KV, token_count=1, token_stride=0).span == 16 + 16


def test_component_span_and_units() -> None:
    assert KV.unit_end == 4
    assert KV.span == 16 + 3 * 32 + 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": -1}, "layer -1 'layers.3'"),
        ({"group": -1}, "group -1"),
        ({"base_address": -4}, "base_address -4"),
        ({"page_count": 0}, "page_count 0"),
        ({"page_stride": 0}, "page_stride 0"),
        ({"page_stride": 96}, "stride of 96 bytes steps over 128"),
        ({"components": ()}, r"components \[\]"),
        ({"components": (KV, KV)}, r"\['kv', 'kv'\]"),
    ],
)
def test_layer_is_a_row_of_pages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        replace(LAYER, **changes)


def test_pages_may_lie_inside_one_another_as_long_as_cells_do_not_overlap() -> None:
    tokens_outermost = replace(KV, unit_count=1, token_stride=160)
    layer = replace(LAYER, page_stride=16, components=(tokens_outermost,))
    assert layer.extent(tokens_outermost) == (4096, 4096 + 9 * 16 + 3 * 160 + 16)
    with pytest.raises(UnsupportedLayoutError, match="stride of 144 bytes steps over 160"):
        replace(layer, components=(replace(tokens_outermost, token_stride=144),))


def test_layer_extent_counts_the_offset() -> None:
    far = replace(KV, offset=1 << 20)
    start = 4096 + (1 << 20)
    assert replace(LAYER, components=(far,)).extent(far) == (start, start + 9 * 128 + far.span)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "flash"}, "'flash' is unknown; known: attention"),
        ({"block_tokens": 0}, "block_tokens 0"),
        ({"pages_per_block": 0}, "pages_per_block 0"),
        ({"window_tokens": 0}, "window_tokens 0"),
        (
            {"window_tokens": 8},
            "'attention' has window_tokens 8, which only sliding_window and chu",
        ),
        ({"kind": "state", "window_tokens": 8}, "'state' has window_tokens 8"),
        ({"block_tokens": 16.5}, "block_tokens is 16.5; it must be a whole number"),
        ({"pages_per_block": "2"}, "pages_per_block is '2'"),
        ({"kind": "chunked", "window_tokens": 8.0}, "window_tokens is 8.0"),
    ],
)
def test_group_is_a_known_kind_with_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        replace(CacheGroup("attention", 4), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_rank": -1}, r"rank \(-1, 1\) of engine 'here'"),
        ({"tp_rank": -2}, r"rank \(0, -2\)"),
        ({"dcp_rank": 1}, r"dcp_rank 1 must be in \[0, dcp_size 1\)"),
        ({"dcp_interleave_tokens": 0}, "dcp_interleave_tokens 0"),
        ({"layers": (LAYER, LAYER)}, r"\(3, 'layers.3'\) is listed twice"),
        ({"layers": (replace(LAYER, group=1),)}, r"names cache group 1, there are 1"),
        ({"groups": ()}, "names cache group 0, there are 0"),
        ({"groups": (CacheGroup("attention", 8),)}, "4 tokens a page, 1 pages a block.* 8 tokens"),
        ({"groups": (CacheGroup("attention", 4, 2),)}, "4 tokens a page, 2 pages a block.* 4 tok"),
        ({"regions": ()}, r"\[0x1000, 0x1500\), which no single region of 0"),
        ({"regions": (Region(4097, 1280),)}, "no single region of 1"),
        ({"regions": (Region(4096, 1279),)}, "no single region of 1"),
        ({"regions": (Region(4096, 640), Region(4736, 640))}, "no single region of 2"),
    ],
)
def test_rank_does_not_contradict_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        replace(CACHE, **changes)


def test_numbers_of_numpy_are_numbers() -> None:
    group = CacheGroup("chunked", np.int64(4), np.uint8(2), np.int32(8))  # type: ignore[arg-type]
    assert group == CacheGroup("chunked", 4, 2, 8)
    assert type(group.block_tokens) is int


def test_lists_are_as_good_as_tuples() -> None:
    layer = replace(LAYER, components=[KV])  # type: ignore[arg-type]
    cache = replace(CACHE, layers=[layer], groups=list(CACHE.groups), regions=list(CACHE.regions))  # type: ignore[arg-type]
    assert cache == CACHE
    assert cache.geometry is CACHE.geometry
    assert hash(cache) == hash(CACHE)


def test_rank_says_which_rank_it_is() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"engine 'here' rank \(pp 0, tp 1\)"):
        replace(CACHE, regions=())
    assert CACHE.rank == (0, 1)


def test_layers_of_one_index_differ_by_name() -> None:
    replace(CACHE, layers=(LAYER, replace(LAYER, name="draft.3")))


def test_state_has_no_tokens_to_count() -> None:
    state = replace(KV, name="ssm", token_count=1)
    layer = replace(LAYER, components=(state,))
    replace(CACHE, layers=(layer,), groups=(CacheGroup("state", 64),))


def test_any_region_of_several_may_hold_a_layer() -> None:
    replace(CACHE, regions=(Region(1 << 20, 8), Region(4000, 2000), Region(0, 8)))


# --- builders ------------------------------------------------------------------------------------

SIZE = {"B": 5, "K": 2, "H": 3, "N": 4, "C": 6}


def tensor_of(axes: str, step: int = 1) -> NDArray[np.float16]:
    """Return a tensor; with a step it is a view of every other page, as padded caches are."""
    shape = [SIZE[a] * (step if a == "B" else 1) for a in axes]
    whole: NDArray[np.float16] = np.arange(np.prod(shape)).astype(np.float16).reshape(shape)
    return whole[tuple(slice(None, None, step if a == "B" else 1) for a in axes)]


def build(tensor: Any, axes: str, **changes: Any) -> LayerCache:
    return attention_layer(
        tensor,
        **{"axes": axes, "layer": 7, "name": "seven", "unit_start": 3, "unit_total": 9, **changes},
    )


def cells(layer: LayerCache, component: CacheComponent) -> dict[tuple[int, int, int], int]:
    """Return the address of every (page, unit, token), as the documentation defines it."""
    return {
        (page, unit, token): layer.base_address
        + page * layer.page_stride
        + component.offset
        + unit * component.unit_stride
        + token * component.token_stride
        for page in range(layer.page_count)
        for unit in range(component.unit_count)
        for token in range(component.token_count)
    }


def addresses_of(tensor: NDArray[Any], axes: str, **fixed: int) -> dict[tuple[int, int, int], int]:
    """Return where numpy says the content of every (page, head, token) begins."""
    size = {"H": 1, **dict(zip(axes, tensor.shape, strict=True))}

    def address(**at: int) -> int:
        corner = tensor[tuple(slice(at.get(axis, 0), None) for axis in axes)]
        return int(corner.__array_interface__["data"][0])

    return {
        (b, h, n): address(B=b, H=h, N=n, **fixed)
        for b in range(size["B"])
        for h in range(size["H"])
        for n in range(size["N"])
    }


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("axes", ["".join(p) + "C" for p in permutations("BHN")] + ["BNC", "NBC"])
def test_attention_layer_without_a_kv_axis_holds_both_in_its_content(axes: str, step: int) -> None:
    tensor = tensor_of(axes, step)
    layer = build(tensor, axes)
    (kv,) = layer.components
    assert (layer.layer, layer.name, layer.group) == (7, "seven", 0)
    assert (kv.name, kv.dtype, kv.cell_bytes) == ("kv", "float16", SIZE["C"] * 2)
    assert (kv.unit_start, kv.unit_total) == (3, 9)
    assert cells(layer, kv) == addresses_of(tensor, axes)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("axes", ["".join(p) + "C" for p in permutations("BKHN")])
def test_attention_layer_with_a_kv_axis_in_any_place(axes: str, step: int) -> None:
    tensor = tensor_of(axes, step)
    layer = build(tensor, axes)
    k = addresses_of(tensor, axes, K=0)
    v = addresses_of(tensor, axes, K=1)
    if axes.endswith("KC"):  # a cell holds K and then V
        (kv,) = layer.components
        assert (kv.name, kv.cell_bytes) == ("kv", 2 * SIZE["C"] * 2)
        assert cells(layer, kv) == k
        assert all(v[at] == k[at] + kv.cell_bytes // 2 for at in k)
    else:
        first, second = layer.components
        assert [(c.name, c.cell_bytes) for c in layer.components] == [("k", 12), ("v", 12)]
        assert cells(layer, first) == k
        assert cells(layer, second) == v


@pytest.mark.parametrize("axes", ["BNHC", "BHNC", "NBHC"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_k_and_v_in_tensors_of_their_own(axes: str, order: tuple[int, int]) -> None:
    both = np.stack([tensor_of(axes), tensor_of(axes)])
    tensors = both[order[0]], both[order[1]]  # V may lie before K
    layer = build(tensors, axes, group=2)
    assert layer.group == 2
    assert [c.name for c in layer.components] == ["k", "v"]
    for component, tensor in zip(layer.components, tensors, strict=True):
        assert cells(layer, component) == addresses_of(tensor, axes)


@pytest.mark.parametrize("axes", ["BNHC", "BHNC", "NBHC", "HBNC", "BNC"])
def test_k_and_v_that_overlap_are_refused(axes: str) -> None:
    k = tensor_of(axes)
    with pytest.raises(UnsupportedLayoutError, match="'seven': K and V overlap, V begins 0 bytes"):
        build((k, k), axes)
    page = SIZE["B"] - 2
    later = tuple(slice(2, None) if axis == "B" else slice(None) for axis in axes)
    sooner = tuple(slice(None, page) if axis == "B" else slice(None) for axis in axes)
    for pair in ((k[later], k[sooner]), (k[sooner], k[later])):
        with pytest.raises(UnsupportedLayoutError, match="K and V overlap"):
            build(pair, axes)
    halves = k[..., :3], k[..., 3:]
    assert [c.cell_bytes for c in build(halves, axes).components] == [6, 6]
    build(halves[::-1], axes)
    with pytest.raises(UnsupportedLayoutError, match="K and V overlap, V begins 4 bytes behind K"):
        build((k[..., :3], k[..., 2:5]), axes)


def test_an_axis_k_without_a_stride_is_one_tensor_given_twice() -> None:
    tensor = np.broadcast_to(np.zeros((5, 1, 4, 3, 6), np.float16), (5, 2, 4, 3, 6))
    with pytest.raises(UnsupportedLayoutError, match="K and V overlap"):
        build(tensor, "BKNHC")


def test_v_may_have_another_content_than_k() -> None:
    k, v = np.zeros((5, 4, 3, 6), np.float16), np.zeros((5, 4, 3, 4), np.float16)
    v = np.lib.stride_tricks.as_strided(np.zeros(5 * k.strides[0], np.uint8).view(np.float16),
                                        v.shape, (k.strides[0], *v.strides[1:]))  # fmt: skip
    assert [c.cell_bytes for c in build((k, v), "BNHC").components] == [12, 8]


class Device:
    def __init__(self, kind: str, index: int | None) -> None:
        self.type, self.index = kind, index


class TorchLike:
    """What a torch tensor says of itself."""

    def __init__(
        self, address: int, shape: Sequence[int], stride: Sequence[int], device: Device
    ) -> None:
        self.shape, self.device, self.dtype = tuple(shape), device, "torch.bfloat16"
        self._address, self._stride = address, tuple(stride)

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def element_size(self) -> int:
        return 2


def test_torch_tensors_are_read_without_torch() -> None:
    tensor = TorchLike(0x7000, (5, 2, 4, 3, 6), (1000, 300, 18, 6, 1), Device("cuda", 3))
    layer = build(tensor, "BKNHC")
    k, v = layer.components
    assert (layer.base_address, layer.page_stride, layer.page_count) == (0x7000, 2000, 5)
    assert (k.dtype, k.cell_bytes, k.unit_stride, k.token_stride) == ("bfloat16", 12, 12, 36)
    assert v == replace(k, name="v", offset=600)
    assert memory_region(tensor) == Region(
        0x7000, 2 * (4 * 1000 + 300 + 3 * 18 + 2 * 6 + 6), "cuda", 3
    )


def test_a_torch_tensor_of_the_cpu_is_dram() -> None:
    tensor = TorchLike(64, (2, 4, 6), (24, 6, 1), Device("cpu", None))
    assert memory_region(tensor) == Region(64, 96, "dram", 0)


class Interface:
    """An object with an array interface."""

    def __init__(self, attribute: str, **interface: Any) -> None:
        setattr(
            self, attribute, {"version": 3, "data": (0x1000, False), "typestr": "<f2", **interface}
        )


def test_an_array_interface_without_strides_is_dense() -> None:
    for strides in ({}, {"strides": None}):
        layer = build(Interface("__array_interface__", shape=(5, 4, 3, 6), **strides), "BNHC")
        (kv,) = layer.components
        assert (layer.page_stride, kv.token_stride, kv.unit_stride) == (144, 36, 12)


def test_a_cuda_array_interface_is_cuda_memory() -> None:
    tensor = Interface("__cuda_array_interface__", shape=(5, 4, 6))
    assert memory_region(tensor) == Region(0x1000, 240, "cuda", 0)


def test_region_of_an_array() -> None:
    array = np.zeros((4, 8), np.float32)
    address = array.__array_interface__["data"][0]
    assert memory_region(array) == Region(address, 128)
    assert memory_region(array[1:3, 2:4]) == Region(address + 40, 40)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("BHN", "axes 'BHN' must name B, N and C"),
        ("BNCC", "axes 'BNCC'"),
        ("BNHX", "axes 'BNHX'"),
        ("BKNHC", r"axes 'BKNHC' name 5 axes, the tensor has shape \(5, 4, 3, 6\)"),
        ("BNC", r"axes 'BNC' name 3 axes"),
        ("BNKC", "axis K of 'BNKC' has size 3, K and V need 2"),
        ("BNCH", "content has a stride of 12 bytes, elements have 2"),
    ],
)
def test_axes_that_do_not_spell_the_tensor_are_refused(axes: str, message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=f"'seven': {message}"):
        build(np.zeros((5, 4, 3, 6), np.float16), axes)


@pytest.mark.parametrize(
    ("tensors", "axes", "message"),
    [
        ([(5, 4, 3, 6)], "BNHC", "got 1 tensors with axes 'BNHC'"),
        ([(5, 4, 3, 6)] * 3, "BNHC", "got 3 tensors"),
        ([(5, 2, 4, 3, 6)] * 2, "BKNHC", "got 2 tensors with axes 'BKNHC'"),
        ([(5, 4, 3, 6), (6, 4, 3, 6)], "BNHC", r"K has .* \(144, 5\), V has \(144, 6\)"),
        ([(5, 4, 3, 6), (5, 4, 3, 8)], "BNHC", r"K has .* \(144, 5\), V has \(192, 5\)"),
    ],
)
def test_k_and_v_apart_must_be_a_pair_of_equal_pages(
    tensors: list[tuple[int, ...]], axes: str, message: str
) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        build(tuple(np.zeros(shape, np.float16) for shape in tensors), axes)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (object(), "object has neither data_ptr"),
        (np.empty((2, 2, 2), object), "an array of Python objects"),
        (np.zeros((5, 4, 3, 6))[::-1], "runs backwards"),
        (np.zeros((0, 4, 3, 6)), r"shape \(0, 4, 3, 6\)"),
    ],
)
def test_tensors_that_say_nothing_or_run_backwards_are_refused(tensor: Any, message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        build(tensor, "BNHC")


def test_a_share_outside_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"units \[3, 6\) of 5"):
        build(tensor_of("BNHC"), "BNHC", unit_total=5)


def test_broadcast_heads_overlap_and_are_refused() -> None:
    tensor = np.broadcast_to(np.zeros((5, 4, 1, 6), np.float16), (5, 4, 3, 6))
    with pytest.raises(UnsupportedLayoutError, match="stride of 0 bytes steps over 12"):
        build(tensor, "BNHC")
