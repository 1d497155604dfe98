"""The proof of exact cover."""

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from kvbridge.errors import CoverageError, PlanError
from kvbridge.model import Rank

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

_Target = tuple[Rank, int, str, str]
"""Rank that is written, layer, name, component."""


def check_plan(plan: "EngineTransferPlan") -> None:
    """Prove that regions and needs cover the same units, each exactly once.

    Raises:
        CoverageError: They do not; the message names the layer, component, range and ranks.
        PlanError: The plan names a cache group that it does not have.
    """
    needed: dict[_Target, list[tuple[int, int]]] = defaultdict(list)
    for need in plan.needs:
        target = (need.rank, need.layer, need.name, need.component)
        needed[target].append((need.unit_start, need.unit_end))
    written: dict[_Target, list[tuple[int, int, Rank]]] = defaultdict(list)
    for source in plan.sources:
        for region in source.regions:
            _check_groups(plan, region.local.group, region.remote.group)
            rank = plan.local_rank if plan.direction == "read" else source.rank
            written[rank, region.layer, region.name, region.component].append(
                (region.unit_start, region.unit_end, source.rank)
            )
    asked = [source.rank for source in plan.sources]
    for target in sorted(needed.keys() | written.keys()):
        _check_target(target, sorted(needed[target]), sorted(written[target]), asked)


def _check_groups(plan: "EngineTransferPlan", local: int, remote: int) -> None:
    if local >= len(plan.local_groups) or remote >= len(plan.remote_groups):
        raise PlanError(
            f"a region names cache groups {local} here and {remote} there; the plan has "
            f"{len(plan.local_groups)} and {len(plan.remote_groups)}"
        )


def _check_target(
    target: _Target,
    needed: list[tuple[int, int]],
    written: list[tuple[int, int, Rank]],
    asked: list[Rank],
) -> None:
    rank, layer, name, component = target
    what = f"rank {rank}, layer {layer} {name!r}, component {component!r}"
    events = [(start, 1) for start, _, _ in written] + [(end, -1) for _, end, _ in written]
    events += [(cut, 0) for units in needed for cut in units]
    cuts = sorted({cut for cut, _ in events})
    for start, end in itertools.pairwise(cuts):
        due = sum(a <= start and end <= b for a, b in needed)
        writers = [source for a, b, source in written if a <= start and end <= b]
        if due == len(writers) and due <= 1:
            continue
        raise CoverageError(
            f"{what}: units [{start}, {end}) must be written {min(due, 1)} times and would be "
            f"written {len(writers)} times, by ranks {writers} of those asked {asked}"
        )
    for a, b, source in written:
        if b <= a:
            raise CoverageError(f"{what}: rank {source} has the empty range [{a}, {b})")
