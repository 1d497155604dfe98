"""What the cache of a request is computed of: its tokens, and all that vLLM mixes into them."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.request import Request

from kvbridge.integrations.vllm.settings import names_its_model

_ID_NBYTES = 8


class Identities:
    """Says what stands for each token of a request where another engine's blocks are compared.

    That is the token's id, or another number where its cache depends on more: on an adapter, which
    all of it does; on an image, of which the prompt has nothing but equal placeholders; on a vector
    that was given in place of a token. Two engines find the same numbers for the same request.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Take the configuration, which says whether an image has one name on both engines."""
        multimodal = vllm_config.model_config.multimodal_config
        # Without any cache for images vLLM counts them instead of looking at them, and their names
        # depend on the path of the model.
        self._knows_images = not names_its_model(vllm_config) and (
            multimodal is None
            or multimodal.mm_processor_cache_gb > 0
            or bool(vllm_config.cache_config.enable_prefix_caching)
        )
        self._found: WeakKeyDictionary[Request, dict[int, int]] = WeakKeyDictionary()

    def of(self, request: Request) -> Sequence[int] | None:
        """Return a number for each token, in order; None where nobody can know."""
        tokens: Sequence[int] = request.all_token_ids
        if request.mm_features and not self._knows_images:
            return None
        if not (request.mm_features or request.lora_request or request.prompt_embeds is not None):
            return tokens
        others = self._found.get(request)
        if others is None:  # found once, for vectors are many bytes
            others = self._found[request] = _numbers_of(request)
        ids = list(tokens)
        for place, number in others.items():
            if place < len(ids):
                ids[place] = number
        return ids


def _numbers_of(request: Request) -> dict[int, int]:
    """Return the numbers that are no ids of tokens, by place."""
    parts: dict[int, list[str]] = defaultdict(list)
    if request.lora_request is not None:
        parts[0].append(f"adapter {request.lora_request.lora_name}")
    for feature in request.mm_features:
        # Where it begins is enough: whatever is behind that is compared with it.
        parts[feature.mm_position.offset].append(f"{feature.modality} {feature.identifier}")
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds.contiguous().view(torch.uint8).numpy()
        are_tokens = request.prompt_is_token_ids or itertools.repeat(False)
        for place, (row, is_token) in enumerate(zip(rows, are_tokens, strict=False)):
            if not is_token:
                parts[place].append(f"vector {blake2b(row).hexdigest()}")
    return {
        place: _number_of(request.all_token_ids[place], told)
        for place, told in parts.items()
        if place < request.num_prompt_tokens
    }


def _number_of(token: int, parts: list[str]) -> int:
    """Return a number that stands for a token and what else its cache depends on."""
    told = repr((token, parts)).encode()
    return int.from_bytes(blake2b(told, digest_size=_ID_NBYTES).digest(), "little", signed=True)
