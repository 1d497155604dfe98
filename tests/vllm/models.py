"""Tiny models of fixed seeds, made here: nothing is downloaded."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_model import VOCABULARY, save, tiny_llama
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 16384,
    "torch_dtype": torch.float32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ADAPTED = ("q_proj", "k_proj", "v_proj")
_ADAPTER_RANK = 8
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


def _latent() -> Any:
    """Return a model with latent attention (MLA)."""
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            moe_intermediate_size=128,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=3,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            tie_word_embeddings=False,
            **_SHARED,
        )
    )


def _window() -> Any:
    """Return a model whose layers mostly see a window: three cache groups in vLLM."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=128,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            pad_token_id=0,
            **_SHARED,
            **_HEADS,
        )
    )


def _state() -> Any:
    """Return a model with a state beside the attention in each layer (Mamba 2)."""
    return FalconH1ForCausalLM(
        FalconH1Config(
            num_hidden_layers=3,
            mamba_d_ssm=512,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_expand=2,
            mamba_chunk_size=64,
            pad_token_id=0,
            **_SHARED,
            **_HEADS,
        )
    )


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "latent": _latent,
    "window": _window,
    "state": _state,
}


def make_adapter(seed: int, directory: Path) -> Path:
    """Write an adapter of the tiny Llama (LoRA), which changes what is cached; return where."""
    path = directory / f"adapter{seed}"
    path.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for name, layer in tiny_llama().named_modules():
        if name.endswith(_ADAPTED):
            low = torch.randn(_ADAPTER_RANK, layer.in_features, generator=draw)
            high = torch.randn(layer.out_features, _ADAPTER_RANK, generator=draw)
            weights[f"base_model.model.{name}.lora_A.weight"] = 0.1 * low
            weights[f"base_model.model.{name}.lora_B.weight"] = 0.1 * high
    save_file(weights, path / "adapter_model.safetensors")
    config = {"r": _ADAPTER_RANK, "lora_alpha": _ADAPTER_RANK, "target_modules": _ADAPTED}
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return path


def make_model(name: str, directory: Path) -> Path:
    """Write a model, unless it is there already; return where."""
    return save(MODELS[name], directory / name)
