"""Real messages, a little wrong: whoever reads them raises our own errors, or nothing.

What ``make fuzz`` does for minutes, guided by coverage, is done here for seconds.
"""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import seeds
from tests.fuzz.targets import TARGETS, mutate

SLOWEST_S = 2.0


@pytest.mark.parametrize("target", TARGETS)
def test_real_messages_are_read(target: str) -> None:
    """Otherwise what follows would try nothing but the first check."""
    if target in {"params", "address"}:
        return
    for message in seeds.messages()[target]:
        TARGETS[target](message)


@pytest.mark.parametrize("target", TARGETS)
@given(st.integers(0, 9), st.integers(0, 2**31))
@example(0, 0)
def test_mutated_messages_raise_nothing_but_our_own_errors(
    target: str, which: int, seed: int
) -> None:
    messages = seeds.messages()[target]
    data = mutate(target, messages[which % len(messages)], seed)
    started_s = time.monotonic()
    TARGETS[target](data)
    assert time.monotonic() - started_s < SLOWEST_S
