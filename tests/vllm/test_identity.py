"""What tells requests apart: their tokens, and all else that vLLM's cache depends on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvbridge.integrations.vllm.identity import Identities
from kvbridge.integrations.vllm.scheduler import shorten

TOKENS = [5, 6, 7, 7, 7, 8]


def identities(*, cache_gb: float | None = 4.0, prefixes: bool = True, **extra: str) -> Identities:
    images = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return Identities(
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            model_config=SimpleNamespace(multimodal_config=images),
            cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        )
    )


def request(tokens: list[int] | None = TOKENS, **others: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **others)


def image(identifier: str, offset: int = 2) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 3))


def adapter(name: str, number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, f"/adapters/{number}")


def ids(told: Request) -> list[int]:
    of = identities().of(told)
    assert of is not None
    return list(of)


def test_a_request_of_tokens_alone_is_told_by_them() -> None:
    assert ids(request()) == TOKENS
    assert list(identities(cache_gb=None).of(request()) or ()) == TOKENS


def test_adapters_are_told_apart_by_name_from_the_first_token_on() -> None:
    one = ids(request(lora_request=adapter("a")))
    assert one[0] not in (TOKENS[0], ids(request(lora_request=adapter("b")))[0])
    assert one == ids(request(lora_request=adapter("a", 2))), "where it is, is not its name"
    assert one[0] != ids(request([9, *TOKENS[1:]], lora_request=adapter("a")))[0]


def test_images_are_told_apart_from_where_they_begin() -> None:
    one, two = (ids(request(mm_features=[image(each)])) for each in ("x", "y"))
    assert one[:2] == two[:2] == TOKENS[:2], "what is before them does not depend on them"
    assert one[2] != two[2]
    assert one[3:] == two[3:] == TOKENS[3:]
    assert one != ids(request(mm_features=[image("x", offset=3)]))


@pytest.mark.parametrize(("cache_gb", "prefixes"), [(0, True), (4, False)])
def test_one_cache_is_enough_for_vllm_to_look_at_images(cache_gb: float, prefixes: bool) -> None:
    known = identities(cache_gb=cache_gb, prefixes=prefixes)
    assert list(known.of(request(mm_features=[image("x")])) or ()) == ids(
        request(mm_features=[image("x")])
    )


@pytest.mark.parametrize(
    "blind",
    [identities(cache_gb=0, prefixes=False), identities(model="where paths differ")],
    ids=["no cache", "other paths"],
)
def test_what_has_no_name_that_both_engines_know_is_not_compared(blind: Identities) -> None:
    """vLLM makes the path of the model a part of the name of each image."""
    assert blind.of(request(mm_features=[image("renderer0-mm-1-image-0")])) is None
    assert list(blind.of(request()) or ()) == TOKENS


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_vectors_are_told_apart_one_by_one(kind: torch.dtype) -> None:
    vectors = torch.arange(24, dtype=kind).reshape(6, 4)
    other = vectors.clone()
    other[3, 1] = -1
    one, two = (ids(request(None, prompt_embeds=each)) for each in (vectors, other))
    assert [place for place in range(6) if one[place] != two[place]] == [3]
    assert one[:4] == ids(request(None, prompt_embeds=vectors[:4])), "as whoever loads the rest"
    assert len(set(one)) == 6


def test_vectors_between_tokens() -> None:
    is_token = [True, True, False, False, True, True]
    one, two = (
        ids(request(prompt_embeds=vectors, prompt_is_token_ids=is_token))
        for vectors in (torch.zeros(6, 4), torch.ones(6, 4))
    )
    assert [a == b for a, b in zip(one, two, strict=True)] == is_token
    assert [place for place in range(6) if one[place] == TOKENS[place]] == [0, 1, 4, 5]


def test_vectors_are_read_once_and_what_was_answered_is_told_by_its_tokens() -> None:
    known, told = identities(), request(None, prompt_embeds=torch.ones(6, 4))
    first = known.of(told)
    told.prompt_embeds = torch.zeros(6, 4)
    told.append_output_token_ids([11, 12])
    assert known.of(told) == [*(first or ()), 11, 12]


def test_what_stands_for_a_token_fits_where_ids_do() -> None:
    told = [ids(request(mm_features=[image(f"{i}")]))[2] for i in range(64)]
    assert len(set(told)) == 64
    assert all(-(1 << 63) <= each < 1 << 63 for each in told)


@pytest.mark.parametrize("what", ["tokens", "vectors", "both"])
def test_what_is_left_to_another_engine_leaves_the_same_numbers(what: str) -> None:
    """All that says how long a prompt is says the same, or vLLM's worker ends."""
    tokens = None if what == "vectors" else [*TOKENS]
    vectors = None if what == "tokens" else torch.arange(24.0).reshape(6, 4)
    is_token = [True, False] * 3 if what == "both" else None
    told = request(tokens, prompt_embeds=vectors, prompt_is_token_ids=is_token)
    told.kv_transfer_params = {"do_remote_decode": True}
    before = ids(told)
    shorten(told, 1)
    assert ids(told) == before[:-1]
    lengths = {len(told.all_token_ids), told.num_prompt_tokens}
    given = (told.prompt_token_ids, told.prompt_embeds, told.prompt_is_token_ids)
    assert lengths | {len(each) for each in given if each is not None} == {5}
    shorten(told, 1)
    assert told.num_prompt_tokens == 5, "twice for one request"
