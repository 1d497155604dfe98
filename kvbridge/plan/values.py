"""The values that a plan is made of, and those that go in and out of lowering it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Annotated, Any, Literal, NamedTuple, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import BlockTableError, PlanError
from kvbridge.model import LayerKey, Rank
from kvbridge.plan.shares import ALL_TOKENS, TokenShare

Direction = Literal["read", "write"]
Strategy = Literal["auto", "direct", "staged"]
Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a plan is made.

    Attributes:
        strategy: ``"direct"`` copies every piece to its place; ``"staged"`` moves few large pieces
            and rearranges them on arrival; ``"auto"`` chooses.
        require_all_layers: Refuse to leave out a layer that the consumer holds.

    Raises:
        PlanError: An unknown strategy.
    """

    strategy: Strategy = "auto"
    require_all_layers: bool = True

    def __post_init__(self) -> None:
        """Refuse unknown strategies."""
        if self.strategy not in ("auto", "direct", "staged"):
            raise PlanError(f"strategy {self.strategy!r} is unknown; known: auto, direct, staged")


Moves = Literal["tokens", "pages", "state"]
"""What is moved at a time: any tokens, whole pages only, or the one block of a state."""


class Paging(NamedTuple):
    """How a sequence is laid over pages; grids of equal paging use the same segments."""

    group: int
    moves: Moves
    page_tokens: int
    pages_per_block: int
    cells: int
    share: TokenShare


