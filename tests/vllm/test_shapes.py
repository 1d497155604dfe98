"""Engines and models of other shapes than one rank with plain attention."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.vllm.conftest import Pair
from tests.vllm.engines import WANTED, disaggregated, prompt_of
from tests.vllm.test_tokens import EDGES, answers_alone, external_tokens

PATIENT = {"timeout_s": 120.0, "lease_s": 180.0, "handshake": {"timeout_s": 60.0}}
"""Ranks of vLLM yield in a loop while they wait, and more of them than cores starve all others:

of a process that had slept for 5 s it was seen that it woke up after 17.
"""
STAGES = {"pipeline_parallel_size": 2, "worker_cls": "tests.vllm.stages.StageWorker"}
LENGTHS = [*EDGES, 300, 1000]
ONE_CHUNK = [1, 2, 17, 63, 64]
"""What vLLM 0.32 can compute on a CPU of a model with states: it fails from the second chunk on."""
full = pytest.mark.full


def check_tokens(
    pair: Pair, *, of: str = "llama", lengths: Sequence[int] = LENGTHS, **options: Any
) -> None:
    """Let two engines answer prompts, and compare with one of them alone."""
    prefill, decode = pair(options.pop("extra", {"transport": "local"}), of, **options)
    alone = answers_alone(decode, lengths)
    before = external_tokens(decode)
    wrong = {}
    for n in lengths:
        _, second = disaggregated(prefill, decode, prompt_of(n))
        if second["tokens"] != alone[n]:
            wrong[n] = second
    assert not wrong
    assert external_tokens(decode) - before == sum(n - 1 for n in lengths)


@full
@pytest.mark.parametrize("way", ["pull", "push"])
def test_layers_that_see_a_window(pair: Pair, way: str) -> None:
    """Of a window only what the next token sees is there, and moves; at block edges too."""
    check_tokens(pair, of="window", extra={"transport": "local", "direction": way})


@full
def test_layers_with_a_state(pair: Pair) -> None:
    """The state moves as it was before the last token, which the decode engine computes."""
    check_tokens(pair, of="state", lengths=ONE_CHUNK)


@full
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16)])
def test_latent_attention_byte_by_byte(pair: Pair, sizes: tuple[int, int]) -> None:
    """Its kernels answer differently from batch to batch, so bytes are compared."""
    first_size, second_size = sizes
    prefill, decode = pair(
        {"transport": "local"},
        "latent",
        prefill={"block_size": first_size},
        decode={"block_size": second_size},
    )
    common = max(sizes)
    for n in (1, 15, 16, 17, 200, 500):
        prompt = prompt_of(n)
        first = prefill.generate(prompt, 1, WANTED)
        ids = first["params"]["remote_block_ids"][0]
        theirs = prefill.call("tokens_of", block_ids=ids, tokens=n - 1)
        name = f"r{n}"
        decode.call("add", name=name, prompt=prompt, max_tokens=64, params=first["params"])
        ours: Any = None
        while ours is None:
            decode.call("step")
            if decode.call("known") and "RUNNING" in decode.call("known").values():
                ours = decode.call("tokens_of", block_ids=decode.call("blocks_of", name=name)[0],
                                   tokens=n - 1)  # fmt: skip
        assert ours == theirs, (n, common)
        decode.wait([name])


@full
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {"tensor_parallel_size": 2}),
        ({"tensor_parallel_size": 2}, {}),
        (STAGES, {}),
        ({}, STAGES),
    ],
    ids=["tp1-tp2", "tp2-tp1", "pp2-pp1", "pp1-pp2"],
)
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_engines_of_several_ranks(
    pair: Pair, transport: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    extra = {"transport": transport, **PATIENT}
    check_tokens(pair, extra=extra, prefill=prefill, decode=decode)
