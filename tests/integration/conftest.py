"""What several integration tests are given."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.tiny_engine import Make, TinyEngine


@pytest.fixture
def engine() -> Iterator[Make]:
    """Make small engines, which are closed at the end."""
    made: list[TinyEngine] = []

    def make(*arguments: Any, **options: Any) -> TinyEngine:
        made.append(TinyEngine(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
