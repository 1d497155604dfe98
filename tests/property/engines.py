"""Engines and requests as plain values, what their words mean, and how Hypothesis draws them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.plan import BlockTable

Direction = Literal["read", "write"]
Share = tuple[int, int]
GroupKey = tuple[str, int]
"""Layers of one block table: their kind, and which of an engine's pagings."""

Scales = Literal["", "apart", "inside"]

DIRECTIONS: tuple[Direction, ...] = ("read", "write")
NULL = 10_000_000

GROUP_KINDS = {
    "attention": "attention",
    "draft": "attention",
    "sliding_window": "sliding_window",
    "chunked": "chunked",
    "mla": "mla",
    "opaque": "attention",
    "opaque_window": "sliding_window",
    "mamba1": "state",
    "mamba2": "state",
    "gdn": "state",
}
"""Kinds of layers, and the kind of the cache group that each is in."""

OPAQUE_KINDS = ("opaque", "opaque_window")
CONV_PIECES = {"mamba1": "x", "mamba2": "xbc", "gdn": "qkv"}
PIECE_WIDTHS = {"x": 2, "b": 1, "c": 1, "q": 3, "k": 3, "v": 2}
"""Channels of one head (x, v) or of one group (the others)."""


# --- what is drawn -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What both engines cache.

    Attributes:
        layers: For each layer its kind, a key of ``GROUP_KINDS``.
        heads: KV heads of the layers that have any.
        content: Elements of K of one head and token.
        v_content: Elements of V; as many as of K by default.
        scales: Whether K and V of every head and token come with a scale, and where: in a layer of
            its own, or in the same pages.
        window: Tokens of a sliding window, and of a chunk.
        opaque_tokens: Tokens of a page whose inside is nobody's business.
        state_heads: Heads of state layers.
        state_groups: Groups of the convolution pieces that heads share.
        conv_rows: Inputs that the convolution remembers.
        state_pages: Pages of a state's block.
    """

    layers: tuple[str, ...]
    heads: int = 1
    content: int = 2
    v_content: int | None = None
    scales: Scales = ""
    window: int = 8
    opaque_tokens: int = 4
    state_heads: int = 4
    state_groups: int = 1
    conv_rows: int = 3
    state_pages: int = 1

    @property
    def has_opaque_pages(self) -> bool:
        return not set(OPAQUE_KINDS).isdisjoint(self.layers)

    @property
    def contents(self) -> tuple[int, int]:
        """Elements of K and of V."""
        return (self.content, self.content if self.v_content is None else self.v_content)


@dataclass(frozen=True)
class Paging:
    """How a cache group is cut into pages."""

    page_tokens: int
    pages_per_block: int = 1

    @property
    def block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block


@dataclass(frozen=True)
class Layout:
    """How tensors lie in memory.

    Attributes:
        axes: As in ``attention_layer``, content last. Latents have the same order without H and K.
        apart: K and V are tensors of their own.
        padded_axis: The axis whose stride is larger than what it steps over, if any.
        in_rows: The tensors of all layers of a block are neighbours.
        gap: Bytes between two allocations.
        one_region: Register everything at once instead of each allocation.
        tokens_first: In convolution states, the rows come before the channels.
        rows_in_cells: Where they come after them, all rows of a channel are announced as one cell.
    """

    axes: str = "BKHNC"
    apart: bool = False
    padded_axis: str = ""
    in_rows: bool = False
    gap: int = 64
    one_region: bool = False
    tokens_first: bool = False
    rows_in_cells: bool = False


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        shares: For each tp rank, the heads ``[start, end)`` that it holds.
        stages: For each pipeline stage, its number of layers.
        pagings: Layer ``i`` has paging ``i % len(pagings)``.
        layout: How tensors lie in memory.
        blocks: Logical blocks of each group.
        base: Address of the first rank's memory.
        dcp: Ranks that share out the tokens; tp rank ``r`` has share ``r % dcp``.
        interleave: Tokens that stay together in that.
    """

    shares: tuple[Share, ...]
    stages: tuple[int, ...]
    pagings: tuple[Paging, ...] = (Paging(4),)
    layout: Layout = Layout()
    blocks: int = 8
    base: int = 1 << 20
    dcp: int = 1
    interleave: int = 1

    @property
    def tp(self) -> int:
        return len(self.shares)


