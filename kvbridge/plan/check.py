"""The proof of exact cover."""

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import Rank
from kvbridge.plan.shares import TokenShare, period_of
from kvbridge.plan.values import RegionPlan

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

_Target = tuple[Rank, int, str, str]
"""Rank that is written, layer, name, component."""


class _Written(NamedTuple):
    """Units that one region writes, of the tokens that both sides hold."""

    unit_start: int
    unit_end: int
    source: Rank
    shares: tuple[TokenShare, TokenShare]


def check_plan(plan: "EngineTransferPlan") -> None:
    """Prove that regions and needs cover the same units and tokens, each exactly once.

    Raises:
        CoverageError: They do not; the message names the layer, component, range and ranks.
        PlanError: The plan names a cache group or a rank that it does not have, or a grid that is
            none.
    """
    needed: dict[_Target, list[tuple[int, int]]] = defaultdict(list)
    for need in plan.needs:
        target = (need.rank, need.layer, need.name, need.component)
        needed[target].append((need.unit_start, need.unit_end))
    reading = plan.direction == "read"
    written: dict[_Target, list[_Written]] = defaultdict(list)
    for source in plan.sources:
        for region in source.regions:
            _check_groups(plan, region.local.group, region.remote.group)
            _check_grids(region)
            rank = plan.local_rank if reading else source.rank
            written[rank, region.layer, region.name, region.component].append(
                _Written(
                    region.unit_start,
                    region.unit_end,
                    source.rank,
                    (region.local.share, region.remote.share),
                )
            )
    asked = [source.rank for source in plan.sources]
    for target in sorted(needed.keys() | written.keys()):
        _check_target(target, needed[target], written[target], asked, reading)
    for told in (*asked, *plan.notify_only):
        if told not in plan.readers:
            raise PlanError(
                f"the plan has to do with remote rank {told}, but its readers are those of "
                f"{sorted(plan.readers)}; every remote rank has readers"
            )


def _check_grids(region: RegionPlan) -> None:
    """Refuse grids whose numbers contradict each other; JSON bounds each of them by itself."""
    for grid in (region.local, region.remote):
        share = grid.share
        if region.cell_bytes < 1 or share.rank >= share.size:
            raise PlanError(
                f"layer {region.key}, component {region.component!r}: cells of "
                f"{region.cell_bytes} bytes, of token share {share.rank} of {share.size}; cells "
                "have bytes, and shares are counted from 0"
            )
        if (grid.moves == "state") != (grid.page_tokens == 0):
            raise PlanError(
                f"layer {region.key}, component {region.component!r}: {grid.moves} move in pages "
                f"of {grid.page_tokens} tokens; state has 0, everything else 1 or more"
            )


def _check_groups(plan: "EngineTransferPlan", local: int, remote: int) -> None:
    if local >= len(plan.local_groups) or remote >= len(plan.remote_groups):
        raise PlanError(
            f"a region names cache groups {local} here and {remote} there; the plan has "
            f"{len(plan.local_groups)} and {len(plan.remote_groups)}"
        )


def _check_target(
    target: _Target,
    needed: list[tuple[int, int]],
    written: list[_Written],
    asked: list[Rank],
    reading: bool,
) -> None:
    rank, layer, name, component = target
    what = f"rank {rank}, layer {layer} {name!r}, component {component!r}"
    cuts = sorted(
        {cut for units in needed for cut in units}
        | {cut for w in written for cut in (w.unit_start, w.unit_end)}
    )
    for start, end in itertools.pairwise(cuts):
        due = sum(a <= start and end <= b for a, b in needed)
        writers = [w for w in written if w.unit_start <= start and end <= w.unit_end]
        if due > 1:
            raise CoverageError(
                f"{what}: units [{start}, {end}) are listed {due} times among what must be "
                "written; each is needed once"
            )
        wrong = _wrongly_written(due, writers, reading)
        if wrong:
            raise CoverageError(
                f"{what}: units [{start}, {end}){wrong.where} must be written {wrong.due} times "
                f"and would be written {wrong.times} times, by ranks "
                f"{[f'{w.source}{w.shares[1]}' for w in writers]} of those asked {asked}"
            )
    for w in written:
        if w.unit_end <= w.unit_start:
            raise CoverageError(
                f"{what}: rank {w.source} has the empty range [{w.unit_start}, {w.unit_end})"
            )


class _Wrong(NamedTuple):
    """How often something must be written, and how often it would be."""

    where: str
    due: int
    times: int


def _wrongly_written(due: int, writers: list[_Written], reading: bool) -> _Wrong | None:
    """Return what several writers do not write as often as they must, every token once.

    A producer that writes sees only its own part of what a consumer needs; whether all parts make
    up the whole was seen to when the owners were found.
    """
    if not reading or not due or all(share.is_whole for w in writers for share in w.shares):
        return None if due == len(writers) else _Wrong("", due, len(writers))
    tokens = period_of(*(share for w in writers for share in w.shares))
    held = writers[0].shares[0].holds(tokens)
    times = np.zeros(tokens.size, np.int64)
    for here, there in (w.shares for w in writers):
        times += here.holds(tokens) & there.holds(tokens)
    wrong = np.flatnonzero(times != held)
    if not wrong.size:
        return None
    token = int(wrong[0])
    return _Wrong(f" of token {token}", int(held[token]), int(times[token]))
