"""A brute-force oracle for plans, and the engines that it draws.

It knows nothing of plans. Engines are real memory: every rank of both engines has its bytes at
addresses of its own, caches are numpy views of them, and source cells hold values that name
layer, part, head and token. Whatever is lowered is copied byte by byte; afterwards the memory of
every consumer rank must equal an image in which exactly the needed cells were written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.model import (
    CacheComponent,
    CacheGroup,
    LayerCache,
    Rank,
    RankCache,
    Region,
    TransferTopology,
    attention_layer,
)
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    TransferBatch,
    generate_engine_transfer_plan,
)

Direction = Literal["read", "write"]
Share = tuple[int, int]
GroupKey = tuple[bool, int]
"""Layers of one block table: whether they hold latents, and which of an engine's pagings."""

DIRECTIONS: tuple[Direction, ...] = ("read", "write")
ITEM = np.dtype(np.uint32)
NULL = 10_000_000
POISON = 0xC3
OTHERS = 0x5A


# --- what is drawn -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What both engines cache.

    Attributes:
        latent: For each layer, whether it caches one latent (MLA) instead of K and V of heads.
        heads: KV heads of the other layers.
        content: Elements of K, and of V, of one head and token.
    """

    latent: tuple[bool, ...]
    heads: int
    content: int = 2


@dataclass(frozen=True)
class Paging:
    """How a cache group is cut into pages."""

    page_tokens: int
    pages_per_block: int = 1


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
    """

    axes: str = "BKHNC"
    apart: bool = False
    padded_axis: str = ""
    in_rows: bool = False
    gap: int = 64
    one_region: bool = False


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
    """

    shares: tuple[Share, ...]
    stages: tuple[int, ...]
    pagings: tuple[Paging, ...] = (Paging(4),)
    layout: Layout = Layout()
    blocks: int = 8
    base: int = 1 << 20

    @property
    def tp(self) -> int:
        return len(self.shares)

    def paging_of(self, layer: int) -> int:
        return layer % len(self.pagings)


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


def even_shares(heads: int, tp: int) -> tuple[Share, ...]:
    """Return the usual split: contiguous, whole heads replicated where ranks outnumber them."""
    return tuple(
        (r * heads // tp, max(r * heads // tp + 1, (r + 1) * heads // tp)) for r in range(tp)
    )


def group_keys(model: Model, engine: Engine) -> list[GroupKey]:
    return sorted({(latent, engine.paging_of(i)) for i, latent in enumerate(model.latent)})


# --- an engine as memory -------------------------------------------------------------------------


class FakeTensor:
    """An array that says it lies at an address of our choice."""

    def __init__(self, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": ITEM.str,
            "version": 3,
        }


@dataclass
class _Plot:
    """Where one tensor lies."""

    layer: int
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def extent(self) -> int:
        return ITEM.itemsize + sum(
            (n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)
        )


class RankMemory:
    """The memory of one rank, what it announces, and views of every part of it.

    Attributes:
        cache: What the rank announces.
        data: All its bytes.
        parts: For each layer and part (``K``, ``V``, ``latent``) a view [page, head, token, C].
    """

    def __init__(self, model: Model, engine: Engine, name: str, rank: Rank, base: int) -> None:
        self._model, self._engine, self.base = model, engine, base
        self.share = engine.shares[rank[1]]
        first = sum(engine.stages[: rank[0]])
        self.layers = range(first, first + engine.stages[rank[0]])
        self._keys = group_keys(model, engine)
        allocations = self._place([plot for i in self.layers for plot in self._plots(i)])
        self.regions = tuple(Region(base + at, size) for at, size in allocations)
        end = sum(allocations[-1]) if allocations else 0
        if engine.layout.one_region and allocations:
            self.regions = (Region(base, end),)
        self.data = np.zeros(end + engine.layout.gap, np.uint8)
        self.parts = dict(self._views())
        self.cache = RankCache(
            name, *rank,
            layers=tuple(self._announce(i) for i in self.layers),
            groups=tuple(self._group(*key) for key in self._keys),
            regions=self.regions,
        )  # fmt: skip

    # how tensors lie in memory

    def _plots(self, layer: int) -> list[_Plot]:
        layout, latent = self._engine.layout, self._model.latent[layer]
        paging = self._engine.pagings[self._engine.paging_of(layer)]
        axes = "".join(a for a in layout.axes if a not in "KH") if latent else layout.axes
        joint = "K" not in axes and not layout.apart
        sizes = {
            "B": self._engine.blocks * paging.pages_per_block,
            "K": 2,
            "H": self.share[1] - self.share[0],
            "N": paging.page_tokens,
            "C": self._model.content * (2 if joint and not latent else 1),
        }
        strides = {}
        extent = ITEM.itemsize
        for axis in reversed(axes):
            strides[axis] = extent
            if axis == layout.padded_axis:
                strides[axis] += 3 * ITEM.itemsize
            extent = strides[axis] * sizes[axis]
        shape, steps = zip(*((sizes[a], strides[a]) for a in axes), strict=True)
        count = 2 if layout.apart and not latent else 1
        return [_Plot(layer, axes, shape, steps) for _ in range(count)]

    def _place(self, plots: list[_Plot]) -> list[tuple[int, int]]:
        """Give every tensor its offset; return offset and size of each allocation."""
        self._tensors: dict[int, list[_Plot]] = {i: [] for i in self.layers}
        for plot in plots:
            self._tensors[plot.layer].append(plot)
        if not plots:
            return []
        if not self._engine.layout.in_rows:
            allocations, at = [], 0
            for plot in plots:
                plot.offset = at
                allocations.append((at, plot.extent))
                at += plot.extent + self._engine.layout.gap
            return allocations
        row = 0
        for plot in plots:
            plot.offset = row
            row += plot.strides[0]
        for plot in plots:
            plot.strides = (row, *plot.strides[1:])
        return [(0, max(plot.offset + plot.extent for plot in plots))]

    def _view(self, plot: _Plot) -> NDArray[np.uint32]:
        """Return a tensor with its axes in the order K, B, H, N, C, missing ones of size 1."""
        view = np.ndarray(plot.shape, ITEM, self.data, plot.offset, plot.strides)
        present = "".join(a for a in "KBHNC" if a in plot.axes)
        view = view.transpose([plot.axes.index(a) for a in present])
        return np.expand_dims(view, [i for i, a in enumerate("KBHNC") if a not in present])

    def _views(self) -> Iterator[tuple[tuple[int, str], NDArray[np.uint32]]]:
        content = self._model.content
        for layer, plots in self._tensors.items():
            views = [self._view(plot) for plot in plots]
            if self._model.latent[layer]:
                yield (layer, "latent"), views[0][0]
            elif len(views) == 2:
                yield (layer, "K"), views[0][0]
                yield (layer, "V"), views[1][0]
            elif "K" in plots[0].axes:
                yield (layer, "K"), views[0][0]
                yield (layer, "V"), views[0][1]
            else:
                yield (layer, "K"), views[0][0, ..., :content]
                yield (layer, "V"), views[0][0, ..., content:]

    # what is announced

    def _group(self, latent: bool, paging: int) -> CacheGroup:
        pages = self._engine.pagings[paging]
        return CacheGroup(
            "mla" if latent else "attention",
            pages.page_tokens * pages.pages_per_block,
            pages.pages_per_block,
        )

    def _announce(self, layer: int) -> LayerCache:
        plots, latent = self._tensors[layer], self._model.latent[layer]
        name = f"layers.{layer}"
        group = self._keys.index((latent, self._engine.paging_of(layer)))
        if latent:
            return self._announce_latent(plots[0], name, group)
        tensors = [FakeTensor(self.base + p.offset, p.shape, p.strides) for p in plots]
        return attention_layer(
            tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1]),
            axes=plots[0].axes,
            layer=layer,
            name=name,
            group=group,
            unit_start=self.share[0],
            unit_total=self._model.heads,
        )

    def _announce_latent(self, plot: _Plot, name: str, group: int) -> LayerCache:
        size = dict(zip(plot.axes, plot.shape, strict=True))
        stride = dict(zip(plot.axes, plot.strides, strict=True))
        cell = size["C"] * ITEM.itemsize
        latent = CacheComponent("latent", "uint32", 0, cell, 0, 1, 1, cell, size["N"], stride["N"])
        return LayerCache(
            plot.layer, name, group, self.base + plot.offset, stride["B"], size["B"], (latent,)
        )

    # what is in it

    def write(self, tables: Tables, start: int, end: int, *, mark: int | None = None) -> None:
        """Write the names of a request's tokens, or a mark, into the cells that we hold."""
        for (layer, part), view in self.parts.items():
            latent = self._model.latent[layer]
            paging = self._engine.pagings[self._engine.paging_of(layer)]
            table = tables.of_group[latent, self._engine.paging_of(layer)]
            tokens = np.arange(max(start, table.start_token), end)
            block, within = np.divmod(
                tokens - table.start_token, paging.page_tokens * paging.pages_per_block
            )
            ids = np.asarray(table.block_ids, np.int64)[block]
            page = ids * paging.pages_per_block + within // paging.page_tokens
            real = ids != table.null_block_id
            heads = np.arange(*((0, 1) if latent else self.share))
            names = _names(layer, part, heads, tokens[real], view.shape[-1])
            view[page[real], :, (within % paging.page_tokens)[real]] = (
                names if mark is None else mark
            )


