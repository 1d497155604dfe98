"""A Llama so small that a CPU answers at once; it knows 512 words and makes no sense."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 512


def tiny_llama() -> Any:
    """Return the model; it is the same each time."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=16384,
            tie_word_embeddings=False,
            torch_dtype=torch.float32,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def save(make: Any, path: Path) -> Path:
    """Write a model of random weights, unless it is there already; return where.

    The weights are wider than usual, so that what it says depends strongly on what it has read.
    """
    if (path / "tokenizer.json").exists():
        return path
    torch.manual_seed(0)
    model = make().float()
    with torch.no_grad():
        for what, weights in model.named_parameters():
            if weights.dim() >= 2 and not any(x in what for x in ("embed", "conv", "A_log")):
                weights.mul_(3.0)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocab=words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    return path