Pagings = tuple[Paging, Paging]
"""Paging here and there."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How one side of a region steps through memory, without addresses.

    Attributes:
        group: Index of the cache group whose block table says which pages.
        moves: What is moved at a time.
        page_stride: Bytes between pages.
        page_tokens: Tokens of the sequence that a page stands for; 0 for state.
        pages_per_block: Pages of a logical block.
        unit_stride: Bytes between units.
        token_stride: Bytes between neighbouring cells of a unit.
        cells: Cells of a unit in a page; its tokens where any tokens may move.
        share: Which tokens of a sequence the rank holds.
    """

    group: NotNegative
    moves: Moves
    page_stride: Positive
    page_tokens: NotNegative
    pages_per_block: Positive
    unit_stride: NotNegative
    token_stride: NotNegative
    cells: Positive
    share: TokenShare = ALL_TOKENS

    @property
    def paging(self) -> Paging:
        """What decides which pages hold which tokens."""
        return Paging(self.group, self.moves, self.page_tokens, self.pages_per_block,
                      self.cells, self.share)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Units of one component of one layer that one pair of ranks exchanges.

    Attributes:
        layer: Global index of the layer.
        name: Name of the layer.
        component: Component of both sides; ``k`` or ``v`` also where one side holds ``kv``.
        unit_start: Global index of the first unit.
        unit_end: One past the last unit.
        cell_bytes: Bytes of one (unit, token) cell.
        local: How this rank's pages hold the cells.
        remote: How the remote rank's pages hold them.
    """

    layer: int
    name: str
    component: str
    unit_start: int
    unit_end: int
    cell_bytes: int
    local: Grid
    remote: Grid

    @property
    def key(self) -> LayerKey:
        """What pairs layers across engines."""
        return (self.layer, self.name)

    @property
    def unit_count(self) -> int:
        """Number of units."""
        return self.unit_end - self.unit_start

    @property
    def nbytes_per_token(self) -> int:
        """Bytes that one token of this region has; 0 for state, which has no tokens."""
        if self.local.moves == "state":
            return 0
        page_nbytes = self.unit_count * self.cell_bytes * self.local.cells
        return page_nbytes // self.local.page_tokens


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All that is exchanged with one remote rank.

    Attributes:
        rank: Coordinate ``(pp, tp)`` of the remote rank.
        regions: The pieces, ordered by layer, component and unit.
    """

    rank: Rank
    regions: tuple[RegionPlan, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """Units that a plan must write, each exactly once.

    Attributes:
        rank: Coordinate of the rank whose memory is written.
        layer: Global index of the layer.
        name: Name of the layer.
        component: Component, named as in the regions.
        unit_start: First unit.
        unit_end: One past the last unit.
    """

    rank: Rank
    layer: int
    name: str
    component: str
    unit_start: int
    unit_end: int


@dataclass(frozen=True, slots=True)
class TPMapping:
    """Which remote tensor-parallel ranks a local rank reads, by the formulas of the field.

    Attributes:
        source_ranks_per_group: Remote ranks to read, for each cache group.
        all_source_ranks: Their sorted union.
        rank_to_attention_slot: Which part of the local heads each remote rank fills.
        rank_offset_factor: Where the local heads start in the remote rank's, in local shares.
        local_consumers: How many local ranks report to one remote rank.
    """

    source_ranks_per_group: tuple[tuple[int, ...], ...]
    all_source_ranks: tuple[int, ...]
    rank_to_attention_slot: Mapping[int, int]
    rank_offset_factor: int
    local_consumers: int


_PLAIN_TABLES = (list, tuple, range, np.ndarray)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in one cache group.

    Tables are equal when they list the same blocks, whatever the lists are made of. Where ranks
    share out the tokens of a sequence, a block is full of the rank's own tokens, so an entry covers
    as many times more tokens of the sequence as there are ranks.

    Attributes:
        block_ids: Logical blocks in the order of the tokens they hold: a sequence or a flat array.
        start_token: Token that the first entry begins with.
        null_block_id: Entries of this id hold nothing; they keep their position.

    Raises:
        BlockTableError: The blocks are no sequence, or the first token is no token.
    """

    block_ids: Sequence[int] | NDArray[np.integer[Any]]
    start_token: int = 0
    null_block_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no table; its entries are looked at when they are used."""
        ids = self.block_ids
        if not (isinstance(ids, _PLAIN_TABLES) or _is_listing(ids)) or getattr(ids, "ndim", 1) == 0:
            raise BlockTableError(
                f"a block table lists block ids, got {type(ids).__name__}; pass a list or an array "
                "of integers"
            )
        if type(self.start_token) is not int:
            object.__setattr__(self, "start_token", whole_number("start_token", self.start_token))
        if self.null_block_id is not None and type(self.null_block_id) is not int:
            null = whole_number("null_block_id", self.null_block_id)
            object.__setattr__(self, "null_block_id", null)
        if self.start_token < 0:
            raise BlockTableError(
                f"a block table starts at token {self.start_token}; the first token is 0"
            )

    def __eq__(self, other: object) -> bool:
        """Compare what is listed."""
        if not isinstance(other, BlockTable):
            return NotImplemented
        ours, theirs = ((t.start_token, t.null_block_id) for t in (self, other))
        return ours == theirs and np.array_equal(self.block_ids, other.block_ids)

    def __hash__(self) -> int:
        """Hash what is listed."""
        ids = np.asarray(self.block_ids).ravel().tolist()
        return hash((tuple(ids), self.start_token, self.null_block_id))


def _is_listing(ids: object) -> bool:
    """Whether something rarer than a list can be read as one, such as a tensor."""
    if isinstance(ids, str | bytes):
        return False
    return isinstance(ids, Sequence) or hasattr(ids, "__array__")


def whole_number(name: str, value: SupportsIndex) -> int:
    """Return a number of numpy or Python as Python's.

    Raises:
        BlockTableError: It is none, or not a whole one.
    """
    try:
        return index(value)
    except TypeError:
        raise BlockTableError(
            f"{name} is {value!r}, a {type(value).__name__}; pass a whole number"
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class TransferBatch:
    """The copies between this rank and one remote rank, ready for a transport.

    Shape: local_address, remote_address, nbytes [N] uint64.

    Attributes:
        remote_rank: Coordinate of the remote rank.
        local_address: First byte of each piece here.
        remote_address: First byte of each piece there.
        nbytes: Bytes of each piece.
        piece_count: Number of pieces before neighbours were merged.
    """

    remote_rank: Rank
    local_address: UInt64Array
    remote_address: UInt64Array
    nbytes: UInt64Array
    piece_count: int = 0

    @property
    def total_nbytes(self) -> int:
        """Sum over all pieces."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """One request and one remote rank, in block ids, for people and logs.

    Attributes:
        remote_rank: Coordinate of the remote rank.
        local_block_ids: For each local cache group, the blocks that take part.
        remote_block_ids: For each remote cache group, the blocks that take part.
    """

    remote_rank: Rank
    local_block_ids: tuple[tuple[int, ...], ...]
    remote_block_ids: tuple[tuple[int, ...], ...]
