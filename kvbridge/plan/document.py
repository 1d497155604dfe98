"""A plan as a document: JSON to keep and compare, words to read."""

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from kvbridge.errors import PlanError, UnsupportedLayoutError
from kvbridge.model import CacheGroup, LayerKey, Rank
from kvbridge.plan.cost import copies_of, cost_packed, costs_of
from kvbridge.plan.values import (
    Direction,
    Grid,
    Need,
    NotNegative,
    PlanOptions,
    Positive,
    RankPlan,
    RegionPlan,
)

if TYPE_CHECKING:
    from kvbridge.plan.plan import EngineTransferPlan

DOCUMENT_VERSION = 1


class _Regions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Regions that differ in their layer alone; grids are indices into the document's list."""

    component: str
    units: tuple[int, int]
    cell_bytes: int
    local: NotNegative
    remote: NotNegative
    layers: tuple[LayerKey, ...]


class _Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: Rank
    regions: tuple[_Regions, ...]


class _Needs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: Rank
    component: str
    units: tuple[int, int]
    layers: tuple[LayerKey, ...]


class _Reader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: Rank
    count: Positive


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    direction: Direction
    local_rank: Rank
    options: PlanOptions
    local_groups: tuple[CacheGroup, ...]
    remote_groups: tuple[CacheGroup, ...]
    grids: tuple[Grid, ...]
    sources: tuple[_Source, ...]
    needs: tuple[_Needs, ...]
    notify_only: tuple[Rank, ...]
    readers: tuple[_Reader, ...]
    left_out: tuple[LayerKey, ...]


def to_json(plan: "EngineTransferPlan") -> str:
    """Return the plan as indented JSON; equal plans give equal text."""
    return msgspec.json.format(msgspec.json.encode(_document(plan)), indent=2).decode()


def fingerprint(plan: "EngineTransferPlan") -> str:
    """Return a digest of the plan's content."""
    return hashlib.blake2b(msgspec.json.encode(_document(plan)), digest_size=16).hexdigest()


def parse(text: str) -> dict[str, Any]:
    """Read a document back into the fields of a plan.

    Raises:
        PlanError: The text is no plan of this version.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
        if document.version != DOCUMENT_VERSION:
            raise PlanError(
                f"the plan has document version {document.version}, this code reads "
                f"{DOCUMENT_VERSION}"
            )
        return _fields(document)
    except (msgspec.MsgspecError, IndexError, UnsupportedLayoutError) as error:
        raise PlanError(f"the text is no transfer plan: {error}") from error


def _document(plan: "EngineTransferPlan") -> _Document:
    grids: dict[Grid, int] = {}
    return _Document(
        version=DOCUMENT_VERSION,
        direction=plan.direction,
        local_rank=plan.local_rank,
        options=plan.options,
        local_groups=plan.local_groups,
        remote_groups=plan.remote_groups,
        sources=tuple(_Source(s.rank, _folded(s, grids)) for s in plan.sources),
        grids=tuple(grids),
        needs=_folded_needs(plan.needs),
        notify_only=plan.notify_only,
        readers=tuple(_Reader(rank, n) for rank, n in sorted(plan.readers.items())),
        left_out=plan.left_out,
    )


def _folded(source: RankPlan, grids: dict[Grid, int]) -> tuple[_Regions, ...]:
    layers: dict[tuple[str, tuple[int, int], int, int, int], list[LayerKey]] = defaultdict(list)
    for r in source.regions:
        here, there = (grids.setdefault(grid, len(grids)) for grid in (r.local, r.remote))
        layers[r.component, (r.unit_start, r.unit_end), r.cell_bytes, here, there].append(r.key)
    return tuple(_Regions(*pattern, tuple(keys)) for pattern, keys in layers.items())


def _folded_needs(needs: tuple[Need, ...]) -> tuple[_Needs, ...]:
    layers: dict[tuple[Rank, str, tuple[int, int]], list[LayerKey]] = defaultdict(list)
    for need in needs:
        units = (need.unit_start, need.unit_end)
        layers[need.rank, need.component, units].append((need.layer, need.name))
    return tuple(_Needs(*pattern, tuple(keys)) for pattern, keys in layers.items())


def _fields(document: _Document) -> dict[str, Any]:
    sources = tuple(
        RankPlan(
            source.rank,
            tuple(
                sorted(
                    (
                        RegionPlan(*key, r.component, *r.units, r.cell_bytes,
                                   document.grids[r.local], document.grids[r.remote])
                        for r in source.regions
                        for key in r.layers
                    ),
                    key=lambda r: (r.layer, r.name, r.component, r.unit_start),
                )
            ),
        )
        for source in document.sources
    )  # fmt: skip
    needs = (Need(n.rank, *key, n.component, *n.units) for n in document.needs for key in n.layers)
    return {
        "direction": document.direction,
        "local_rank": document.local_rank,
        "local_groups": document.local_groups,
        "remote_groups": document.remote_groups,
        "sources": sources,
        "needs": tuple(
            sorted(needs, key=lambda n: (n.rank, n.layer, n.name, n.component, n.unit_start))
        ),
        "notify_only": document.notify_only,
        "readers": {reader.rank: reader.count for reader in document.readers},
        "left_out": document.left_out,
        "options": document.options,
    }


# --- words -----------------------------------------------------------------------------------


def explain(plan: "EngineTransferPlan") -> str:
    """Return the plan in words, one line for each pattern of each remote rank."""
    verb = "reads from" if plan.direction == "read" else "writes to"
    lines = [f"rank {plan.local_rank} {verb} {len(plan.sources)} ranks"]
    for source in plan.sources:
        total = sum(region.nbytes_per_token for region in source.regions)
        lines.append(f"  rank {source.rank}: {total} bytes a token")
        patterns: dict[tuple[object, ...], list[RegionPlan]] = defaultdict(list)
        for r in source.regions:
            key = (r.component, r.unit_start, r.unit_end, r.cell_bytes, r.local, r.remote)
            patterns[key].append(r)
        lines += (
            f"    {len(alike)} layers, each {_words(alike[0])}" for alike in patterns.values()
        )
    direct, staged = costs_of(plan)
    lines.append(f"  a remote page of everything, direct: {direct}")
    how = ": lower_staged() does that, lower() is always direct"
    lines.append(
        f"  the same, staged: {staged}; the plan is {plan.strategy}"
        f"{how if plan.strategy == 'staged' else ''}"
    )
    lines.append(
        f"  the same, written in packed parts: {cost_packed(plan)}; a push is "
        f"{'packed' if plan.is_packed else 'direct'}"
    )
    if plan.notify_only:
        lines.append(f"  tells without bytes: {list(plan.notify_only)}")
    if plan.left_out:
        lines.append(f"  leaves out {len(plan.left_out)} layers: {list(plan.left_out[:4])}")
    told = ", ".join(f"{rank} by {n}" for rank, n in sorted(plan.readers.items()))
    lines.append(f"  our engine reports to: {told}")
    return "\n".join(lines)


def _words(region: RegionPlan) -> str:
    """Say how many copies of which form the smaller of two pages takes."""
    copies = copies_of(region)
    tokens = min(region.local.cells, region.remote.cells)
    what = {"tokens": f"{tokens} tokens", "pages": "a page", "state": "a state"}
    return (
        f"{region.component} units [{region.unit_start}, {region.unit_end}): "
        f"{copies.number} pieces of {copies.nbytes} bytes for {what[region.local.moves]} "
        f"({copies.form})"
    )
