"""What a worker of vLLM holds, and which of a request's blocks move.

vLLM shows every layer as ``[block, head, token, content]``, whatever lies next to what in memory,
with K and V of a head and token one behind the other; a state as the bytes of a block.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvbridge.connector import NO_BLOCK, BlockIds
from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model import (
    CacheGroup,
    LayerCache,
    RankCache,
    Region,
    StatePiece,
    attention_layer,
    mamba_layer,
    mla_layer,
    opaque_layer,
)
from kvbridge.model.state import ConvOrder

NULL_BLOCK = 0
"""What vLLM's block tables list for tokens that have no block."""

_GROUPS_OF_STATE = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""Under which of these a model's configuration has the number of its B and C projections."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its engine, and what its model's configuration says of all of them.

    Attributes:
        engine_id: The engine.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank.
        tp_size: Tensor-parallel ranks of a stage.
        total_num_kv_heads: KV heads of the model.
        state_groups: Groups that share a B and a C, of a model with Mamba 2 layers.
        dcp_size: Ranks that share out the tokens of a sequence.
        dcp_interleave_tokens: Tokens that stay together there.
        cpu_formats: In which order kernels for the CPU keep the inside of blocks, by layer.
    """

    engine_id: str
    pp_rank: int
    tp_rank: int
    tp_size: int
    total_num_kv_heads: int
    state_groups: int | None = None
    dcp_size: int = 1
    dcp_interleave_tokens: int = 1
    cpu_formats: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, vllm_config: Any, *, pp_rank: int, tp_rank: int) -> "Place":
        """Return the place of a rank."""
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        named = (getattr(model.hf_text_config, name, None) for name in _GROUPS_OF_STATE)
        return cls(
            vllm_config.kv_transfer_config.engine_id,
            pp_rank,
            tp_rank,
            parallel.tensor_parallel_size,
            max(1, model.get_total_num_kv_heads()),
            next((each for each in named if each is not None), None),
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
        )

    def with_formats(self, layers: Mapping[str, Any]) -> "Place":
        """Return the same, with what vLLM's kernels for the CPU have chosen for their layers."""
        formats = {name: getattr(layer, "isa", None) for name, layer in layers.items()}
        return replace(self, cpu_formats={name: each for name, each in formats.items() if each})

    def share(self, shards: int) -> int:
        """Return which of so many shares this rank holds; neighbours hold the same one."""
        return self.tp_rank * shards // self.tp_size


def rank_cache(
    kv_caches: Mapping[str, torch.Tensor], config: KVCacheConfig, place: Place
) -> RankCache:
    """Describe what a rank holds.

    Args:
        kv_caches: A tensor for each layer, as ``register_kv_caches`` gets it.
        config: The groups that the layers belong to.
        place: The rank.

    Raises:
        UnsupportedLayoutError: A layer's cache is of a kind that is not known.
    """
    groups, layers = [], []
    for index, group in enumerate(config.transfer_groups):
        held = [(name, kv_caches[name]) for name in group.layer_names if name in kv_caches]
        spec = _representative(group)
        splits = {
            1 if isinstance(spec, MambaSpec) else tensor.shape[0] // config.num_blocks
            for _, tensor in held
        }
        if len(splits) > 1:
            raise UnsupportedLayoutError(
                f"layers {group.layer_names} split a block into {sorted(splits)} kernel blocks; "
                "all layers of a group must split it alike"
            )
        groups.append(cache_group(group, pages_per_block=splits.pop() if splits else 1))
        specs = dict(_layer_specs(group))
        for name, tensor in held:
            layers.append(_layer(name, tensor, specs[name], index, place))
    return RankCache(
        place.engine_id,
        place.pp_rank,
        place.tp_rank,
        tuple(layers),
        tuple(groups),
        tuple(_regions(kv_caches.values())),
        place.tp_rank % place.dcp_size,
        place.dcp_size,
        place.dcp_interleave_tokens,
    )


