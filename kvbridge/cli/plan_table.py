"""A plan as a table."""

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvbridge.cli.plan_values import Copies, Move, PlanReport, RankReport
from kvbridge.cli.plan_words import (
    words_of_bytes,
    words_of_copies,
    words_of_numbers,
    words_of_units,
)
from kvbridge.model import Rank

FORMS = {
    "pages": "all tokens that lie together in one page on both sides",
    "rows": "what moves of one token",
    "runs": "the same tokens as a page, of one unit",
    "cells": "one unit of one token",
    "state": "a piece of a sequence's state, which does not grow with its length",
}


def show(report: PlanReport, console: Console) -> None:
    """Print a plan, so that it can be read from 80 columns on."""
    reads = report.direction == "read"

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    say(f"{report.model}: prefill {report.prefill.shape}")
    say(f"{' ' * len(report.model)}  decode  {report.decode.shape}")
    say(f"figures: {report.source}")
    console.print()
    console.print(_table(report))
    console.print()
    for line in words_of_copies(report):
        say(line)
    forms = {m.form for rank in report.ranks for link in rank.links for m in link.moves}
    for form, meaning in FORMS.items():
        if form in forms:
            say(f"a copy of form {form!r}: {meaning}")
    say(f"without bytes: {_silent(report)}")
    say(f"reports that each {'prefill' if reads else 'decode'} rank hears: {_readers(report)}")


def _table(report: PlanReport) -> Table:
    reads = report.direction == "read"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("decode" if reads else "prefill", no_wrap=True)
    table.add_column("from" if reads else "to", no_wrap=True)
    table.add_column("layers", no_wrap=True)
    table.add_column("units")
    table.add_column("a copy", no_wrap=True)
    for header in ("copies\na block", "\nmerged", "bytes\na block", f"{report.tokens:,}\ntokens"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank in report.ranks:
        _add_rank(table, rank)
    return table


def _add_rank(table: Table, rank: RankReport) -> None:
    rows = [(link.rank, move) for link in rank.links for move in link.moves]
    before = None
    for i, (other, move) in enumerate(rows):
        table.add_row(
            _rank(rank.rank) if i == 0 else "",
            _rank(other) if other != before else "",
            words_of_numbers(move.layers),
            words_of_units(move),
            _form(move),
            *_copies(move.block),
            words_of_bytes(move.contiguous.nbytes),
            end_section=i == len(rows) - 1,
        )
        before = other
    if not rows:
        table.add_row(_rank(rank.rank), "nobody", end_section=True)


def _form(move: Move) -> str:
    """Return form and size of a copy; pieces of a state have many sizes."""
    return move.form if move.form == "state" else f"{move.form} {words_of_bytes(move.piece_nbytes)}"


def _copies(copies: Copies) -> tuple[str, str, str]:
    return f"{copies.pieces:,}", f"{copies.merged:,}", words_of_bytes(copies.nbytes)


def _silent(report: PlanReport) -> str:
    told = [f"{_rank(r.rank)} tells {_ranks(r.notify_only)}" for r in report.ranks if r.notify_only]
    return "; ".join(told) or "nobody is told"


def _readers(report: PlanReport) -> str:
    by_count: dict[int, list[Rank]] = defaultdict(list)
    for reader in report.readers:
        by_count[reader.count].append(reader.rank)
    if len(by_count) == 1:
        return f"{next(iter(by_count))}"
    return "; ".join(f"{count}: {_ranks(ranks)}" for count, ranks in sorted(by_count.items()))


def _ranks(ranks: Sequence[Rank]) -> str:
    return " ".join(map(_rank, ranks))


def _rank(rank: Rank) -> str:
    return f"{rank[0]},{rank[1]}"
