"""Bugs to be planted one at a time: does the simulator find them?"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug.

    Attributes:
        plant: Puts it in the place of what is right.
        breaks: A part of the rule that is broken, one of several.
    """

    plant: Plant
    breaks: tuple[str, ...] = field(default=())


BUGS: dict[str, Bug] = {}


def bug(*breaks: str) -> Callable[[Plant], Plant]:
    """List a bug."""

    def listed(plant: Plant) -> Plant:
        BUGS[plant.__name__] = Bug(plant, breaks)
        return plant

    return listed


def changed(value: Any, **changes: Any) -> Any:
    """Return a value with other fields."""
    return msgspec.structs.replace(value, **changes)
