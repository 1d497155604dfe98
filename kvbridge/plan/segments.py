"""Block tables turned into *segments*: tokens that lie in one page here and one page there.

Pieces are paired by the position of their tokens in the sequence, never by their position in a
list, so prefix hits, look-ahead blocks, page sizes that differ and tokens that ranks share out
need no case of their own (reports B05, B07, B08, B09, B20).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import BlockTableError
from kvbridge.model import CacheGroup
from kvbridge.plan.pieces import Pieces, constant, merge_runs
from kvbridge.plan.values import BlockTable, Grid, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Runs of cells, in order of local pages.

    Shape: all [S] int64, S segments.

    Attributes:
        local_page: Page here.
        local_token: First token within that page.
        remote_page: Page there.
        remote_token: First token within that page.
        tokens: Number of tokens; for pages and state, that move whole, all their cells.
        cells: Cells of a page, if every segment is known to be a whole page on both sides; else 0.
        apart: Whether no two local pages are known to be neighbours.
    """

    local_page: Int64Array
    local_token: Int64Array
    remote_page: Int64Array
    remote_token: Int64Array
    tokens: Int64Array
    cells: int = 0
    apart: bool = False

    def __len__(self) -> int:
        """Return the number of segments."""
        return int(self.tokens.size)

    @classmethod
    def of_whole_pages(cls, local: Int64Array, remote: Int64Array, cells: int) -> "Segments":
        """Return segments that move all cells of their pages, in order of local pages."""
        order = local.argsort()
        local, remote = local[order], remote[order]
        step = np.minimum.reduce(local[1:] - local[:-1], initial=2)
        zeros = constant(0, local.size)
        return cls(local, zeros, remote, zeros, constant(cells, local.size), cells, step > 1)

    def in_order(self) -> "Segments":
        """Return the segments in order of local pages.

        Blocks that an allocator handed out backwards are neighbours too.
        """
        if not np.logical_or.reduce(self.local_page[1:] < self.local_page[:-1]):
            return self
        return self.select(np.argsort(self.local_page, kind="stable"))

    def select(self, which: NDArray[Any] | slice) -> "Segments":
        """Return some of the segments, by mask, index or slice."""
        return Segments(
            self.local_page[which],
            self.local_token[which],
            self.remote_page[which],
            self.remote_token[which],
            self.tokens[which],
            self.cells,
        )

    def of_length(self, tokens: int, *, but: bool = False) -> "Segments":
        """Return the segments of a length, or all but those; mostly that is all or none."""
        if self.cells == tokens:
            return NO_SEGMENTS if but else self
        return self.select((self.tokens == tokens) ^ but)

    def offsets(self, local: Grid, remote: Grid) -> tuple[Int64Array, Int64Array]:
        """Return where the segments start, in bytes from page 0, here and there."""
        here, there = self.local_page * local.page_stride, self.remote_page * remote.page_stride
        if not self.cells:
            here += self.local_token * local.token_stride
            there += self.remote_token * remote.token_stride
        return here, there

    def runs(self, local: Grid, remote: Grid, nbytes: Int64Array) -> Pieces:
        """Return offsets and lengths, with pages joined that are neighbours on both sides.

        Args:
            local: How pages lie here.
            remote: The same there.
            nbytes: Length of each segment.
        """
        here, there = self.offsets(local, remote)
        return (here, there, nbytes) if self.apart else merge_runs(here, there, nbytes)