@dataclass(frozen=True)
class Tables:
    """One request's block tables in one engine, one for each group."""

    of_group: Mapping[GroupKey, BlockTable]


@dataclass(frozen=True)
class Case:
    """A transfer: the tokens ``[start, end)`` of one request, from producer to consumer."""

    model: Model
    producer: Engine
    consumer: Engine
    producer_tables: Tables
    consumer_tables: Tables
    start: int
    end: int
    direction: Direction = "read"
    assume_even: bool = False


# --- what the words mean -------------------------------------------------------------------------


def even_shares(heads: int, tp: int) -> tuple[Share, ...]:
    """Return the usual split: contiguous, whole heads replicated where ranks outnumber them."""
    return tuple(
        (r * heads // tp, max(r * heads // tp + 1, (r + 1) * heads // tp)) for r in range(tp)
    )


def group_key(model: Model, engine: Engine, layer: int) -> GroupKey:
    return model.layers[layer], layer % len(engine.pagings)


def group_keys(model: Model, engine: Engine) -> list[GroupKey]:
    return sorted({group_key(model, engine, layer) for layer in range(len(model.layers))})


def paging_of(model: Model, engine: Engine, key: GroupKey) -> Paging:
    kind, index = key
    paging = engine.pagings[index]
    if kind in OPAQUE_KINDS:
        return replace(paging, page_tokens=model.opaque_tokens)
    if GROUP_KINDS[kind] == "state":
        return replace(paging, pages_per_block=model.state_pages)
    return paging


def piece_units(model: Model, engine: Engine, piece: str, tp_rank: int) -> tuple[int, int, int]:
    """Return the first channel that a rank holds of a convolution piece, one past the last, all.

    Heads are split; groups too if they can be, else every rank holds all of them.
    """
    of_heads = piece in "xv"
    count = model.state_heads if of_heads else model.state_groups
    splits = of_heads or count % engine.tp == 0
    start, end = even_shares(count, engine.tp)[tp_rank] if splits else (0, count)
    width = PIECE_WIDTHS[piece]
    return start * width, end * width, count * width


def own_tokens(engine: Engine, tp_rank: int, first: int, end: int) -> NDArray[np.int64]:
    """Return the tokens of ``[first, end)`` that a rank holds; it packs them one after another."""
    tokens = np.arange(first, end)
    own: NDArray[np.int64] = tokens[
        tokens // engine.interleave % engine.dcp == tp_rank % engine.dcp
    ]
    return own


def needed(
    model: Model, kind: str, tokens: NDArray[np.int64], start: int, end: int
) -> NDArray[np.bool_]:
    """Return which tokens must move: those asked for that what comes next can still see."""
    mask = (start <= tokens) & (tokens < end)
    if GROUP_KINDS[kind] == "sliding_window":
        mask &= tokens >= end - model.window
    if GROUP_KINDS[kind] == "chunked":
        mask &= tokens // model.window == (end - 1) // model.window
    return mask


# --- what hypothesis draws -----------------------------------------------------------------------

BASES = (1 << 20, 0x7F12_3456_7000, (1 << 64) - (1 << 28))
SCALES: tuple[Scales, ...] = ("", "", "apart", "inside")
PLAIN_KINDS = ("attention", "attention", "mla")


@st.composite
def models(draw: st.DrawFn, *, plain: bool) -> Model:
    """Any mixture of layers, and sometimes a draft model's behind them."""
    kinds = PLAIN_KINDS if plain else (*PLAIN_KINDS, *(k for k in GROUP_KINDS if k != "draft"))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    drafts = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return Model(
        layers=(*layers, *["draft"] * drafts),
        heads=draw(st.integers(1, 8)),
        content=draw(st.integers(1, 3)),
        v_content=draw(st.sampled_from([None, None, 1, 2])),
        scales=draw(st.sampled_from(SCALES)),
        window=draw(st.integers(1, 24)),
        opaque_tokens=draw(st.integers(1, 5)),
        state_heads=draw(st.integers(1, 8)),
        state_groups=draw(st.integers(1, 4)),
        conv_rows=draw(st.integers(1, 3)),
        state_pages=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def shares(draw: st.DrawFn, heads: int, most: int) -> tuple[Share, ...]:
    """The usual split over 1 to ``most`` ranks, or any intervals that cover all heads."""
    if draw(st.integers(0, 3)):
        return even_shares(heads, draw(st.integers(1, most)))
    cuts = sorted({0, heads, *draw(st.lists(st.integers(0, heads), max_size=min(3, most - 1)))})
    extra = st.tuples(st.integers(0, heads - 1), st.integers(1, heads))
    extras = [(a, min(heads, a + n)) for a, n in draw(st.lists(extra, max_size=min(3, most - 1)))]
    return tuple(draw(st.permutations([*pairwise(cuts), *extras])))


@st.composite
def layouts(draw: st.DrawFn, model: Model) -> Layout:
    apart = draw(st.booleans())
    has_pair_axis = not apart and model.contents[0] == model.contents[1] and draw(st.booleans())
    axes = "".join(draw(st.permutations("BKHN" if has_pair_axis else "BHN")))
    in_rows = draw(st.booleans())
    if in_rows or model.scales == "inside":
        axes = "B" + axes.replace("B", "")
    return Layout(
        axes=axes + "C",
        apart=apart,
        padded_axis=draw(st.sampled_from(["", *axes])),
        in_rows=in_rows,
        gap=draw(st.sampled_from([0, 64])),
        one_region=draw(st.booleans()),
        tokens_first=draw(st.booleans()),
        rows_in_cells=draw(st.booleans()),
    )


TokenSplit = tuple[int, int]
"""Ranks that share out the tokens, and tokens that stay together."""


@st.composite
def token_splits(draw: st.DrawFn, model: Model) -> TokenSplit:
    size = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    if model.has_opaque_pages:  # ranges of such pages begin where all shares begin anew
        return min(size, 2), draw(st.integers(1, 2))
    return size, draw(st.integers(1, 8))


@st.composite
def engines(draw: st.DrawFn, model: Model, split: TokenSplit) -> Engine:
    layers = len(model.layers)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, layers), max_size=2))), layers]
    pagings = st.builds(Paging, st.integers(1, 9), st.integers(1, 3))
    dcp, interleave = split
    return Engine(
        # As engines do, the ranks that share out tokens hold the same heads.
        shares=tuple(s for s in draw(shares(model.heads, 8 // dcp)) for _ in range(dcp)),
        stages=tuple(b - a for a, b in pairwise(cuts)),
        pagings=tuple(draw(st.lists(pagings, min_size=1, max_size=2))),
        layout=draw(layouts(model)),
        base=draw(st.sampled_from(BASES)),
        dcp=dcp,
        interleave=interleave,
    )


@st.composite
def tables_for(
    draw: st.DrawFn, model: Model, engine: Engine, start: int, end: int, *, destination: bool
) -> tuple[Engine, Tables]:
    """Block tables of a request, and the engine with enough blocks for them.

    Null entries are where nothing is needed, and in a destination's table anywhere.
    """
    firsts: dict[GroupKey, int] = {}
    counts: dict[GroupKey, int] = {}
    used: dict[GroupKey, set[int]] = {}
    for key in group_keys(model, engine):
        if GROUP_KINDS[key[0]] == "state":
            firsts[key], counts[key] = draw(st.integers(0, start)), draw(st.integers(1, 3))
            used[key] = {draw(st.integers(0, counts[key] - 1))}
            continue
        tokens = np.arange(start, end)
        earliest = tokens[needed(model, key[0], tokens, start, end)].min(initial=end)
        step = 1
        if key[0] in OPAQUE_KINDS:
            step = engine.dcp * engine.interleave * model.opaque_tokens
        is_window = GROUP_KINDS[key[0]] in ("sliding_window", "chunked")
        latest = int(earliest) if is_window else start
        firsts[key] = step * draw(st.integers(0, latest // step))
        block_tokens = paging_of(model, engine, key).block_tokens
        entries, used[key] = 0, set()
        for rank in range(engine.dcp):
            own = own_tokens(engine, rank, firsts[key], end)
            entry = np.arange(own.size) // block_tokens
            entries = max(entries, int(entry.max(initial=-1)) + 1)
            used[key] |= set(entry[needed(model, key[0], own, start, end)].tolist())
        counts[key] = entries + draw(st.integers(0, 2))
    blocks = max(1, *counts.values()) + draw(st.integers(0, 3))
    tables = {}
    for key, count in counts.items():
        ids = draw(block_ids(blocks, count))
        unused = [i for i in range(count) if i not in used[key]]
        is_state = GROUP_KINDS[key[0]] == "state"
        holes = set(unused) if is_state or draw(st.booleans()) else set()
        if destination and draw(st.booleans()):
            holes |= set(draw(st.lists(st.integers(0, count), max_size=3)))
        tables[key] = BlockTable(
            [NULL if i in holes else block for i, block in enumerate(ids)],
            start_token=firsts[key],
            null_block_id=NULL if holes else None,
        )
    return replace(engine, blocks=blocks), Tables(tables)


@st.composite
def block_ids(draw: st.DrawFn, blocks: int, count: int) -> list[int]:
    """Distinct blocks: ascending, descending, or runs of blocks in any order."""
    order = draw(st.sampled_from(["ascending", "descending", "runs"]))
    if order != "runs":
        first = draw(st.integers(0, blocks - count))
        return list(range(first, first + count))[:: 1 if order == "ascending" else -1]
    length = draw(st.integers(1, 4))
    starts = np.arange(0, blocks, length)
    np.random.default_rng(draw(st.integers(0, 1000))).shuffle(starts)
    return [i for start in starts.tolist() for i in range(start, min(start + length, blocks))][
        :count
    ]


@st.composite
def cases(draw: st.DrawFn, *, plain: bool = False) -> Case:
    """Any case; a plain one has tokens only, all of which matter and none of which are shared."""
    model = draw(models(plain=plain))
    splits = [(1, 1)] * 2 if plain else [draw(token_splits(model)), draw(token_splits(model))]
    if model.has_opaque_pages:
        splits[1] = splits[0]
        period = splits[0][0] * splits[0][1] * model.opaque_tokens
        start = draw(st.sampled_from([0, period]))
    else:
        start = draw(st.integers(0, 20))
    end = start + draw(st.integers(0, 30))
    one, other = draw(engines(model, splits[0])), draw(engines(model, splits[1]))
    if draw(st.booleans()):  # pages that are alike merge most
        other = replace(other, layout=one.layout, pagings=one.pagings)
    producer, producer_tables = draw(tables_for(model, one, start, end, destination=False))
    consumer, consumer_tables = draw(tables_for(model, other, start, end, destination=not plain))
    direction = draw(st.sampled_from(DIRECTIONS))
    ours = consumer if direction == "read" else producer
    return Case(
        model, producer, consumer, producer_tables, consumer_tables, start, end, direction,
        assume_even=is_usual(model, ours) and draw(st.booleans()),
    )  # fmt: skip


def is_usual(model: Model, engine: Engine) -> bool:
    """Whether the split is the one that a planner assumes where it is not told."""
    channels = all(
        model.state_heads % engine.tp == 0 for kind in model.layers if GROUP_KINDS[kind] == "state"
    )
    one_stage = len(engine.stages) == engine.dcp == 1
    return one_stage and channels and engine.shares == even_shares(model.heads, engine.tp)
