"""Two engines answer together what one of them answers, and one has loaded what it needs."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvbridge.connector.series import TRANSFERS
from tests.vllm.conftest import Pair
from tests.vllm.engines import Engine, disaggregated, prompt_of

BLOCK = 128
EDGES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]
FEW = [*EDGES, 17, 300, 1000]
FIFTY = sorted({*EDGES, 2000, *(1 + 41 * i for i in range(48))})[:50]
TRANSPORTS = ["local", "nixl", "mooncake", "ucx"]

WAYS = [
    pytest.param(transport, way, marks=() if way == "auto" else pytest.mark.full)
    for transport in TRANSPORTS
    for way in ("auto", "pull", "push")
]


def answers_alone(engine: Engine, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Return what one engine says to each prompt, and forget the prompts."""
    answers = {n: engine.generate(prompt_of(n))["tokens"] for n in lengths}
    engine.call("reset")
    return answers


def external_tokens(engine: Engine) -> float:
    """Return how many tokens an engine has loaded instead of computing them, as vLLM counts."""
    return float(engine.call("metrics")["vllm:external_prefix_cache_hits"])


def loads_by(engine: Engine, direction: str) -> float:
    """Return how many requests have come to an engine in a direction, as our metrics call it."""
    labels = {"direction": direction, "outcome": "ok"}
    return float(engine.call("counted", name=TRANSFERS.name, labels=labels))


@pytest.mark.parametrize(("transport", "way"), WAYS)
def test_two_engines_answer_as_one_does(pair: Pair, transport: str, way: str) -> None:
    lengths = FEW if way == "auto" else FIFTY
    prefill, decode = pair({"transport": transport, "direction": way})
    alone = answers_alone(decode, lengths)
    before = external_tokens(decode)
    wrong: dict[int, Any] = {}
    for n in lengths:
        first, second = disaggregated(prefill, decode, prompt_of(n))
        assert first["params"]["remote_num_tokens"] == n
        if second["tokens"] != alone[n] or second["reason"] != "length":
            wrong[n] = second
    assert not wrong
    # All but the last token, which has to be computed for what comes out of it.
    assert external_tokens(decode) - before == sum(n - 1 for n in lengths)
    loads = {direction: loads_by(decode, direction) for direction in ("read", "write")}
    assert sum(loads.values()) == sum(n > 1 for n in lengths)
    if way != "auto":
        assert loads["write" if way == "pull" else "read"] == 0
    assert prefill.call("idle", seconds=0.5) == 0, "blocks are kept though all has been read"