NO_SEGMENTS = Segments(*np.empty((5, 0), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """One side's tokens, cut wherever a page or a share begins.

    Shape: all [S] int64.

    Attributes:
        first: First token of each run.
        tokens: Number of tokens.
        page: Page that holds them.
        token: Place of the first one within that page.
        is_null: Which runs lie in blocks that hold nothing; None if there are no such blocks.
    """

    first: Int64Array
    tokens: Int64Array
    page: Int64Array
    token: Int64Array
    is_null: NDArray[np.bool_] | None


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

    def what(self, group: int) -> str:
        """Name a table, for messages."""
        return f"{self.name} block table of group {group}"

    def runs(self, grid: Grid, start: int, end: int, *, packed: bool) -> Runs:
        """Return where the tokens ``[start, end)`` lie.

        Args:
            grid: How the side lays a sequence over pages.
            start: First token.
            end: One past the last token.
            packed: Count tokens as the rank packs them, instead of as the sequence has them.

        Raises:
            BlockTableError: The table does not cover the tokens, or lists impossible blocks.
        """
        table, share = self.tables[grid.group], grid.share
        origin = share.before(table.start_token)
        first, last = share.before(start), share.before(end)
        ids = self._blocks(grid, table, (first - origin, last - origin), (start, end))
        cuts = _multiples(origin, grid.page_tokens, first, last)
        if packed or share.is_whole:
            # Cut at every page and nowhere else, so pages follow one another in the table.
            skipped, inside = divmod(first - origin, grid.page_tokens)
            pages = _pages_of(ids, grid.pages_per_block)[skipped : skipped + cuts.size]
            token = np.zeros_like(cuts)
            token[:1] = inside
        else:
            cuts = np.union1d(cuts, _multiples(0, share.interleave, first, last))
            page_index, token = np.divmod(cuts - origin, grid.page_tokens)
            pages = _pages_of(ids, grid.pages_per_block)[page_index]
        null = table.null_block_id
        return Runs(
            first=cuts if packed else share.tokens(cuts),
            tokens=_steps(cuts, last),
            page=pages,
            token=token,
            is_null=None if null is None else pages // grid.pages_per_block == null,
        )

    def whole_pages(self, grid: Grid, start: int, end: int) -> Int64Array | None:
        """Return the pages of the tokens ``[start, end)``, if they are whole ones in use.

        The short way to what most requests need; None sends the others round by ``runs``.

        Raises:
            BlockTableError: The table does not cover the tokens, or lists impossible blocks.
        """
        table, share = self.tables[grid.group], grid.share
        if table.null_block_id is not None:
            return None
        origin = share.before(table.start_token)
        first, last = share.before(start) - origin, share.before(end) - origin
        if first % grid.page_tokens or last % grid.page_tokens:
            return None
        ids = self._blocks(grid, table, (first, last), (start, end))
        return _pages_of(ids, grid.pages_per_block)[
            first // grid.page_tokens : last // grid.page_tokens
        ]

    def page_start(self, grid: Grid, start: int, end: int) -> int:
        """Return the first token of the page that holds the first of ``[start, end)``, if any."""
        share = grid.share
        if share.before(start) == share.before(end):
            return start
        origin = share.before(self.tables[grid.group].start_token)
        within = (share.before(start) - origin) % grid.page_tokens
        return int(share.tokens(np.array(share.before(start) - within)))

    def state_block(self, grid: Grid, start: int, end: int) -> int | None:
        """Return the block that a state group's table lists, if any.

        Raises:
            BlockTableError: The table lists several blocks, an impossible one, or has no entry at
                all though tokens ``[start, end)`` should move to it.
        """
        table = self.tables[grid.group]
        ids = self._integers(table, grid.group).astype(np.int64, copy=False)
        if not ids.size and self.is_destination and start < end:
            raise BlockTableError(
                f"{self.what(grid.group)} is empty, but tokens [{start}, {end}) come with a state; "
                "list the block that takes it, or the null block if none does"
            )
        real = np.unique(ids if table.null_block_id is None else ids[ids != table.null_block_id])
        if real.size > 1:
            raise BlockTableError(
                f"{self.what(grid.group)} lists blocks {real[:8].tolist()}; a state is one block: "
                "list the block that holds it now"
            )
        self._check_ids(grid.group, real)
        return int(real[0]) if real.size else None

    def refuse_null(self, grid: Grid, token: int) -> NoReturn:
        """Say that a token must move which this side's table has no block for.

        Raises:
            BlockTableError: Always.
        """
        table, share = self.tables[grid.group], grid.share
        place = share.before(token) - share.before(table.start_token)
        raise BlockTableError(
            f"{self.what(grid.group)} has a null block for token {token}, which must move: entry "
            f"{place // (grid.page_tokens * grid.pages_per_block)} is {table.null_block_id}, the "
            "destination is a real block; list the block that holds the token, or move fewer tokens"
        )

    def _blocks(
        self, grid: Grid, table: BlockTable, place: tuple[int, int], tokens: tuple[int, int]
    ) -> Int64Array:
        """Return the checked ids of the entries up to the last one needed.

        Args:
            grid: How the side lays a sequence over pages.
            table: Where its entries come from.
            place: First position needed and one past the last, counted from the table's first.
            tokens: What that is in the sequence, for the message.
        """
        first, last = place
        if first >= last:
            return np.empty(0, np.int64)
        block_tokens = grid.page_tokens * grid.pages_per_block
        needed = -(-last // block_tokens)
        listed = self._integers(table, grid.group)
        if first < 0 or needed > listed.size:
            step = block_tokens * grid.share.size
            covered = table.start_token + listed.size * step
            raise BlockTableError(
                f"{self.what(grid.group)} covers tokens [{table.start_token}, {covered}) in "
                f"{listed.size} blocks of {step}; tokens [{tokens[0]}, {tokens[1]}) must "
                "move; list every block that holds them"
            )
        ids = listed[:needed].astype(np.int64, copy=False)
        real = ids if table.null_block_id is None else ids[ids != table.null_block_id]
        self._check_ids(grid.group, real)
        return ids

    def _integers(self, table: BlockTable, group: int) -> NDArray[Any]:
        try:
            ids: NDArray[Any] = np.asarray(table.block_ids)
        except ValueError as error:  # lists of unequal lengths
            raise BlockTableError(f"{self.what(group)} must list integers: {error}") from error
        if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            self._check_sizes(table, group)
            raise BlockTableError(
                f"{self.what(group)} must list integers, got {ids.dtype} {ids.shape}"
            )
        return ids

    def _check_sizes(self, table: BlockTable, group: int) -> None:
        """Name a whole number that 64 bits do not hold, instead of what numpy makes of it."""
        large = [i for i in table.block_ids if type(i) is int and not -(1 << 63) <= i < 1 << 63]
        if large:
            raise self._no_block(group, large[0])

    def _no_block(self, group: int, block: int) -> BlockTableError:
        return BlockTableError(
            f"{self.what(group)} lists block {block}; blocks 0 to "
            f"{self.blocks[group] - 1} exist; pass the engine's own block ids"
        )

    def _check_ids(self, group: int, real: Int64Array) -> None:
        if not real.size:
            return
        limit = self.blocks[group]
        if np.maximum.reduce(real.view(np.uint64)) >= limit:  # negative ones are large as these
            raise self._no_block(group, real[(real < 0) | (real >= limit)][0])
        if not self.is_destination:
            return
        ordered = np.sort(real)
        same = ordered[1:] == ordered[:-1]
        if np.logical_or.reduce(same):
            twice = ordered[1:][same][0]
            raise BlockTableError(
                f"{self.what(group)} lists block {twice} twice; a destination block can hold the "
                "tokens of one position only"
            )


def first_token_needed(group: CacheGroup, start: int, end: int) -> int:
    """Return the first token of ``[start, end)`` that what comes after can still see.

    Windows are counted from the right end; a chunk is the one that holds the last token.
    """
    if group.window_tokens is None or start >= end:
        return start
    if group.kind == "sliding_window":
        return max(start, end - group.window_tokens)
    if group.kind == "chunked":
        return max(start, (end - 1) // group.window_tokens * group.window_tokens)
    return start


def segments_between(
    local: Side, remote: Side, here: Grid, there: Grid, start: int, end: int
) -> Segments:
    """Return what of the tokens ``[start, end)`` lies where, on both sides.

    Raises:
        BlockTableError: A table does not cover them, lists impossible blocks, or a source block
            is null where its destination is not.
    """
    if here.moves == "state":
        return _state(local, remote, here, there, start, end)
    # Tokens that both sides pack alike are neighbours, though the sequence has others between.
    packed = here.share == there.share
    if packed and here.moves == "tokens" and here.page_tokens == there.page_tokens:
        our_pages = local.whole_pages(here, start, end)
        their_pages = remote.whole_pages(there, start, end)
        if our_pages is not None and their_pages is not None:
            return Segments.of_whole_pages(our_pages, their_pages, here.cells)
    ours = local.runs(here, start, end, packed=packed)
    theirs = remote.runs(there, start, end, packed=packed)
    if here.moves == "pages":
        _check_whole_pages(local, here, ours, theirs)
    segments, first, at_ours, at_theirs = _intersection(ours, theirs)
    if ours.is_null is not None or theirs.is_null is not None:
        null_here = _null(ours, at_ours, len(segments))
        null_there = _null(theirs, at_theirs, len(segments))
        source, grid = (remote, there) if local.is_destination else (local, here)
        missing = null_there & ~null_here if local.is_destination else null_here & ~null_there
        if missing.any():
            token = first[missing][:1]
            source.refuse_null(grid, int((grid.share.tokens(token) if packed else token)[0]))
        segments = segments.select(~(null_here | null_there))
    if here.moves == "pages":
        return Segments.of_whole_pages(segments.local_page, segments.remote_page, here.cells)
    return segments.in_order()


def _pages_of(ids: Int64Array, pages_per_block: int) -> Int64Array:
    """Return the pages of blocks, in the order of their tokens."""
    if pages_per_block == 1:
        return ids
    pages: Int64Array = ids[:, None] * pages_per_block + np.arange(pages_per_block)
    return pages.ravel()


def _steps(cuts: Int64Array, last: int) -> Int64Array:
    """Return how far it is from each cut to the next, and from the last one to the end."""
    steps = np.empty_like(cuts)
    np.subtract(cuts[1:], cuts[:-1], out=steps[:-1])
    steps[-1:] = last - cuts[-1:]
    return steps


def _multiples(origin: int, step: int, first: int, last: int) -> Int64Array:
    """Return ``first`` and every later position, before ``last``, a step away from the origin."""
    start = origin + (first - origin) // step * step
    cuts = np.arange(start, last, step, dtype=np.int64)
    if first < last:
        cuts[0] = first
        return cuts
    return cuts[:0]


_Where = NDArray[np.intp] | slice


def _intersection(ours: Runs, theirs: Runs) -> tuple[Segments, Int64Array, _Where, _Where]:
    """Return the common refinement of two cuttings.

    Beside it stand the first token of each segment, and which run of each side it comes from.
    """
    if (
        ours.first.size == theirs.first.size
        and (ours.first == theirs.first).all()
        and (ours.tokens == theirs.tokens).all()
    ):
        segments = Segments(ours.page, ours.token, theirs.page, theirs.token, ours.tokens)
        return segments, ours.first, slice(None), slice(None)
    ends = ours.first + ours.tokens, theirs.first + theirs.tokens
    cuts = np.unique(np.concatenate((ours.first, theirs.first, *ends)))
    if not ours.first.size or not theirs.first.size:  # of so few tokens, a share may have none
        cuts = cuts[:0]
    first, tokens = cuts[:-1], np.diff(cuts)
    at = [np.searchsorted(side.first, first, side="right") - 1 for side in (ours, theirs)]
    held = (at[0] >= 0) & (at[1] >= 0)
    held &= (first < ends[0][at[0]]) & (first < ends[1][at[1]])
    first, tokens = first[held], tokens[held]
    here, there = at[0][held], at[1][held]
    segments = Segments(
        ours.page[here],
        ours.token[here] + first - ours.first[here],
        theirs.page[there],
        theirs.token[there] + first - theirs.first[there],
        tokens,
    )
    return segments, first, here, there


def _null(runs: Runs, at: _Where, count: int) -> NDArray[np.bool_]:
    return np.zeros(count, bool) if runs.is_null is None else runs.is_null[at]


def _state(local: Side, remote: Side, here: Grid, there: Grid, start: int, end: int) -> Segments:
    """Return the pages of the one block that holds a state, if the destination lists one."""
    ours, theirs = local.state_block(here, start, end), remote.state_block(there, start, end)
    wanted, given, source = (
        (ours, theirs, remote) if local.is_destination else (theirs, ours, local)
    )
    if wanted is None:
        return NO_SEGMENTS
    if given is None or ours is None or theirs is None:
        raise BlockTableError(
            f"{source.what(here.group if source is local else there.group)} lists no block, but "
            f"the destination expects the state in block {wanted}; list the block that holds it"
        )
    pages = np.arange(here.pages_per_block, dtype=np.int64)
    return Segments.of_whole_pages(
        ours * here.pages_per_block + pages, theirs * there.pages_per_block + pages, here.cells
    )


def _check_whole_pages(local: Side, here: Grid, ours: Runs, theirs: Runs) -> None:
    """Refuse ranges that begin within a page which can only be moved whole."""
    for runs in (ours, theirs):
        if runs.token.any():
            raise BlockTableError(
                f"{local.what(here.group)}: pages of {here.page_tokens} tokens move whole, but the "
                f"range begins with token {int(runs.token[runs.token > 0][0])} of one; start where "
                "a page starts on both sides"
            )
