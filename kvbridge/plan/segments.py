"""Block tables turned into *segments*: tokens that lie in one page here and one page there.

Pieces are paired by the position of their tokens in the sequence, never by their position in a
list, so prefix hits, look-ahead blocks and page sizes that differ need no case of their own
(reports B05, B08, B09, B20).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import BlockTableError
from kvbridge.plan.values import BlockTable, Grid, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Runs of tokens, in order of local pages.

    Shape: all [S] int64, S segments.

    Attributes:
        local_page: Page here.
        local_token: First token within that page.
        remote_page: Page there.
        remote_token: First token within that page.
        tokens: Number of tokens.
    """

    local_page: Int64Array
    local_token: Int64Array
    remote_page: Int64Array
    remote_token: Int64Array
    tokens: Int64Array

    def __len__(self) -> int:
        """Return the number of segments."""
        return int(self.tokens.size)

    def select(self, which: NDArray[Any]) -> "Segments":
        """Return some of the segments, by mask or index."""
        return Segments(
            self.local_page[which],
            self.local_token[which],
            self.remote_page[which],
            self.remote_token[which],
            self.tokens[which],
        )

    def offsets(self, local: Grid, remote: Grid) -> tuple[Int64Array, Int64Array]:
        """Return where the segments start, in bytes from page 0, here and there."""
        return (
            self.local_page * local.page_stride + self.local_token * local.token_stride,
            self.remote_page * remote.page_stride + self.remote_token * remote.token_stride,
        )


@dataclass(frozen=True, slots=True)
class Side:
    """One side's tables, checked as they are used.

    Attributes:
        name: ``"local"`` or ``"remote"``, for messages.
        tables: One table for each cache group.
        blocks: Logical blocks that exist, for each cache group.
        is_destination: Whether this side is written.
    """

    name: str
    tables: Sequence[BlockTable]
    blocks: Mapping[int, int]
    is_destination: bool

    def blocks_of(self, grid: Grid, start: int, end: int) -> tuple[Int64Array, BlockTable]:
        """Return the checked ids of the entries up to the last one needed.

        Raises:
            BlockTableError: The table does not cover the tokens, or lists impossible blocks.
        """
        table = self.tables[grid.group]
        what = f"{self.name} block table of group {grid.group}"
        block_tokens = grid.page_tokens * grid.pages_per_block
        last = -(-(end - table.start_token) // block_tokens)
        if start < table.start_token or last > len(table.block_ids):
            covered = table.start_token + len(table.block_ids) * block_tokens
            raise BlockTableError(
                f"{what} covers tokens [{table.start_token}, {covered}) in "
                f"{len(table.block_ids)} blocks of {block_tokens}; tokens [{start}, {end}) must "
                "move; list every block that holds them"
            )
        ids = np.asarray(table.block_ids)[:last]
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BlockTableError(f"{what} must list integers, got {ids.dtype} {ids.shape}")
        ids = ids.astype(np.int64, copy=False)
        self._check_ids(what, ids, table.null_block_id, self.blocks[grid.group])
        return ids, table

    def _check_ids(self, what: str, ids: Int64Array, null: int | None, limit: int) -> None:
        real = ids if null is None else ids[ids != null]
        if not real.size:
            return
        if real.min() < 0 or real.max() >= limit:
            bad = real[(real < 0) | (real >= limit)][0]
            raise BlockTableError(
                f"{what} lists block {bad}; blocks 0 to {limit - 1} exist; "
                "pass the engine's own block ids"
            )
        if self.is_destination:
            ordered = np.sort(real)
            twice = ordered[1:] == ordered[:-1]
            if twice.any():
                raise BlockTableError(
                    f"{what} lists block {ordered[1:][twice][0]} twice; a destination block "
                    "can hold the tokens of one position only"
                )


def segments_between(
    local: Side, remote: Side, here: Grid, there: Grid, start: int, end: int
) -> Segments:
    """Cut the tokens ``[start, end)`` wherever a page begins on either side.

    Raises:
        BlockTableError: A table does not cover them, lists impossible blocks, or a source block
            is null where its destination is not.
    """
    local_ids, local_table = local.blocks_of(here, start, end)
    remote_ids, remote_table = remote.blocks_of(there, start, end)
    starts = _cuts(local_table.start_token, here, start, end)
    same_cuts = here.page_tokens == there.page_tokens and not (
        (local_table.start_token - remote_table.start_token) % here.page_tokens
    )
    if not same_cuts:
        starts = np.union1d(starts, _cuts(remote_table.start_token, there, start, end))
    tokens = np.diff(starts, append=end)
    local_id, local_page, local_token = _place(starts, local_ids, local_table, here)
    remote_id, remote_page, remote_token = _place(starts, remote_ids, remote_table, there)
    segments = Segments(local_page, local_token, remote_page, remote_token, tokens)
    if local_table.null_block_id is not None or remote_table.null_block_id is not None:
        null_here = local_id == local_table.null_block_id
        null_there = remote_id == remote_table.null_block_id
        destination, source = (
            (null_here, null_there) if local.is_destination else (null_there, null_here)
        )
        _check_null(source & ~destination, starts, remote if local.is_destination else local, here)
        segments = segments.select(~(null_here | null_there))
    if len(segments) > 1 and (segments.local_page[1:] < segments.local_page[:-1]).any():
        # In order of pages, blocks that an allocator handed out backwards are neighbours too.
        segments = segments.select(np.argsort(segments.local_page, kind="stable"))
    return segments


def _cuts(table_start: int, grid: Grid, start: int, end: int) -> Int64Array:
    """Return ``start`` and every token after it where a page begins."""
    first = table_start + (start - table_start) // grid.page_tokens * grid.page_tokens
    cuts = np.arange(first, end, grid.page_tokens, dtype=np.int64)
    cuts[0] = start
    return cuts


def _place(
    tokens: Int64Array, ids: Int64Array, table: BlockTable, grid: Grid
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return block id, page and token within the page, for tokens of the sequence."""
    position = tokens - table.start_token
    page_index = position // grid.page_tokens
    token = position - page_index * grid.page_tokens
    if grid.pages_per_block == 1:
        block = ids[page_index]
        return block, block, token
    block_index = page_index // grid.pages_per_block
    block = ids[block_index]
    within = page_index - block_index * grid.pages_per_block
    return block, block * grid.pages_per_block + within, token


def _check_null(missing: NDArray[np.bool_], starts: Int64Array, source: Side, grid: Grid) -> None:
    if missing.any():
        raise BlockTableError(
            f"{source.name} block table of group {grid.group} has a null block for token "
            f"{int(starts[missing][0])}, which must move; its destination is a real block"
        )