def _names(
    layer: int, part: str, heads: NDArray[Any], tokens: NDArray[Any], content: int
) -> NDArray[np.uint32]:
    """Return values that no two cells share. Shape: [tokens, heads, content]."""
    cell = (layer * 3 + ("K", "V", "latent").index(part)) * 64 + heads
    cell = cell[None, :, None] * 4096 + tokens[:, None, None]
    names: NDArray[np.uint32] = (cell * 8 + np.arange(content) + 1).astype(np.uint32)
    return names


@dataclass
class Fleet:
    """All ranks of an engine."""

    model: Model
    engine: Engine
    name: str
    ranks: dict[Rank, RankMemory] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {}
        base = self.engine.base
        for pp in range(len(self.engine.stages)):
            for tp in range(self.engine.tp):
                memory = RankMemory(self.model, self.engine, self.name, (pp, tp), base)
                self.ranks[pp, tp] = memory
                base += memory.data.size + 4096

    @property
    def caches(self) -> dict[Rank, RankCache]:
        return {rank: memory.cache for rank, memory in self.ranks.items()}

    def topology(self, rank: Rank) -> TransferTopology:
        return TransferTopology(
            pp_rank=rank[0],
            tp_rank=rank[1],
            pp_size=len(self.engine.stages),
            tp_size=self.engine.tp,
            block_size=self.engine.pagings[0].page_tokens,
            engine_id=self.name,
            is_mla=all(self.model.latent),
            is_mamba=False,
            total_num_kv_heads=self.model.heads,
        )

    def block_tables(self, tables: Tables) -> list[BlockTable]:
        return [tables.of_group[key] for key in group_keys(self.model, self.engine)]


