"""What a worker announces of vLLM's caches, and which blocks of a request move."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvbridge.connector import NO_BLOCK
from kvbridge.errors import ConfigError, UnsupportedLayoutError
from kvbridge.integrations.vllm import caches
from kvbridge.integrations.vllm.caches import (
    Place,
    Tables,
    cache_group,
    layers_of_drafts,
    rank_cache,
)
from kvbridge.integrations.vllm.settings import connector_values, model_name

HEADS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.float16,
}
FULL = FullAttentionSpec(**HEADS)
WINDOW = SlidingWindowSpec(**HEADS, sliding_window=33)
CHUNK = ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.float16)
STATE = MambaSpec(
    block_size=64,
    shapes=((64 + 2 * 8, 3), (4, 16, 8)),
    dtypes=(torch.float16, torch.float32),
    mamba_type=MambaAttentionBackendEnum.MAMBA2,
    num_speculative_blocks=2,
)
BLOCKS = 4


def config(*specs: Any, **of_last: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"model.layers.{i}.attn"], spec) for i, spec in enumerate(specs)]
    groups[-1] = replace(groups[-1], **of_last)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def place(tp_rank: int = 0, tp_size: int = 1, heads: int = 2, **others: Any) -> Place:
    return Place("e", 0, tp_rank, tp_size, heads, **others)


def on_device(heads: int = 2, blocks: int = BLOCKS, tokens: int = 16) -> Any:
    """Return a cache that lies in no memory, as of an accelerator."""
    return torch.empty((blocks, heads, tokens, 16), dtype=torch.float16)


# --- block tables --------------------------------------------------------------------------------


def test_blocks_that_a_window_has_left_behind_are_no_blocks() -> None:
    tables = Tables(config(FULL, WINDOW, CHUNK))
    assert tables.of(([5, 6, 7], [0, 0, 9], [0, 3, 4])) == (
        (5, 6, 7),
        (NO_BLOCK, NO_BLOCK, 9),
        (NO_BLOCK, 3, 4),
    )
    assert tables.looks_back_less_than_all


@pytest.mark.parametrize(
    ("listed", "moved"),
    [
        ([7, 8, 9], (7,)),  # the state, and scratch for two speculated tokens
        ([3, 7, 8, 9], (7,)),  # and what it was before
        ([0, 0, 7, 8, 9], (7,)),
        ([7, 8], (7,)),  # not all of the scratch is there yet
        ([7], (7,)),
        ([], ()),
        ([0, 8, 9], ()),
    ],
)
def test_of_a_state_only_the_block_that_holds_it_moves(
    listed: list[int], moved: tuple[int, ...]
) -> None:
    assert Tables(config(FULL, STATE)).of(([1], listed)) == ((1,), moved)


def test_groups_that_do_not_move_are_left_out() -> None:
    tables = Tables(config(FULL, WINDOW, enable_kv_transfer=False))
    assert tables.of(([1, 2], [0, 3])) == ((1, 2),)
    assert not tables.looks_back_less_than_all
    assert tables.of(()) == ()


# --- cache groups --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "kind", "tokens", "window"),
    [
        (FULL, "attention", 16, None),
        (WINDOW, "sliding_window", 16, 32),  # what the token after these sees behind it
        (replace(WINDOW, extra_retained_tokens=3), "sliding_window", 16, 35),
        (CHUNK, "chunked", 16, 64),
        (LATENT, "mla", 16, None),
        (STATE, "state", 64, None),
    ],
)
def test_a_group_says_what_it_keeps(spec: Any, kind: str, tokens: int, window: int | None) -> None:
    group = cache_group(KVCacheGroupSpec(["l"], spec))
    assert (group.kind, group.block_tokens, group.window_tokens) == (kind, tokens, window)


def test_a_kind_that_is_not_known_is_refused() -> None:
    group = KVCacheGroupSpec(["l"], CrossAttentionSpec(**HEADS))
    with pytest.raises(UnsupportedLayoutError, match="CrossAttentionSpec, which KVBridge does not"):
        cache_group(group)


# --- what a rank announces -----------------------------------------------------------------------


def component(spec: Any, tensor: Any, where: Place) -> Any:
    [layer] = rank_cache({"model.layers.0.attn": tensor}, config(spec), where).layers
    return layer.components[0]


@pytest.mark.parametrize(
    ("tp_rank", "tp_size", "heads", "held", "units"),
    [
        (0, 1, 2, 2, (0, 2, 2)),
        (1, 2, 4, 2, (2, 2, 4)),
        (3, 4, 2, 1, (1, 1, 2)),  # two ranks hold the same head
        (2, 4, 2, 1, (1, 1, 2)),
        (1, 4, 2, 1, (0, 1, 2)),
    ],
)
@pytest.mark.parametrize("says", [True, False])
def test_a_rank_says_which_heads_it_holds(
    tp_rank: int, tp_size: int, heads: int, held: int, units: tuple[int, int, int], says: bool
) -> None:
    spec = replace(FULL, num_kv_heads=held, max_tp_shards=heads // held if says else None)
    found = component(spec, on_device(held), place(tp_rank, tp_size, heads))
    assert (found.unit_start, found.unit_count, found.unit_total) == units


def test_the_kernels_of_a_cpu_keep_the_inside_of_blocks_to_themselves() -> None:
    where = place().with_formats({"model.layers.0.attn": SimpleNamespace(isa="vec")})
    found = component(FULL, on_device(), where)
    assert (found.name, found.token_count, found.cell_bytes) == ("kv.vec", 1, 16 * 16 * 2)


def test_a_latent_is_held_whole_by_every_rank() -> None:
    tensor = torch.empty((BLOCKS, 1, 16, 24), dtype=torch.float16)
    found = component(LATENT, tensor, place(1, 2))
    assert (found.name, found.unit_total, found.token_count) == ("latent", 1, 16)


def test_blocks_may_be_split_for_the_kernels() -> None:
    cache = rank_cache(
        {"model.layers.0.attn": torch.empty((4 * BLOCKS, 1, 4, 24), dtype=torch.float16)},
        config(LATENT),
        place(),
    )
    assert cache.groups[0].pages_per_block == 4
    assert cache.layers[0].page_count == 4 * BLOCKS


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize(("groups", "b"), [(1, (0, 8, 8)), (2, (8, 8, 16)), (None, (8, 8, 16))])
def test_a_state_says_which_channels_it_holds(
    monkeypatch: pytest.MonkeyPatch,
    channels_first: bool,
    groups: int | None,
    b: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(caches, "is_conv_state_dim_first", lambda: channels_first)
    conv, ssm = STATE.shapes
    spec = replace(STATE, shapes=(conv if channels_first else conv[::-1], ssm))
    nbytes = spec.page_size_bytes
    cache = rank_cache(
        {"model.layers.0.attn": torch.zeros((BLOCKS, 1, 1, nbytes), dtype=torch.int8)},
        config(spec),
        place(1, 2, state_groups=groups),
    )
    parts = {each.name: each for each in cache.layers[0].components}
    assert list(parts) == ["conv.x", "conv.b", "conv.c", "ssm"]
    assert (parts["conv.x"].unit_start, parts["conv.x"].unit_total) == (64, 128)
    for name in ("conv.b", "conv.c"):
        part = parts[name]
        assert (part.unit_start, part.unit_count, part.unit_total) == b
    assert (parts["ssm"].unit_start, parts["ssm"].unit_total) == (4, 8)
    assert parts["ssm"].offset == (64 + 16) * 3 * 2


def test_memory_that_layers_share_is_registered_once() -> None:
    storage = torch.zeros(2 * BLOCKS * 2 * 16 * 16, dtype=torch.float16)
    both = storage.view(2, BLOCKS, 2, 16, 16)
    cache = rank_cache(
        {"model.layers.0.attn": both[0], "model.layers.1.attn": both[1]},
        config(FULL, FULL),
        place(),
    )
    [region] = cache.regions
    assert (region.address, region.nbytes) == (storage.data_ptr(), storage.nbytes)
    assert [layer.key for layer in cache.layers] == [
        (0, "model.layers.0.attn"),
        (1, "model.layers.1.attn"),
    ]


def test_layers_of_a_draft_model_are_known() -> None:
    assert layers_of_drafts(config(FULL, FULL, is_eagle_group=True)) == (1,)


# --- settings ------------------------------------------------------------------------------------


def vllm_config(extra: dict[str, Any], *, replica: int = 0, pcp: int = 1) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra,
            kv_role="kv_producer",
            kv_load_failure_policy="fail",
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=replica, prefill_context_parallel_size=pcp
        ),
        model_config=SimpleNamespace(model="/models/m"),
    )


def test_what_vllm_says_goes_into_the_configuration() -> None:
    values = connector_values(vllm_config({"transport": "local", "model": "m"}))
    assert values["role"] == "producer"
    assert values["on_failure"] == "fail"
    assert "model" not in values
    assert model_name(vllm_config({"model": "m"})) == "m"
    assert model_name(vllm_config({})) == "/models/m"


def test_each_replica_has_ports_of_its_own() -> None:
    child = {"transport": "nixl", "handshake": {"port": 7000}}
    extra = {"connectors": [child, {"transport": "local"}], "handshake": {"port": 0}}
    values = connector_values(vllm_config(extra, replica=3))
    assert values["connectors"][0]["handshake"]["port"] == 7003
    assert values["handshake"]["port"] == 0
    assert child["handshake"] == {"port": 7000}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"role": "both"}, "'role'; of vLLM that is said by 'kv_role'"),
        ({"engine_id": "e"}, "said by 'engine_id'"),
        ({"on_failure": "fail"}, "said by 'kv_load_failure_policy'"),
        ({"connectors": [{"transport": "local", "on_failure": "fail"}]}, "kv_load_failure_policy"),
        ({"transprot": "nixl"}, "transprot"),
        ({"transport": "nixl", "backends": ["UCX"]}, "backends"),
    ],
)
def test_what_cannot_be_is_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connector_values(vllm_config(extra))


def test_context_parallel_prefill_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_context_parallel_size is 2"):
        connector_values(vllm_config({"transport": "local"}, pcp=2))
