"""What the cache of a request is computed of: its tokens, and all that vLLM mixes into them."""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.request import Request

_Parts = dict[int, list[str]]
_ID_NBYTES = 8


class Identities:
    """Says what stands for each token of a request where another engine's blocks are compared.

    That is the token's id, or another number where its cache depends on more: on an adapter, which
    all of it does; on an image, of which the prompt has nothing but equal placeholders; on a vector
    that was given in place of a token. Two engines find the same numbers for the same request.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Take the configuration, which says whether vLLM tells one image from another."""
        multimodal = vllm_config.model_config.multimodal_config
        self._knows_images = (
            multimodal is None
            or multimodal.mm_processor_cache_gb > 0
            or bool(vllm_config.cache_config.enable_prefix_caching)
        )
        self._vectors: WeakKeyDictionary[Request, list[str]] = WeakKeyDictionary()

    def of(self, request: Request) -> Sequence[int] | None:
        """Return a number for each token, in order; None where nobody can know.

        Without any cache for images, vLLM counts them instead of looking at them.
        """
        tokens: Sequence[int] = request.all_token_ids
        if request.mm_features and not self._knows_images:
            return None
        besides = self._besides(request)
        if not besides:
            return tokens
        ids = list(tokens)
        for place, parts in besides.items():
            if place < len(ids):
                ids[place] = _id_of(ids[place], parts)
        return ids

    def _besides(self, request: Request) -> _Parts:
        """Return what tokens depend on beside their ids, by place."""
        parts: _Parts = defaultdict(list)
        if request.lora_request is not None:
            parts[0].append(f"adapter {request.lora_request.lora_name}")
        for feature in request.mm_features:
            # Where it begins is enough: whatever is behind that is compared with it.
            parts[feature.mm_position.offset].append(f"{feature.modality} {feature.identifier}")
        if request.prompt_embeds is not None:
            is_token = request.prompt_is_token_ids or [False] * len(request.prompt_embeds)
            for place, digest in enumerate(self._digests_of_vectors(request)):
                if not is_token[place]:
                    parts[place].append(f"vector {digest}")
        return parts

    def _digests_of_vectors(self, request: Request) -> list[str]:
        """Return what tells vectors apart; taken once, for they are many bytes."""
        digests = self._vectors.get(request)
        if digests is None:
            rows = request.prompt_embeds.contiguous().view(torch.uint8).numpy()
            digests = self._vectors[request] = [blake2b(row).hexdigest() for row in rows]
        return digests


def _id_of(token: int, parts: list[str]) -> int:
    """Return a number that stands for a token and what else its cache depends on."""
    told = repr((token, parts)).encode()
    return int.from_bytes(blake2b(told, digest_size=_ID_NBYTES).digest(), "little", signed=True)