def cache_group(group: KVCacheGroupSpec, *, pages_per_block: int = 1) -> CacheGroup:
    """Return a cache group as it is planned with.

    A window counts what the *next* token sees behind it: all that vLLM keeps.

    Raises:
        UnsupportedLayoutError: Its kind is not known.
    """
    spec = _representative(group)
    window = None
    if isinstance(spec, SlidingWindowSpec):
        kind = "sliding_window"
        window = max(1, spec.sliding_window - 1 + spec.extra_retained_tokens)
    elif isinstance(spec, ChunkedLocalAttentionSpec):
        kind, window = "chunked", spec.attention_chunk_size
    elif isinstance(spec, MLAAttentionSpec):
        kind = "mla"
    elif isinstance(spec, FullAttentionSpec):
        kind = "attention"
    elif isinstance(spec, MambaSpec):
        kind = "state"
    else:
        raise UnsupportedLayoutError(
            f"layers {group.layer_names} have a cache of kind {type(spec).__name__}, which "
            "KVBridge does not move; known are full, sliding-window, chunked and latent attention, "
            "and Mamba"
        )
    return CacheGroup(kind, spec.block_size, pages_per_block, window)


class Tables:
    """Turns a request's block tables of vLLM into ours."""

    def __init__(self, config: KVCacheConfig) -> None:
        """Take the groups that the tables are of."""
        self._config = config
        specs = [_representative(group) for group in config.transfer_groups]
        self._scratch = [
            spec.num_speculative_blocks if isinstance(spec, MambaSpec) else None for spec in specs
        ]
        self._has_gaps = [
            isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs
        ]
        self.looks_back_less_than_all = any(self._has_gaps) or config.has_mamba_layers

    def of(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """Return the blocks that may move, group by group; none if a request never had any.

        Of a state that is the one block that holds it: vLLM lists scratch for speculated tokens
        behind it, and what it was before in front.
        """
        if not block_ids:
            return ()
        moved = self._config.select_transfer_block_ids(block_ids)
        return tuple(
            _with_gaps(ids) if has_gaps else tuple(ids) if scratch is None else _state(ids, scratch)
            for ids, has_gaps, scratch in zip(moved, self._has_gaps, self._scratch, strict=True)
        )


def _with_gaps(ids: Sequence[int]) -> tuple[int, ...]:
    known = np.asarray(ids, np.int64)
    return tuple(np.where(known == NULL_BLOCK, NO_BLOCK, known).tolist())


def _state(ids: Sequence[int], scratch: int) -> tuple[int, ...]:
    held = ids[: len(ids) - min(scratch, len(ids) - 1)] if ids else ids
    return tuple(each for each in held[-1:] if each != NULL_BLOCK)


def _layer_specs(group: KVCacheGroupSpec) -> Iterator[tuple[str, KVCacheSpec]]:
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return ((name, each[name] if each else group.kv_cache_spec) for name in group.layer_names)


def _representative(group: KVCacheGroupSpec) -> KVCacheSpec:
    """Return what a group's layers have in common."""
    return next(iter(iter_layer_specs(group.kv_cache_spec)))


def _layer(name: str, tensor: Any, spec: KVCacheSpec, group: int, place: Place) -> LayerCache:
    where: dict[str, Any] = {"layer": _index(name), "name": name, "group": group}
    if isinstance(spec, MambaSpec):
        return _state_layer(tensor, spec, place, where)
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) and _has_cells(spec):
        return mla_layer(tensor[:, 0], axes="BNC", **where)
    if not isinstance(spec, AttentionSpec):
        raise UnsupportedLayoutError(f"layer {name!r} has a cache of kind {type(spec).__name__}")
    shards = _shards(spec, place)
    if not _has_cells(spec):
        return opaque_layer(tensor, unit_start=place.share(shards), unit_total=shards, **where)
    heads = spec.num_kv_heads
    units = {"unit_start": place.share(shards) * heads, "unit_total": shards * heads}
    if tensor.device.type == "cpu":
        # The kernels keep a head's keys of a block in an order of their own, whatever the shape
        # says: transposed, or in tiles, as the processor has it.
        packed = f"kv.{place.cpu_formats.get(name, 'cpu')}"
        return opaque_layer(tensor, component=packed, unit_count=heads, **units, **where)
    return attention_layer(tensor, axes="BHNC", **units, **where)


