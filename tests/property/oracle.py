"""A brute-force oracle for plans.

It knows nothing of plans. Engines are real memory: every rank of both engines has its bytes at
addresses of its own, caches are numpy views of them, and source cells hold values that name
layer, part, unit and token. Whatever is lowered is copied byte by byte; afterwards the memory of
every consumer rank must equal an image in which exactly the needed cells were written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbridge.model import (
    CacheGroup,
    LayerCache,
    Rank,
    RankCache,
    Region,
    StatePiece,
    TransferTopology,
    attention_layer,
    mamba_layer,
    mla_layer,
    opaque_layer,
)
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    TransferBatch,
    generate_engine_transfer_plan,
)
from tests.property.engines import (
    CONV_PIECES,
    GROUP_KINDS,
    OPAQUE_KINDS,
    Case,
    Engine,
    GroupKey,
    Model,
    Tables,
    even_shares,
    group_key,
    group_keys,
    needed,
    own_tokens,
    paging_of,
    piece_units,
)

ITEM = np.dtype(np.uint32)
POISON = 0xC3
OTHERS = 0x5A
PARTS = ("K", "V", "latent", "scale", "opaque", "ssm", *(f"conv.{piece}" for piece in "xbcqkv"))


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
    what: str
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def extent(self) -> int:
        return ITEM.itemsize + sum(
            (n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)
        )


class Part(NamedTuple):
    """Something that a rank holds of a layer.

    Attributes:
        view: Its cells, [page, unit, token, content].
        units: Which units of the model's these are.
    """

    view: NDArray[np.uint32]
    units: NDArray[Any]


class RankMemory:
    """The memory of one rank, what it announces, and views of every part of it.

    Attributes:
        cache: What the rank announces.
        data: All its bytes.
        parts: What it holds, by layer and name.
    """

    def __init__(self, model: Model, engine: Engine, name: str, rank: Rank, base: int) -> None:
        self._model, self._engine, self.base = model, engine, base
        self._tp_rank = rank[1]
        self.share = engine.shares[self._tp_rank]
        first = sum(engine.stages[: rank[0]])
        self.layers = range(first, first + engine.stages[rank[0]])
        self._keys = group_keys(model, engine)
        self._tensors = {i: list(self._plots(i)) for i in self.layers}
        allocations = self._place()
        self.regions = tuple(Region(base + at, size) for at, size in allocations)
        end = sum(allocations[-1]) if allocations else 0
        if engine.layout.one_region and allocations:
            self.regions = (Region(base, end),)
        self.data = np.zeros(end + engine.layout.gap, np.uint8)
        self.parts = dict(self._parts())
        self.cache = RankCache(
            name, *rank,
            layers=tuple(layer for i in self.layers for layer in self._announce(i)),
            groups=tuple(self._group(key) for key in self._keys),
            regions=self.regions,
            dcp_rank=rank[1] % engine.dcp,
            dcp_size=engine.dcp,
            dcp_interleave_tokens=engine.interleave,
        )  # fmt: skip

    def _key(self, layer: int) -> GroupKey:
        return group_key(self._model, self._engine, layer)

    # how tensors lie in memory

    def _plots(self, layer: int) -> Iterator[_Plot]:
        model, layout = self._model, self._engine.layout
        kind = model.layers[layer]
        if kind in CONV_PIECES:
            channels = sum(end - start for _, start, end, _ in self._pieces(kind))
            sizes = {"H": channels, "N": model.conv_rows}
            yield self._plot(layer, "conv", "BNH" if layout.tokens_first else "BHN", sizes)
            start, end = self._state_heads()
            yield self._plot(layer, "ssm", "BHC", {"H": end - start, "C": model.content})
            return
        if kind in OPAQUE_KINDS:
            yield self._plot(layer, "opaque", "BC", {"C": 5})
            return
        k, v = model.contents
        sizes = {"K": 2, "N": paging_of(model, self._engine, self._key(layer)).page_tokens}
        sizes["H"] = self.share[1] - self.share[0]
        if kind == "mla":
            axes = "".join(axis for axis in layout.axes if axis not in "KH")
            yield self._plot(layer, "latent", axes, sizes | {"C": k})
            return
        if layout.apart:
            for what, content in (("K", k), ("V", v)):
                yield self._plot(layer, what, layout.axes, sizes | {"C": content}, max(k, v))
        else:
            content = k if "K" in layout.axes else k + v
            yield self._plot(layer, "KV", layout.axes, sizes | {"C": content})
        if model.scales:
            yield self._plot(layer, "scale", layout.axes.replace("K", ""), sizes | {"C": 1})

    def _plot(
        self, layer: int, what: str, axes: str, sizes: dict[str, int], content: int | None = None
    ) -> _Plot:
        """Lay out a tensor whose cells are ``content`` elements apart, by default all they have."""
        paging = paging_of(self._model, self._engine, self._key(layer))
        sizes = sizes | {"B": self._engine.blocks * paging.pages_per_block}
        strides = {}
        extent = ITEM.itemsize
        for axis in reversed(axes):
            strides[axis] = extent
            if axis == self._engine.layout.padded_axis:
                strides[axis] += 3 * ITEM.itemsize
            count = (content or sizes["C"]) if axis == "C" else sizes[axis]
            extent = strides[axis] * count
        shape, steps = zip(*((sizes[axis], strides[axis]) for axis in axes), strict=True)
        return _Plot(layer, what, axes, shape, steps)

    def _place(self) -> list[tuple[int, int]]:
        """Give every tensor its offset; return offset and size of each allocation."""
        bundles: list[list[_Plot]] = []
        for layer, plots in self._tensors.items():
            together = self._model.layers[layer] in CONV_PIECES or self._model.scales == "inside"
            bundles += [plots] if together else [[plot] for plot in plots]
        if self._engine.layout.in_rows and bundles:
            bundles = [[plot for bundle in bundles for plot in bundle]]
        allocations, at = [], 0
        for bundle in bundles:
            row = 0
            for plot in bundle:
                plot.offset = at + row
                row += plot.strides[0]
            if len(bundle) > 1:  # each page of one is followed by the same page of the next
                for plot in bundle:
                    plot.strides = (row, *plot.strides[1:])
            end = max(plot.offset + plot.extent for plot in bundle)
            allocations.append((at, end - at))
            at = end + self._engine.layout.gap
        return allocations

    def _view(self, plot: _Plot) -> NDArray[np.uint32]:
        """Return a tensor with its axes in the order K, B, H, N, C, missing ones of size 1."""
        view = np.ndarray(plot.shape, ITEM, self.data, plot.offset, plot.strides)
        present = "".join(a for a in "KBHNC" if a in plot.axes)
        view = view.transpose([plot.axes.index(a) for a in present])
        return np.expand_dims(view, [i for i, a in enumerate("KBHNC") if a not in present])

    def _parts(self) -> Iterator[tuple[tuple[int, str], Part]]:
        heads, one = np.arange(*self.share), np.arange(1)
        content = self._model.content
        for plot in (plot for plots in self._tensors.values() for plot in plots):
            view = self._view(plot)
            if plot.what == "KV":
                pair = (
                    view if "K" in plot.axes else (view[0, ..., :content], view[0, ..., content:])
                )
                for part, cells in zip("KV", pair, strict=True):
                    yield (plot.layer, part), Part(cells, heads)
            elif plot.what == "conv":
                at = 0
                for piece, start, end, _ in self._pieces(self._model.layers[plot.layer]):
                    cells = view[0][:, at : at + end - start]
                    yield (plot.layer, f"conv.{piece}"), Part(cells, np.arange(start, end))
                    at += end - start
            else:
                units = {"ssm": np.arange(*self._state_heads()), "latent": one, "opaque": one}
                yield (plot.layer, plot.what), Part(view[0], units.get(plot.what, heads))

    def _pieces(self, kind: str) -> list[tuple[str, int, int, int]]:
        return [
            (piece, *piece_units(self._model, self._engine, piece, self._tp_rank))
            for piece in CONV_PIECES[kind]
        ]

    def _state_heads(self) -> tuple[int, int]:
        return even_shares(self._model.state_heads, self._engine.tp)[self._tp_rank]

    # what is announced

    def _group(self, key: GroupKey) -> CacheGroup:
        paging = paging_of(self._model, self._engine, key)
        kind = GROUP_KINDS[key[0]]
        window = self._model.window if kind in ("sliding_window", "chunked") else None
        return CacheGroup(kind, paging.block_tokens, paging.pages_per_block, window)

    def _announce(self, layer: int) -> Iterator[LayerCache]:
        tensors = {
            plot.what: FakeTensor(self.base + plot.offset, plot.shape, plot.strides)
            for plot in self._tensors[layer]
        }
        axes = {plot.what: plot.axes for plot in self._tensors[layer]}
        kind, layout = self._model.layers[layer], self._engine.layout
        place: dict[str, Any] = {
            "layer": layer, "name": f"layers.{layer}", "group": self._keys.index(self._key(layer)),
        }  # fmt: skip
        heads: dict[str, Any] = {"unit_start": self.share[0], "unit_total": self._model.heads}
        if kind in CONV_PIECES:
            start, end = self._state_heads()
            state = mamba_layer(
                tensors["conv"],
                tensors["ssm"],
                **place,
                conv_pieces=[StatePiece(p, a, b - a, n) for p, a, b, n in self._pieces(kind)],
                ssm_piece=StatePiece("ssm", start, end - start, self._model.state_heads),
                conv_order="tokens_first" if layout.tokens_first else "channels_first",
            )
            yield _rows_in_cells(state) if layout.rows_in_cells else state
        elif kind in OPAQUE_KINDS:
            yield opaque_layer(tensors["opaque"], **place)
        elif kind == "mla":
            yield mla_layer(tensors["latent"], axes=axes["latent"], **place)
        else:
            pair = tensors.get("KV") or (tensors["K"], tensors["V"])
            values = attention_layer(pair, axes=layout.axes, **place, **heads)
            if "scale" not in tensors:
                yield values
                return
            scale = attention_layer(tensors["scale"], axes=axes["scale"], **place, **heads)
            offset = scale.base_address - values.base_address
            cell = replace(scale.components[0], name="scale")
            if self._model.scales == "inside":
                cell = replace(cell, offset=offset)
                yield replace(values, components=(*values.components, cell))
            else:
                yield values
                yield replace(scale, name=f"{scale.name}.scale", components=(cell,))

    # what is in it

    def write(self, tables: Tables, start: int, end: int, *, mark: int | None = None) -> None:
        """Write the names of a request's cells, or a mark, into those that we hold."""
        for (layer, part), (view, units) in self.parts.items():
            key = self._key(layer)
            paging = paging_of(self._model, self._engine, key)
            table = tables.of_group[key]
            ids = np.asarray(table.block_ids, np.int64)
            if GROUP_KINDS[key[0]] == "state":
                block = ids[ids != table.null_block_id][:1]
                index = np.arange(paging.pages_per_block * block.size)
                page, token = np.divmod(np.arange(index.size * view.shape[2]), view.shape[2])
                names = _names(layer, part, units, page * 100 + token, view.shape[-1])
                page = block.repeat(page.size) * paging.pages_per_block + page
            else:
                own = own_tokens(self._engine, self._tp_rank, table.start_token, end)
                index = np.arange(own.size)
                page, token = np.divmod(index, paging.page_tokens)
                named = own
                if part == "opaque":  # a page is named by its first token
                    token, named = np.zeros_like(index), own[page * paging.page_tokens]
                entry, page = np.divmod(page, paging.pages_per_block)
                block = ids[entry]
                which = needed(self._model, key[0], own, start, end)
                which &= block != table.null_block_id
                page = (block * paging.pages_per_block + page)[which]
                token = token[which]
                names = _names(layer, part, units, named[which], view.shape[-1])
            view[page, :, token] = names if mark is None else mark


def _rows_in_cells(state: LayerCache) -> LayerCache:
    """Announce the rows of a channel as one cell, where they are neighbours."""
    components = tuple(
        replace(c, cell_bytes=c.cell_bytes * c.token_count, token_count=1)
        if c.token_stride == c.cell_bytes
        else c
        for c in state.components
    )
    return replace(state, components=components)


def _names(
    layer: int, part: str, units: NDArray[Any], tokens: NDArray[Any], content: int
) -> NDArray[np.uint32]:
    """Return values that no two cells share. Shape: [tokens, units, content]."""
    cell = (layer * 16 + PARTS.index(part)) * 64 + units
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
            dcp_size=self.engine.dcp,
            block_size=self.engine.pagings[0].page_tokens,
            engine_id=self.name,
            is_mla=all(kind == "mla" for kind in self.model.layers),
            is_mamba=any(kind in CONV_PIECES for kind in self.model.layers),
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
