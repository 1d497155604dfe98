"""Requests that have no block for some of their tokens, such as those before a window."""

import json
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import NO_BLOCK, Request
from tests.integration.tiny_engine import PAGE, Make, TinyEngine, run

WAYS = pytest.mark.parametrize("way", ["pull", "push"])
TOKENS = 3 * PAGE


def offered(p: TinyEngine, blocks: tuple[int, ...]) -> Any:
    """Finish a request, and return what it takes along through a proxy, as JSON."""
    p.fill([block for block in blocks if block != NO_BLOCK])
    request = Request("r", TOKENS, TOKENS, {"do_remote_decode": True})
    holds, taken = p.scheduler.request_finished(request, (blocks,))
    assert holds
    return json.loads(json.dumps(taken))


@WAYS
def test_a_token_without_a_block_does_not_move(engine: Make, way: str) -> None:
    p, d = (engine(name, {"direction": way}) for name in "pd")
    before = d.memory[0, 0].copy()
    d.load("r", [NO_BLOCK, 5, 6], TOKENS, offered(p, (NO_BLOCK, 3, 2)))
    run([p, d], lambda: "r" in d.loaded and p.sent == ["r"])
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert np.array_equal(d.memory[0, 0][:, [5, 6]], p.memory[0, 0][:, [3, 2]])
    others = [i for i in range(before.shape[1]) if i not in {5, 6}]
    assert np.array_equal(d.memory[0, 0][:, others], before[:, others])


@WAYS
def test_a_block_that_the_other_engine_needs_not_is_left_there(engine: Make, way: str) -> None:
    p, d = (engine(name, {"direction": way}) for name in "pd")
    d.load("r", [NO_BLOCK, 5, 6], TOKENS, offered(p, (1, 3, 2)))
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert np.array_equal(d.memory[0, 0][:, [5, 6]], p.memory[0, 0][:, [3, 2]])


@WAYS
def test_a_token_that_the_other_engine_lacks_fails_the_load(engine: Make, way: str) -> None:
    p, d = (engine(name, {"direction": way}) for name in "pd")
    d.load("r", [4, 5, 6], TOKENS, offered(p, (NO_BLOCK, 3, 2)))
    run([p, d], lambda: "r" in d.loaded)
    assert "null block for token 0, which must move" in d.loaded["r"].error
    run([p, d], lambda: p.sent == ["r"])