def _has_cells(spec: AttentionSpec) -> bool:
    """Whether each head and token has a place of its own, and not several together."""
    return spec.num_head_slots is None and spec.tokens_per_state == 1


def _shards(spec: AttentionSpec, place: Place) -> int:
    """Return into how many different shares the heads of a layer are cut."""
    if spec.max_tp_shards is not None:
        return min(place.tp_size, int(spec.max_tp_shards))
    if spec.num_kv_heads == max(1, place.total_num_kv_heads // place.tp_size):
        return min(place.tp_size, place.total_num_kv_heads)
    return place.tp_size  # a layer with a number of heads of its own, taken as cut evenly


def _state_layer(
    tensor: torch.Tensor, spec: MambaSpec, place: Place, where: dict[str, Any]
) -> LayerCache:
    shards = 1 if spec.tp_replicated else place.tp_size
    pieces = _conv_pieces(spec, place, shards)
    if pieces is None:
        pages = tensor.flatten(1)
        return opaque_layer(pages, unit_start=place.share(shards), unit_total=shards, **where)
    conv, ssm = _parts(tensor, spec)
    order: ConvOrder = "channels_first" if is_conv_state_dim_first() else "tokens_first"
    units = spec.shapes[1][0]
    held = StatePiece("ssm", place.share(shards) * units, units, shards * units)
    return mamba_layer(conv, ssm, conv_pieces=pieces, ssm_piece=held, conv_order=order, **where)


def _parts(tensor: torch.Tensor, spec: MambaSpec) -> list[torch.Tensor]:
    """Return each part of a state as a tensor of its own shape; they lie one behind the other."""
    pages, parts, at = tensor.flatten(1).view(torch.uint8), [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        nbytes = math.prod(shape) * dtype.itemsize
        parts.append(pages[:, at : at + nbytes].view(dtype).view(len(pages), *shape))
        at += nbytes
    return parts


def _conv_pieces(spec: MambaSpec, place: Place, shards: int) -> list[StatePiece] | None:
    """Return what the convolution's channels are, in their order; None if that is not known.

    Source: vLLM's ``derive_mamba_conv_split`` for the widths; report B04.
    """
    if len(spec.shapes) != 2 or len(spec.shapes[0]) != 2:
        return None
    channels = spec.shapes[0][0 if is_conv_state_dim_first() else 1]
    temporal = spec.shapes[1]
    if spec.mamba_type == MambaAttentionBackendEnum.MAMBA1:
        widths = {"x": channels}
    elif spec.mamba_type == MambaAttentionBackendEnum.MAMBA2:
        x = temporal[0] * temporal[1]
        widths = {"x": x, "b": (channels - x) // 2, "c": (channels - x) // 2}
    elif spec.mamba_type == MambaAttentionBackendEnum.GDN_ATTN:
        v = temporal[0] * temporal[1]
        widths = {"q": (channels - v) // 2, "k": (channels - v) // 2, "v": v}
    else:
        return None
    # One group that all heads share is held by every rank as a whole.
    whole = ("b", "c") if place.state_groups == 1 else ()
    cuts = {name: 1 if name in whole else shards for name in widths}
    return [
        StatePiece(name, place.share(cuts[name]) * width, width, cuts[name] * width)
        for name, width in widths.items()
    ]


def _index(name: str) -> int:
    """Return the global index of a layer, which vLLM has in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else 0


def layers_of_drafts(config: KVCacheConfig) -> tuple[int, ...]:
    """Return the indices of layers that belong to a draft model."""
    groups = [group for group in config.transfer_groups if group.is_eagle_group]
    return tuple(sorted({_index(name) for group in groups for name in group.layer_names}))


def _regions(tensors: Iterator[torch.Tensor] | Any) -> list[Region]:
    """Return the memory to register: what the tensors are views of, each once."""
    regions = {}
    for tensor in tensors:
        storage, device = tensor.untyped_storage(), tensor.device
        kind = "dram" if device.type == "cpu" else device.type
        regions[storage.data_ptr()] = Region(
            storage.data_ptr(), storage.nbytes(), kind, device.index or 0
        )
    return list(regions.values())
