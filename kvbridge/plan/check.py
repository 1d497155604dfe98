"""The proof of exact cover."""

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import Rank
from kvbridge.plan.shares import TokenShare, period_of

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
        PlanError: The plan names a cache group that it does not have.
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
        if due > 1 or bool(due) != bool(writers) or not _once(writers, reading):
            raise CoverageError(
                f"{what}: units [{start}, {end}) must be written {min(due, 1)} times and would be "
                f"written {len(writers)} times, by ranks "
                f"{[f'{w.source}{w.shares[1]}' for w in writers]} of those asked {asked}"
            )
    for w in written:
        if w.unit_end <= w.unit_start:
            raise CoverageError(
                f"{what}: rank {w.source} has the empty range [{w.unit_start}, {w.unit_end})"
            )


def _once(writers: list[_Written], reading: bool) -> bool:
    """Whether several writers write every token of the destination exactly once.

    A producer that writes sees only its own part of what a consumer needs; whether all parts make
    up the whole was seen to when the owners were found.
    """
    if not reading or all(share.is_whole for w in writers for share in w.shares):
        return len(writers) <= 1
    tokens = period_of(*(share for w in writers for share in w.shares))
    due = writers[0].shares[0].holds(tokens)
    times = np.zeros(tokens.size, np.int64)
    for here, there in (w.shares for w in writers):
        times += here.holds(tokens) & there.holds(tokens)
    return bool((times == due).all())
