"""What of one edge's cells is compared after a transfer, and how a difference is said.

An *edge* is one producer rank and one consumer rank. Who plans the transfer turns the edge's
regions into probes; both ranks digest the same probes, each in its own memory, and the results are
compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvbridge.errors import PlanError
from kvbridge.model import RankCache
from kvbridge.plan.digest_cells import CellRange, Shares, held_between, side_of, target_of
from kvbridge.plan.digest_hash import mix64
from kvbridge.plan.lower import checked_range
from kvbridge.plan.segments import Side, first_token_needed
from kvbridge.plan.values import (
    BlockTable,
    Grid,
    NotNegative,
    RegionPlan,
    UInt64Array,
    whole_number,
)

Chunk = tuple[NotNegative, NotNegative]
"""Tokens ``[start, end)``."""

TOKENS_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Probe:
    """Some cells and the chunks of tokens in which they are digested: one digest for each.

    Attributes:
        cells: Which cells.
        chunks: Ranges ``[start, end)`` of tokens of the sequence, in order. A state has one chunk,
            the request's tokens, and is digested as a whole.

    Raises:
        PlanError: The chunks are not in order, or overlap.
    """

    cells: CellRange
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        """Refuse chunks that may have come from a peer and are none."""
        edges = [token for chunk in self.chunks for token in chunk]
        if not edges or any(a > b for a, b in pairwise([0, *edges, TOKENS_MAX])):
            raise PlanError(
                f"{self.cells}: chunks {self.chunks!r:.80} are no ranges of tokens in order; give "
                "(start, end) pairs with 0 <= start <= end, each after the one before"
            )

    def where(self, chunk: int) -> str:
        """Say which cells and tokens a digest is of."""
        start, end = self.chunks[chunk]
        return f"{self.cells}, tokens [{start}, {end})"


# --- choosing what is compared -------------------------------------------------------------------


def probes_of(
    consumer: RankCache,
    regions: Iterable[RegionPlan],
    tables: Sequence[BlockTable],
    *,
    start_token: int = 0,
    end_token: int,
    chunk_tokens: int = 256,
) -> tuple[Probe, ...]:
    """Return all that a request moves over one edge, in chunks.

    Made from the consumer's tables, since its null blocks are known to nobody else: what it takes
    no block for is not moved, and not compared.

    Args:
        consumer: What the consumer rank holds.
        regions: What the producer rank gives to it: ``plan.sources[i].regions``, of a plan of
            either end of the edge.
        tables: The request's blocks, one table for each cache group of the consumer.
        start_token: First token that moves.
        end_token: One past the last token that moves.
        chunk_tokens: Tokens of the sequence that share a digest.

    Raises:
        PlanError: The regions are not of this consumer, or chunks have no tokens.
        BlockTableError: A table does not cover the range, or lists impossible blocks.
    """
    start, end = checked_range(start_token, end_token)
    if whole_number("chunk_tokens", chunk_tokens) < 1:
        raise PlanError(f"chunk_tokens is {chunk_tokens}; give at least one token to a digest")
    layers = {layer.key: layer for layer in consumer.layers}
    ranges = [CellRange.of(region) for region in regions]
    targets = [target_of(consumer, layers.get(cells.key), cells) for cells in ranges]
    side = side_of(consumer, tables, (target.layer.group for target in targets))
    known: dict[object, tuple[Chunk, ...]] = {}
    probes = []
    for cells, target in zip(ranges, targets, strict=True):
        key = (target.grid.paging, cells.shares)
        if key not in known:
            first = first_token_needed(consumer.groups[target.layer.group], start, end)
            if target.grid.moves == "pages":
                first = max(start, side.page_start(target.grid, first, end))
            known[key] = _chunks(side, target.grid, cells.shares, (first, end), chunk_tokens)
        if known[key]:
            probes.append(Probe(cells, known[key]))
    return tuple(probes)


def _chunks(
    side: Side, grid: Grid, shares: Shares, tokens: tuple[int, int], chunk_tokens: int
) -> tuple[Chunk, ...]:
    """Cut tokens at multiples of the chunk, and where blocks that hold nothing begin and end."""
    held = held_between(side, grid, shares, *tokens)
    if not held.token.size:
        return ()
    if grid.moves == "state":
        return (tokens,)
    number = held.token // chunk_tokens
    opens = np.flatnonzero(
        np.concatenate(
            ([True], (number[1:] != number[:-1]) | (held.is_null[1:] != held.is_null[:-1]))
        )
    )
    starts = held.token[opens]
    ends = np.append(starts[1:], tokens[1])
    if grid.moves == "tokens":  # pages may reach beyond the chunk that they begin in
        ends = np.minimum(ends, (number[opens] + 1) * chunk_tokens)
    real = ~held.is_null[opens]
    return tuple(zip(starts[real].tolist(), ends[real].tolist(), strict=True))


def sample_probes(probes: Sequence[Probe], count: int, *, seed: int) -> tuple[Probe, ...]:
    """Return at most ``count`` of the chunks of some probes, the same ones for the same seed.

    Args:
        probes: All that could be compared.
        count: The most digests that the result asks for.
        seed: What decides which, such as the request's epoch.
    """
    ends = np.cumsum([len(probe.chunks) for probe in probes], dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    if count >= total:
        return tuple(probes)
    rank = mix64(np.arange(total, dtype=np.uint64) + mix64(np.array([seed % (1 << 64)], np.uint64)))
    chosen = np.sort(np.argsort(rank, kind="stable")[: max(count, 0)])
    picked: dict[int, list[Chunk]] = {}
    of_probe = np.searchsorted(ends, chosen, side="right")
    for at, i in zip(chosen.tolist(), of_probe.tolist(), strict=True):
        chunks = probes[i].chunks
        picked.setdefault(i, []).append(chunks[at - int(ends[i]) + len(chunks)])
    return tuple(Probe(probes[i].cells, tuple(chunks)) for i, chunks in picked.items())


# --- comparing -----------------------------------------------------------------------------------


def first_difference(
    probes: Sequence[Probe], ours: Sequence[UInt64Array], theirs: Sequence[UInt64Array]
) -> str | None:
    """Say which cells differ first, and how many chunks do; None if none does.

    Args:
        probes: What was compared.
        ours: Digests of each probe here.
        theirs: Digests of each probe there.

    Raises:
        PlanError: One side has other than one digest for each chunk.
    """
    counts = [len(probe.chunks) for probe in probes]
    for what, digests in (("here", ours), ("there", theirs)):
        sizes = [np.size(values) for values in digests]
        if sizes != counts:
            raise PlanError(
                f"{sum(sizes)} digests {what} of {len(sizes)} probes, but {len(counts)} probes ask "
                f"for {sum(counts)}; both sides must digest the same probes"
            )
    if not probes:
        return None
    here, there = (np.concatenate(side).astype(np.uint64, copy=False) for side in (ours, theirs))
    off = np.flatnonzero(here != there)
    if not off.size:
        return None
    ends = np.cumsum(counts)
    at = int(np.searchsorted(ends, off[0], side="right"))
    words = probes[at].where(int(off[0] - ends[at] + counts[at]))
    return (
        f"{words}: digest {int(here[off[0]]):#018x} here and {int(there[off[0]]):#018x} there; "
        f"{off.size} of {here.size} digests differ"
    )