# --- running a case ------------------------------------------------------------------------------


class World:
    """Both engines of a case, filled, and the plans of the engine that acts."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.producer = Fleet(case.model, case.producer, "prefill")
        self.consumer = Fleet(case.model, case.consumer, "decode")
        for memory in self.producer.ranks.values():
            memory.data[:] = OTHERS
            memory.write(case.producer_tables, 0, case.end)
        for memory in self.consumer.ranks.values():
            memory.data[:] = POISON
        self.reads = case.direction == "read"
        self.ours, self.theirs = (
            (self.consumer, self.producer) if self.reads else (self.producer, self.consumer)
        )
        self.our_tables, self.their_tables = (
            (case.consumer_tables, case.producer_tables)
            if self.reads
            else (case.producer_tables, case.consumer_tables)
        )

    def plan(self, rank: Rank) -> EngineTransferPlan:
        return generate_engine_transfer_plan(
            self.ours.topology(rank),
            self.ours.ranks[rank].cache,
            self.theirs.caches,
            local_engine=None if self.case.assume_even else self.ours.caches,
            direction=self.case.direction,
        )

    def plans(self) -> dict[Rank, EngineTransferPlan]:
        return {rank: self.plan(rank) for rank in self.ours.ranks}

    def lower(self, plan: EngineTransferPlan) -> list[TransferBatch]:
        return plan.lower(
            self.ours.block_tables(self.our_tables),
            self.theirs.block_tables(self.their_tables),
            start_token=self.case.start,
            end_token=self.case.end,
        )

    def move(self, lowered: Mapping[Rank, Sequence[TransferBatch]]) -> None:
        """Copy all batches, and check the memory of every consumer rank."""
        counts = {r: np.zeros(m.data.size, np.int64) for r, m in self.consumer.ranks.items()}
        for rank, batches in lowered.items():
            assert len({batch.remote_rank for batch in batches}) == len(batches)
            for batch in batches:
                here = indices(self.ours.ranks[rank], batch.local_address, batch.nbytes)
                there = indices(
                    self.theirs.ranks[batch.remote_rank], batch.remote_address, batch.nbytes
                )
                consumer, producer = (
                    (rank, batch.remote_rank) if self.reads else (batch.remote_rank, rank)
                )
                destination, source = (here, there) if self.reads else (there, here)
                np.add.at(counts[consumer], destination, 1)
                values = self.producer.ranks[producer].data[source]
                self.consumer.ranks[consumer].data[destination] = values
        for rank, memory in self.consumer.ranks.items():
            self._check(rank, memory, counts[rank])

    def _check(self, rank: Rank, memory: RankMemory, counts: NDArray[np.int64]) -> None:
        case = self.case
        image = RankMemory(case.model, case.consumer, "decode", rank, memory.base)
        image.write(case.consumer_tables, case.start, case.end, mark=0xFFFFFFFF)
        due = (image.data != 0).astype(np.int64)
        off = np.flatnonzero(counts != due)
        assert not off.size, (
            f"rank {rank}: byte {off[0]} was written {counts[off[0]]} times, not {due[off[0]]}"
        )
        image.data[:] = POISON
        image.write(case.consumer_tables, case.start, case.end)
        wrong = np.flatnonzero(memory.data != image.data)
        assert not wrong.size, f"rank {rank}: {wrong.size} bytes are wrong, first {wrong[:8]}"


def indices(
    memory: RankMemory, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the offset of every byte of some pieces, each inside one registered region."""
    assert address.dtype == nbytes.dtype == np.uint64
    assert address.shape == nbytes.shape
    assert (nbytes > 0).all()
    starts = np.array([region.address for region in memory.regions], np.uint64)
    ends = np.array([region.end for region in memory.regions], np.uint64)
    at = np.searchsorted(starts, address, side="right") - 1
    outside = (at < 0) | (address + nbytes > ends[at])
    assert not outside.any(), f"pieces at {address[outside]} are in no single registered region"
    offsets = (address - np.uint64(memory.base)).astype(np.int64)
    sizes = nbytes.astype(np.int64)
    before = sizes.cumsum() - sizes
    return np.repeat(offsets - before, sizes) + np.arange(sizes.sum())


