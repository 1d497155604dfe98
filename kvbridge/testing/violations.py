"""What a rule says when it is broken, and the comparisons that say it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import KVBridgeError

Bytes = NDArray[np.uint8]


class RuleViolationError(AssertionError):
    """A transport broke a rule; the message names the two values that disagree."""


class NotApplicable(Exception):  # noqa: N818  (it is no error)
    """A rule has nothing to say about this transport; the message says why."""


def expect(condition: object, message: str) -> None:
    """Break the rule unless the condition holds."""
    if not condition:
        raise RuleViolationError(message)


def expect_equal(what: str, seen: object, wanted: object) -> None:
    """Break the rule unless two values are equal."""
    if seen != wanted:
        raise RuleViolationError(f"{what}: is {_short(seen)}, must be {_short(wanted)}")


def expect_in(what: str, seen: Any, wanted: Collection[Any]) -> None:
    """Break the rule unless a value is one of several."""
    if seen not in wanted:
        raise RuleViolationError(f"{what}: is {_short(seen)}, must be one of {_short(wanted)}")


def expect_at_most(what: str, seen: float, most: float) -> None:
    """Break the rule where a number is too large."""
    if seen > most:
        raise RuleViolationError(f"{what}: is {seen:g}, may be at most {most:g}")


def expect_bytes(what: str, seen: Bytes | bytes, wanted: Bytes | bytes) -> None:
    """Break the rule unless two runs of bytes are equal; says where they first differ."""
    left, right = _as_array(seen), _as_array(wanted)
    if left.size != right.size:
        raise RuleViolationError(f"{what}: has {left.size} bytes, must have {right.size}")
    differ = left != right
    if differ.any():
        first = int(np.argmax(differ))
        raise RuleViolationError(
            f"{what}: {int(differ.sum())} of {left.size} bytes differ, the first at offset {first} "
            f"(is {left[first]:#04x}, must be {right[first]:#04x}), "
            f"the last at {left.size - 1 - int(np.argmax(differ[::-1]))}"
        )


@contextmanager
def expect_raises(what: str, *kinds: type[KVBridgeError]) -> Iterator[None]:
    """Break the rule unless the block raises one of these errors."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except KVBridgeError as error:
        raise RuleViolationError(
            f"{what}: raised {type(error).__name__} ({error}), must raise {names}"
        ) from error
    raise RuleViolationError(f"{what}: raised nothing, must raise {names}")


def _as_array(data: Bytes | bytes) -> Bytes:
    return np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data


def _short(value: object) -> str:
    text = str(value) if isinstance(value, str) and " " in value else repr(value)
    return text if len(text) <= 300 else f"{text[:200]} … {text[-80:]}"
