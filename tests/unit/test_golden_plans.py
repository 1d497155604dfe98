"""Small plans, kept as JSON in ``tests/golden``, are what is planned today.

Where a plan is meant to change: ``python -m tests.golden.make``, then look at the difference.
"""

import pytest

from kvbridge.plan import EngineTransferPlan
from tests.golden.make import FOLDER, PLANS, path_of, text_of


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_the_one_that_was_kept(name: str) -> None:
    kept = path_of(name).read_text()
    assert text_of(name) == kept
    assert EngineTransferPlan.from_json(kept) == PLANS[name]()


def test_every_kept_plan_is_made_and_short_enough_to_be_read() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    assert paths == sorted(map(path_of, PLANS))
    assert all(len(path.read_text().splitlines()) < 150 for path in paths)