# --- what hypothesis draws -----------------------------------------------------------------------

BASES = (1 << 20, 0x7F12_3456_7000, (1 << 64) - (1 << 28))


@st.composite
def shares(draw: st.DrawFn, heads: int) -> tuple[Share, ...]:
    """The usual split over 1 to 8 ranks, or any intervals that cover all heads."""
    if draw(st.integers(0, 3)):
        return even_shares(heads, draw(st.integers(1, 8)))
    cuts = sorted({0, heads, *draw(st.lists(st.integers(0, heads), max_size=3))})
    extra = st.tuples(st.integers(0, heads - 1), st.integers(1, heads))
    extras = [(a, min(heads, a + n)) for a, n in draw(st.lists(extra, max_size=3))]
    return tuple(draw(st.permutations([*pairwise(cuts), *extras])))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    apart = draw(st.booleans())
    axes = "".join(
        draw(st.permutations("BHN" if apart else draw(st.sampled_from(["BHN", "BKHN"]))))
    )
    in_rows = draw(st.booleans())
    if in_rows:
        axes = "B" + axes.replace("B", "")
    return Layout(
        axes=axes + "C",
        apart=apart,
        padded_axis=draw(st.sampled_from(["", *axes])),
        in_rows=in_rows,
        gap=draw(st.sampled_from([0, 64])),
        one_region=draw(st.booleans()),
    )


@st.composite
def engines(draw: st.DrawFn, model: Model) -> Engine:
    layers = len(model.latent)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, layers), max_size=2))), layers]
    pagings = st.builds(Paging, st.integers(1, 9), st.integers(1, 3))
    return Engine(
        shares=draw(shares(model.heads)),
        stages=tuple(b - a for a, b in pairwise(cuts)),
        pagings=tuple(draw(st.lists(pagings, min_size=1, max_size=2))),
        layout=draw(layouts()),
        base=draw(st.sampled_from(BASES)),
    )


@st.composite
def tables_for(
    draw: st.DrawFn, model: Model, engine: Engine, start: int, end: int, *, null: bool
) -> tuple[Engine, Tables]:
    """Block tables of a request, and the engine with enough blocks for them."""
    firsts: dict[GroupKey, int] = {}
    counts: dict[GroupKey, int] = {}
    for key in group_keys(model, engine):
        paging = engine.pagings[key[1]]
        firsts[key] = draw(st.integers(0, start))
        needed = -(-(end - firsts[key]) // (paging.page_tokens * paging.pages_per_block))
        counts[key] = needed + draw(st.integers(0, 2))
    blocks = max(1, *counts.values()) + draw(st.integers(0, 3))
    tables = {}
    for key, count in counts.items():
        ids = draw(block_ids(blocks, count))
        holes = set(draw(st.lists(st.integers(0, count), max_size=3))) if null else set()
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
def cases(draw: st.DrawFn) -> Case:
    model = Model(
        latent=tuple(draw(st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=5))),
        heads=draw(st.integers(1, 8)),
        content=draw(st.integers(1, 3)),
    )
    start = draw(st.integers(0, 20))
    end = start + draw(st.integers(0, 30))
    one, other = draw(engines(model)), draw(engines(model))
    if draw(st.booleans()):  # pages that are alike merge most
        other = replace(other, layout=one.layout, pagings=one.pagings)
    producer, producer_tables = draw(tables_for(model, one, start, end, null=False))
    consumer, consumer_tables = draw(tables_for(model, other, start, end, null=True))
    direction = draw(st.sampled_from(DIRECTIONS))
    ours = consumer if direction == "read" else producer
    usual = len(ours.stages) == 1 and ours.shares == even_shares(model.heads, ours.tp)
    return Case(
        model, producer, consumer, producer_tables, consumer_tables, start, end, direction,
        assume_even=usual and draw(st.booleans()),
    )  # fmt: skip
