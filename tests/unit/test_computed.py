"""What is there of requests that have not finished."""

import pytest

from kvbridge.plan import BlockTable
from kvbridge.session import ReleaseBook, computed
from kvbridge.session.computed import Computed
from kvbridge.session.kept import Kept
from kvbridge.session.leases import LeaseTable

BLOCKS = [BlockTable((3, 1))]


def attempt_of(known: Computed, request_id: str) -> int:
    ready = known.ready(request_id, 8)
    assert ready is not None
    return ready.attempt


def test_one_that_goes_on_stays_the_same_attempt() -> None:
    known = Computed()
    known.grow("r", BLOCKS, 4)
    attempt = attempt_of(known, "r")
    known.grow("r", [BlockTable((3, 1, 7))], 8)
    assert known.finish("r", [BlockTable((3, 1, 7))], 8) == attempt


@pytest.mark.parametrize(
    ("tables", "tokens"),
    [([BlockTable((3, 2))], 8), ([BlockTable((3,))], 8), (BLOCKS, 3)],
    ids=["other blocks", "fewer blocks", "fewer tokens"],
)
def test_what_cannot_go_on_is_another_attempt(tables: list[BlockTable], tokens: int) -> None:
    known = Computed()
    known.grow("r", BLOCKS, 4)
    attempt = attempt_of(known, "r")
    assert known.finish("r", tables, tokens) != attempt


def test_one_that_was_forgotten_is_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed, "COMPUTED_MAX", 2)
    known = Computed()
    known.grow("first", BLOCKS, 4)
    before = attempt_of(known, "first")
    for name in ("second", "third"):
        known.grow(name, BLOCKS, 4)
    assert known.ready("first", 8) is None
    known.take_away("first")
    known.grow("first", BLOCKS, 4)
    assert attempt_of(known, "first") != before


@pytest.mark.parametrize("end", [Kept.expire, lambda kept, name: kept.refuse(name, None)])
def test_what_is_not_kept_in_the_end_is_forgotten(end: object) -> None:
    assert callable(end)
    kept = Kept(LeaseTable(), ReleaseBook())
    kept.computed.grow("r", BLOCKS, 4)
    end(kept, "r")
    assert kept.computed.ready("r", 8) is None
