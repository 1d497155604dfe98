"""The producer frees a request's blocks when every reader has reported, and not before."""

import pytest

from kvbridge.handshake.messages import Release
from kvbridge.session import ReleaseBook, releases


def report(request_id: str, tp_rank: int, readers: int, engine: str = "d") -> Release:
    return Release(request_id, engine, "i", (0, tp_rank), readers)


def test_the_last_reader_frees() -> None:
    book = ReleaseBook()
    assert not book.hold("r")
    assert not book.report(report("r", 0, 2))
    assert book.held == {"r"}
    assert book.report(report("r", 1, 2))
    assert book.held == frozenset()


def test_b27_reports_that_come_early_count() -> None:
    book = ReleaseBook()
    assert not book.report(report("r", 0, 2))
    assert not book.hold("r")
    assert book.report(report("r", 1, 2))


def test_reports_that_all_come_early_free_at_once() -> None:
    book = ReleaseBook()
    book.report(report("r", 0, 1))
    assert book.hold("r")


def test_a_reader_that_reports_twice_is_one_reader() -> None:
    """Field practice 6.3 J: readers are told apart, not counted."""
    book = ReleaseBook()
    book.hold("r")
    assert not book.report(report("r", 0, 2))
    assert not book.report(report("r", 0, 2))
    assert book.duplicates == 1
    assert book.held == {"r"}


def test_requests_do_not_mix() -> None:
    book = ReleaseBook()
    book.hold("a")
    book.hold("b")
    assert book.report(report("b", 0, 1))
    assert book.held == {"a"}


def test_early_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "EARLY_MAX", 3)
    book = ReleaseBook()
    book.hold("held")
    book.report(report("held", 0, 2))
    for i in range(10):
        book.report(report(f"unknown-{i}", 0, 1))
    assert book.forgotten == 7
    assert book.report(report("held", 1, 2)), "a held request is never forgotten"


def test_early_reports_are_kept_for_a_time() -> None:
    now_s = [0.0]
    book = ReleaseBook(lambda: now_s[0])
    book.report(report("old", 0, 1))
    now_s[0] = releases.EARLY_S + 1
    book.report(report("new", 0, 1))
    assert book.forgotten == 1
    assert not book.hold("old")
    assert book.hold("new")


def test_an_early_report_is_repeated_after_its_time() -> None:
    """Nothing is early any more then: that is no error."""
    now_s = [0.0]
    book = ReleaseBook(lambda: now_s[0])
    book.report(report("r", 0, 2))
    now_s[0] = releases.EARLY_S + 1
    assert not book.report(report("r", 1, 2))
    assert book.forgotten == 1


def test_ranks_of_several_engines_do_not_add_up() -> None:
    """Two engines of two ranks each, or two starts of one: none of them has read all."""
    book = ReleaseBook()
    book.hold("r")
    assert not book.report(report("r", 0, 2, engine="d"))
    assert not book.report(report("r", 1, 2, engine="e"))
    assert not book.report(Release("r", "d", "another start", (0, 1), 2))
    assert book.report(report("r", 1, 2, engine="d"))


def test_readers_of_one_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "READERS_MAX", 5)
    book = ReleaseBook()
    book.hold("r")
    for i in range(9):
        book.report(report("r", 0, 2, engine=f"e{i}"))
    assert book.duplicates == 4
