"""Digests of what a request's blocks hold, which do not depend on how an engine lays them out.

A digest is taken of the same cells in the same terms on both sides of an edge: layers, components,
units and tokens of the sequence as the plan names them, never pages, strides or ranks. See
``digest_probes`` for what is compared and ``digest_hash`` for how sure a digest is.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import BlockTableError, PlanError, UnsupportedLayoutError
from kvbridge.model import RankCache
from kvbridge.model.arrays import bytes_at
from kvbridge.plan.digest_cells import Held, Target, held_between, side_of, target_of
from kvbridge.plan.digest_hash import content_hashes, finished, placed, positions
from kvbridge.plan.digest_probes import Probe
from kvbridge.plan.segments import Side
from kvbridge.plan.values import BlockTable, UInt64Array

SLAB_NBYTES = 1 << 19
"""Cells that are gathered at a time: little enough to stay in a core's cache."""


def digests_of(
    cache: RankCache, probes: Sequence[Probe], tables: Sequence[BlockTable]
) -> tuple[UInt64Array, ...]:
    """Return the digests of each probe's chunks, read from this process's memory.

    The other rank of the edge returns the same for the same probes if it holds the same bytes. The
    blocks must be quiet meanwhile. Beside a few numbers for each token, memory for one slab of
    cells is used, whatever the size of the request.

    Args:
        cache: What this rank holds.
        probes: What to digest.
        tables: The request's blocks here, one table for each cache group.

    Raises:
        PlanError: The rank does not hold the cells, or not in the probes' terms.
        BlockTableError: A table does not cover the tokens, or has no block for some.
        UnsupportedLayoutError: The cells lie in memory that the host cannot read.
    """
    layers = {layer.key: layer for layer in cache.layers}
    targets = [target_of(cache, layers.get(p.cells.key), p.cells) for p in probes]
    side = side_of(cache, tables, (target.layer.group for target in targets))
    hulls: dict[object, tuple[int, int]] = {}
    keys = [(t.grid.paging, p.cells.shares) for p, t in zip(probes, targets, strict=True)]
    for key, probe in zip(keys, probes, strict=True):
        start, end = hulls.get(key, probe.chunks[0])
        hulls[key] = min(start, probe.chunks[0][0]), max(end, probe.chunks[-1][1])
    held: dict[object, Held] = {}
    digests = []
    for key, probe, target in zip(keys, probes, targets, strict=True):
        if key not in held:
            held[key] = held_between(side, target.grid, probe.cells.shares, *hulls[key])
        chosen, counts = _chosen(held[key], probe, target, side)
        digests.append(_digests(_memory_of(cache, target), probe, target, chosen, counts))
    return tuple(digests)


def _chosen(held: Held, probe: Probe, target: Target, side: Side) -> tuple[Held, NDArray[np.int64]]:
    """Return the cells of a probe's chunks, and how many each chunk has.

    Raises:
        PlanError: A state is to be digested in parts.
        BlockTableError: A cell lies in a block that holds nothing.
    """
    if target.grid.moves == "state":
        if len(probe.chunks) > 1:
            raise PlanError(
                f"{probe.cells} is state, but {len(probe.chunks)} chunks of tokens are asked for; "
                "a state has one digest: ask for one chunk"
            )
        if not held.token.size:
            raise BlockTableError(
                f"{side.what(target.grid.group)} lists no block, but {probe.cells} is asked for; "
                "list the block that holds the state"
            )
        return held, np.array([held.token.size])
    starts, ends = np.array(probe.chunks, np.int64).T
    first, last = (np.searchsorted(held.token, edges) for edges in (starts, ends))
    counts = last - first
    index = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
    chosen = held.select(index)
    if chosen.is_null.any():
        at = int(chosen.token[chosen.is_null][0])
        raise BlockTableError(
            f"{side.what(target.grid.group)} has a null block for token {at}, which {probe.cells} "
            "is asked for; list the block that holds the token, or ask for other tokens"
        )
    return chosen, counts


def _memory_of(cache: RankCache, target: Target) -> NDArray[np.void]:
    """Return a component's cells where they lie. Shape: [pages, units, cells of a unit].

    Raises:
        UnsupportedLayoutError: The host cannot read them.
    """
    layer, component, _ = target
    start, end = layer.extent(component)
    region = next(r for r in cache.regions if r.address <= start and end <= r.end)
    if region.memory_kind != "dram":
        raise UnsupportedLayoutError(
            f"{cache.where}, layer {layer.key}, component {component.name!r} lies in "
            f"{region.memory_kind!r} memory, digests are taken of 'dram'; copy the request's "
            "blocks to host memory and digest them there, or leave this check off"
        )
    return np.ndarray(
        (layer.page_count, component.unit_count, component.token_count),
        np.dtype((np.void, component.cell_bytes)),
        bytes_at(start, end - start),
        strides=(layer.page_stride, component.unit_stride, component.token_stride),
    )


def _digests(
    memory: NDArray[np.void],
    probe: Probe,
    target: Target,
    chosen: Held,
    counts: NDArray[np.int64],
) -> UInt64Array:
    """Walk a probe's cells in slabs, and add up their hashes by chunk."""
    cells = probe.cells
    units = cells.unit_end - cells.unit_start
    held_unit = cells.unit_start - target.component.unit_start
    position = positions(chosen.token, chosen.step)
    chunk = np.repeat(np.arange(counts.size), counts)
    sums = np.zeros(counts.size, np.uint64)
    step = max(1, SLAB_NBYTES // cells.cell_bytes)
    for start in range(0, chosen.token.size * units, step):
        index = np.arange(start, min(start + step, chosen.token.size * units))
        row, unit = np.divmod(index, units)
        contents = content_hashes(memory[chosen.page[row], held_unit + unit, chosen.place[row]])
        np.add.at(sums, chunk[row], placed(contents, position[row], cells.unit_start + unit))
    return finished(sums, counts * units, cells.cell_bytes)
