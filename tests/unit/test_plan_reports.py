"""Faults that people who move KV caches have met, each as its small input and the right value.

The names carry the ids of the field reports. Every case also runs through the brute-force oracle.
"""

import ctypes
import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbridge.errors import CoverageError, PlanError, UnsupportedLayoutError
from kvbridge.handshake.metadata import RankPayload, seal
from kvbridge.model import (
    CacheComponent,
    CacheGroup,
    LayerCache,
    Rank,
    RankCache,
    Region,
    StatePiece,
    TransferTopology,
    attention_layer,
    mamba_layer,
    memory_region,
    transfer_infos,
)
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    generate,
    generate_engine_transfer_plan,
)
from tests.property.engines import (
    DIRECTIONS,
    Case,
    Direction,
    Engine,
    Layout,
    Model,
    Paging,
    Share,
    Tables,
    even_shares,
)
from tests.property.oracle import FakeTensor, RankMemory, World, indices

ITEM_NBYTES = 4


def engine(
    heads: int = 1,
    tp: int = 1,
    *,
    tokens: int = 4,
    pages_per_block: int = 1,
    axes: str = "BNHC",
    stages: Sequence[int] = (1,),
    blocks: int = 4,
) -> Engine:
    return Engine(
        even_shares(heads, tp),
        tuple(stages),
        (Paging(tokens, pages_per_block),),
        Layout(axes),
        blocks,
    )


def world(
    producer: Engine,
    consumer: Engine,
    *,
    heads: int = 1,
    content: int = 1,
    source: BlockTable | None = None,
    destination: BlockTable | None = None,
    start: int = 0,
    end: int = 4,
    direction: Direction = "read",
) -> World:
    """Two engines of one cache group; by default block 0 moves to block 0."""
    return hybrid(
        Model(("attention",) * sum(producer.stages), heads, content),
        producer,
        consumer,
        {"attention": (source or BlockTable([0]), destination or BlockTable([0]))},
        start=start,
        end=end,
        direction=direction,
    )


def hybrid(
    model: Model,
    producer: Engine,
    consumer: Engine,
    tables: Mapping[str, tuple[BlockTable, BlockTable]],
    *,
    start: int = 0,
    end: int = 4,
    direction: Direction = "read",
) -> World:
    """Two engines of any layers; for each kind of layer, the producer's and consumer's blocks."""
    sources, destinations = (
        Tables({(kind, 0): pair[side] for kind, pair in tables.items()}) for side in (0, 1)
    )
    return World(Case(model, producer, consumer, sources, destinations, start, end, direction))


def move(world: World) -> dict[int, EngineTransferPlan]:
    """Move the bytes, let the oracle check them, and return the plan of every tp rank."""
    plans = world.plans()
    world.move({rank: world.lower(plan) for rank, plan in plans.items()})
    return {tp: plan for (pp, tp), plan in plans.items() if pp == 0}


def heads_read(plan: EngineTransferPlan) -> dict[int, Share]:
    """Return the heads that a rank exchanges with each remote tp rank."""
    return {
        source.rank[1]: (region.unit_start, region.unit_end)
        for source in plan.sources
        for region in source.regions
    }


def pieces(world: World, tp: int = 0) -> list[tuple[int, int, int, int]]:
    """Return what tp rank ``tp`` moves: remote tp rank, offset here, offset there, length."""
    return [
        (batch.remote_rank[1], here, there, nbytes)
        for batch in world.lower(world.plan((0, tp)))
        for here, there, nbytes in zip(
            (batch.local_address - np.uint64(world.ours.ranks[0, tp].base)).tolist(),
            (batch.remote_address - np.uint64(world.theirs.ranks[batch.remote_rank].base)).tolist(),
            batch.nbytes.tolist(),
            strict=True,
        )
    ]


def page_pairs(world: World, layer: int = 0) -> list[tuple[int, int]]:
    """Return which pages meet, (producer's, consumer's), where both have pages of equal bytes."""
    (batch,) = world.lower(world.plan((0, 0)))
    here, there = (
        _pages(fleet.ranks[0, 0], layer, address, batch.nbytes)
        for fleet, address in (
            (world.ours, batch.local_address),
            (world.theirs, batch.remote_address),
        )
    )
    pairs = set(zip(here, there, strict=True)) - {(-1, -1)}
    return sorted((b, a) if world.reads else (a, b) for a, b in pairs)


def _pages(
    memory: RankMemory, layer: int, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> list[int]:
    """Return the page of a layer that every byte lies in; -1 where it is none of that layer."""
    cache = memory.cache.layers[layer]
    offset = indices(memory, address, nbytes) - (cache.base_address - memory.base)
    page = offset // cache.page_stride
    return [p if 0 <= p < cache.page_count else -1 for p in page.tolist()]


def sources_of(plan: EngineTransferPlan) -> dict[int, list[int]]:
    """Return, for each local cache group, the remote tp ranks that it is read from."""
    found: dict[int, set[int]] = defaultdict(set)
    for source in plan.sources:
        for region in source.regions:
            found[region.local.group].add(source.rank[1])
    return {group: sorted(ranks) for group, ranks in found.items()}


# --- A: which piece goes where -------------------------------------------------------------------


def test_b01_bytes_of_a_block_scale_with_heads_and_not_with_tp() -> None:
    small = partial(engine, 4, tokens=2, axes="BHNC")
    plans = move(world(small(4), small(8), heads=4, end=2))
    assert [heads_read(plans[d]) for d in range(8)] == [
        {d // 2: (d // 2, d // 2 + 1)} for d in range(8)
    ]
    plans = move(world(small(2), small(8), heads=4, end=2))
    read = [heads_read(plans[d]) for d in range(8)]
    assert [list(rank) for rank in read] == [[0], [0], [0], [0], [1], [1], [1], [1]]
    slices = [head - 2 * rank for sources in read for rank, (head, _) in sources.items()]
    assert slices == [0, 0, 1, 1, 0, 0, 1, 1]


def test_b02_pieces_are_counted_by_distinct_heads() -> None:
    plans = move(world(engine(2, 1), engine(2, 4), heads=2))
    assert [heads_read(plans[d]) for d in range(4)] == [
        {0: (0, 1)}, {0: (0, 1)}, {0: (1, 2)}, {0: (1, 2)},
    ]  # fmt: skip


def test_b03_every_head_has_one_writer_and_all_ranks_are_released() -> None:
    (plan,) = move(world(engine(4, 8), engine(4, 1), heads=4)).values()
    read = heads_read(plan)
    assert sorted(read.values()) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(head == rank // 2 for rank, (head, _) in read.items())
    assert {tp for _, tp in plan.notify_only} == set(range(8)) - set(read)
    assert set(plan.readers.values()) == {1}


def test_b04_pieces_of_a_state_are_cut_each_by_itself() -> None:
    """x is 8 channels, B and C are 2 each; a channel has 3 rows of 4 bytes."""
    model = Model(("mamba2",), content=1, state_heads=4, state_groups=2)
    here = hybrid(model, engine(1, 1), engine(1, 2), {"mamba2": (BlockTable([0]), BlockTable([0]))})
    move(here)
    channel = 12
    assert pieces(here, 1) == [
        (0, 0 * channel, 4 * channel, 4 * channel),
        (0, 4 * channel, 9 * channel, channel),
        (0, 5 * channel, 11 * channel, channel),
        (0, 6 * channel, 12 * channel + 2 * 4, 2 * 4),  # the temporal state of two of four heads
    ]


@pytest.mark.parametrize(
    ("consumers", "read"), [(1, {0: [0, 2], 1: [0, 1, 2, 3]}), (2, {0: [0], 1: [0, 1]})]
)
def test_b04_each_cache_group_has_its_own_sources(
    consumers: int, read: dict[int, list[int]]
) -> None:
    model = Model(("attention", "mamba2"), heads=2, state_heads=4, state_groups=4)
    block = (BlockTable([0]), BlockTable([1]))
    here = hybrid(
        model,
        engine(2, 4, stages=(2,)),
        engine(2, consumers, stages=(2,)),
        {"attention": block, "mamba2": block},
    )
    assert sources_of(move(here)[0]) == read


def test_b05_each_side_expands_blocks_with_its_own_ratio() -> None:
    here = world(
        engine(pages_per_block=4),
        engine(pages_per_block=2),
        source=BlockTable([1, 3]),
        destination=BlockTable([0, 1, 2, 3]),
        end=32,
    )
    move(here)
    remote = [there for there, _ in page_pairs(here)]
    assert remote == [4, 5, 6, 7, 12, 13, 14, 15]


def test_b05_the_spare_pages_of_a_rounded_block_are_left_alone() -> None:
    here = world(
        engine(pages_per_block=4),
        engine(pages_per_block=2),
        source=BlockTable([1, 3]),
        destination=BlockTable([3, 0, 2]),
        end=21,
    )
    move(here)
    assert page_pairs(here) == [(4, 6), (5, 7), (6, 0), (7, 1), (12, 4), (13, 5)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_b05_in_a_hybrid_a_state_is_one_block_whatever_attention_blocks_are(
    direction: Direction,
) -> None:
    here = hybrid(
        Model(("attention", "mamba2")),
        engine(pages_per_block=4, stages=(2,)),
        engine(pages_per_block=2, stages=(2,)),
        {
            "attention": (BlockTable([1, 3]), BlockTable([3, 0, 2])),
            "mamba2": (BlockTable([3]), BlockTable([1])),
        },
        end=21,
        direction=direction,
    )
    move(here)
    assert page_pairs(here, 0) == [(4, 6), (5, 7), (6, 0), (7, 1), (12, 4), (13, 5)]
    assert page_pairs(here, 1) == [(3, 1)]


class Pool:
    """Memory of four blocks that an attention and a Mamba layer share, each its own blocks."""

    def __init__(self, first_layer: int, blocks: int = 4) -> None:
        self.data = np.zeros((blocks, 16), np.uint32)
        self.attention = self.data.reshape(blocks, 4, 1, 4)
        self.conv = self.data[:, :9].reshape(blocks, 3, 3)
        self.ssm = self.data[:, 9:15].reshape(blocks, 2, 3)
        self.layers = (
            attention_layer(
                self.attention, axes="BNHC", layer=first_layer, name=f"a{first_layer}",
                unit_start=0, unit_total=1,
            ),
            mamba_layer(
                self.conv, self.ssm, layer=first_layer + 1, name=f"m{first_layer + 1}", group=1,
                conv_pieces=[StatePiece("x", 0, 3, 3)], ssm_piece=StatePiece("ssm", 0, 2, 2),
            ),
        )  # fmt: skip


def pooled(engine_id: str, pp_rank: int, *pools: Pool) -> RankCache:
    return RankCache(
        engine_id,
        pp_rank,
        0,
        layers=tuple(layer for pool in pools for layer in pool.layers),
        groups=(CacheGroup("attention", 4), CacheGroup("state", 4)),
        regions=tuple(memory_region(pool.data) for pool in pools),
    )


def test_b06_layers_that_share_a_region_move_by_their_own_groups_blocks() -> None:
    theirs, ours = [Pool(0), Pool(2)], [Pool(0), Pool(2)]
    for i, pool in enumerate(theirs):
        pool.data[:] = np.arange(64).reshape(4, 16) + 100 * i
    remotes = {(pp, 0): pooled("there", pp, pool) for pp, pool in enumerate(theirs)}
    plan = generate_engine_transfer_plan(topology("here"), pooled("here", 0, *ours), remotes)
    regions = [region for source in plan.sources for region in source.regions]
    assert {region.name: region.local.group for region in regions} == {
        "a0": 0, "m1": 1, "a2": 0, "m3": 1,
    }  # fmt: skip
    for batch in plan.lower(
        [BlockTable([0, 1]), BlockTable([3])], [BlockTable([2, 0]), BlockTable([1])], end_token=8
    ):
        for here, there, nbytes in zip(
            batch.local_address, batch.remote_address, batch.nbytes, strict=True
        ):
            ctypes.memmove(int(here), int(there), int(nbytes))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.data[[0, 1]] == other.data[[2, 0]]).all()
        assert (mine.data[3, :15] == other.data[1, :15]).all()
        assert not mine.data[2].any()
        assert not mine.data[3, 15]


def test_b06_a_layer_without_an_entry_is_an_error() -> None:
    ours, theirs = Pool(0), Pool(0)
    cache = pooled("there", 0, theirs)
    with pytest.raises(CoverageError, match=r"\(1, 'm1'\)"):
        generate_engine_transfer_plan(
            topology("here"),
            pooled("here", 0, ours),
            {(0, 0): replace(cache, layers=cache.layers[:1])},
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("end", "source", "destination", "moved"),
    [
        (9, [1, 2], [3, 1], ((1, 2), (3, 1))),  # tokens 1 to 8; a block is 8 tokens of two ranks
        (17, [0, 3, 1], [0, 2, 3], ((3, 1), (2, 3))),  # tokens 9 to 16; block 0 is the null block
    ],
)
def test_b07_a_block_id_stands_for_the_tokens_of_all_ranks_that_share_them(
    end: int,
    source: list[int],
    destination: list[int],
    moved: tuple[tuple[int, ...], ...],
    direction: Direction,
) -> None:
    shared = replace(engine(1, 2), shares=((0, 1), (0, 1)), dcp=2)
    tables = {
        "sliding_window": (
            BlockTable(source, null_block_id=0),
            BlockTable(destination, null_block_id=0),
        )
    }
    model = Model(("sliding_window",), window=8)
    here = hybrid(model, shared, shared, tables, end=end, direction=direction)
    plans = move(here)
    assert len(plans) == 2
    for rank, plan in plans.items():
        (spec,) = plan.read_specs(
            here.ours.block_tables(here.our_tables),
            here.theirs.block_tables(here.their_tables),
            end_token=end,
        )
        listed = (spec.remote_block_ids[0], spec.local_block_ids[0])
        theirs, ours = listed if here.reads else listed[::-1]
        count = 2 - rank  # the last token is rank 0's, alone in its block
        assert (theirs, ours) == (moved[0][:count], moved[1][:count])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_b08_a_block_that_only_one_side_has_is_ignored(direction: Direction) -> None:
    for source, destination in (([2, 0], [1, 3, 0]), ([2, 0, 1], [1, 3])):
        here = world(
            engine(),
            engine(),
            source=BlockTable(source),
            destination=BlockTable(destination),
            end=8,
            direction=direction,
        )
        move(here)
        assert page_pairs(here) == [(0, 3), (2, 1)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_b09_a_prefix_hit_moves_the_tail_in_pull_and_push(direction: Direction) -> None:
    here = world(
        engine(blocks=42),
        engine(blocks=42),
        source=BlockTable([10, 11, 12, 13, 14]),
        destination=BlockTable([40, 41], start_token=12),
        start=12,
        end=20,
        direction=direction,
    )
    move(here)
    assert page_pairs(here) == [(13, 40), (14, 41)]


def test_b10_stages_meet_by_their_layers() -> None:
    here = world(engine(stages=(2, 2, 2, 2)), engine(stages=(4, 4)))
    plans = here.plans()
    here.move({rank: here.lower(plan) for rank, plan in plans.items()})
    edges = [(source.rank[0], rank[0]) for rank, plan in plans.items() for source in plan.sources]
    assert edges == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for plan in plans.values():
        assert plan.notify_only == ()
        assert plan.readers == {(0, 0): 1, (1, 0): 1, (2, 0): 1, (3, 0): 1}


def test_b10_each_producer_stage_waits_for_all_consumer_stages_that_read_it() -> None:
    here = world(engine(stages=(8,)), engine(stages=(2, 6)))
    for plan in here.plans().values():
        assert plan.readers == {(0, 0): 2}


def test_b11_half_of_a_block_is_half_the_heads_of_k_and_of_v() -> None:
    small = partial(engine, 4, tokens=2, axes="BKHNC")
    halves = world(small(1), small(2), heads=4, content=2, end=2)
    move(halves)
    assert [piece[2:] for piece in pieces(halves, 0)] == [(0, 32), (64, 32)]
    assert [piece[2:] for piece in pieces(halves, 1)] == [(32, 32), (96, 32)]
    whole = world(small(1), small(1), heads=4, content=2, end=2)
    move(whole)
    assert pieces(whole) == [(0, 0, 0, 128)]


# --- B: right piece, wrong bytes -----------------------------------------------------------------


def test_b19_blocks_step_by_their_stride() -> None:
    latent = CacheComponent("latent", "uint8", 0, 8, 0, 1, 1, 8, 4, 8)
    layer = LayerCache(0, "layers.0", 0, 0, 48, 8, (latent,))
    theirs = RankCache("there", 0, 0, (layer,), (CacheGroup("mla", 4),), (Region(0, 384),))
    ours = replace(theirs, engine_id="here")
    (batch,) = generate_engine_transfer_plan(topology("here"), ours, {(0, 0): theirs}).lower(
        [BlockTable([3, 4])], [BlockTable([3, 4])], end_token=8
    )
    assert batch.local_address.tolist() == batch.remote_address.tolist() == [144, 192]
    assert batch.nbytes.tolist() == [32, 32]


def test_b20_the_producers_pages_may_be_the_larger() -> None:
    here = world(
        engine(2, 4, tokens=32, axes="BHNC", blocks=10),
        engine(2, 1, tokens=16, axes="BHNC", blocks=8),
        heads=2,
        source=BlockTable([5, 9]),
        destination=BlockTable([2, 7, 1]),
        end=40,
    )
    (plan,) = move(here).values()
    cell, page = 8, 256  # both pages: 32 tokens of one head, 16 tokens of two
    assert len(plan.sources) == 2
    for rank, (head, _) in heads_read(plan).items():
        assert [piece for piece in pieces(here) if piece[0] == rank] == [
            (rank, 1 * page + head * 128, 9 * page, 8 * cell),
            (rank, 2 * page + head * 128, 5 * page, 16 * cell),
            (rank, 7 * page + head * 128, 5 * page + 16 * cell, 16 * cell),
        ]


def test_b21_tokens_first_becomes_heads_first() -> None:
    small = partial(engine, 2, tokens=2, blocks=1)
    here = world(small(), small(axes="BHNC"), heads=2, end=2)
    move(here)
    source, destination = (
        fleet.ranks[0, 0].data[:32].reshape(4, 8) for fleet in (here.producer, here.consumer)
    )
    t0h0, t0h1, t1h0, t1h1 = source
    assert (destination == [t0h0, t1h0, t0h1, t1h1]).all()


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [("dtype", "uint32", "float8_e4m3"), ("cell_bytes", 8, 4)],
)
def test_b22_caches_of_other_widths_are_refused(field: str, ours: object, theirs: object) -> None:
    here = world(engine(), engine())
    remote = here.producer.ranks[0, 0].cache
    (layer,) = remote.layers
    (kv,) = layer.components
    change: dict[str, Any] = {field: theirs}
    narrow = replace(
        remote,
        layers=(replace(layer, components=(replace(kv, **change),)),),
    )
    with pytest.raises(PlanError, match=f"{field} is {ours} here and {theirs} there"):
        generate_engine_transfer_plan(
            topology("decode"), here.consumer.ranks[0, 0].cache, {(0, 0): narrow}
        )


def topology(engine_id: str, *, tp_size: int = 1, heads: int = 1) -> TransferTopology:
    """The topology of rank 0, whose call names no stage."""
    return TransferTopology(
        tp_rank=0, tp_size=tp_size, block_size=4, engine_id=engine_id, is_mla=False,
        is_mamba=False, total_num_kv_heads=heads,
    )  # fmt: skip


# --- K: cost -------------------------------------------------------------------------------------


def paper(engine_id: str, tp: int, blocks: int, base: int = 1 << 40) -> dict[Rank, RankCache]:
    """An engine of 64 layers, K and V apart, whose memory nobody has."""
    heads, page = 8 // tp, (8 // tp) * 16 * 64 * 4
    strides = (page, page // heads, 64 * 4, 4)
    caches = {}
    for rank in range(tp):
        tensors = [
            FakeTensor(base + i * blocks * page, (blocks, heads, 16, 64), strides)
            for i in range(128)
        ]
        layers = (
            attention_layer(
                (k, v), axes="BHNC", layer=i, name=f"layers.{i}",
                unit_start=rank * heads, unit_total=8,
            )
            for i, (k, v) in enumerate(zip(tensors[::2], tensors[1::2], strict=True))
        )  # fmt: skip
        caches[0, rank] = RankCache(
            engine_id, 0, rank, tuple(layers), (CacheGroup("attention", 16),),
            (Region(base, 128 * blocks * page),),
        )  # fmt: skip
    return caches


def planned(blocks: int) -> tuple[EngineTransferPlan, int, int]:
    """Return a plan for engines of so many blocks, the memory it keeps, and the most it took."""
    ours, theirs = paper("here", 2, blocks), paper("there", 1, blocks)
    generate._known_plans.clear()
    gc.collect()
    tracemalloc.start()
    try:
        plan = generate_engine_transfer_plan(
            topology("here", tp_size=2, heads=8), ours[0, 0], theirs, local_engine=ours
        )
        return plan, *tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def test_b73_nothing_of_a_plan_grows_with_the_number_of_blocks() -> None:
    planned(10)  # what is imported and kept once
    (few, kept, most), (many, kept_of_many, most_of_many) = planned(10_000), planned(1_000_000)
    assert kept_of_many < 1.1 * kept
    assert most_of_many < 1.1 * most
    assert few == many
    assert few.to_json() == many.to_json()


def test_b73_engines_of_one_shape_share_one_plan() -> None:
    ours, theirs = paper("here", 2, 10_000), paper("there", 4, 10_000)
    rank = topology("here", tp_size=2, heads=8)
    first = generate_engine_transfer_plan(rank, ours[0, 0], theirs, local_engine=ours)
    others = dict(reversed(paper("elsewhere", 4, 20_000, 1 << 41).items()))
    tracemalloc.start()
    try:
        second = generate_engine_transfer_plan(rank, ours[0, 0], others, local_engine=ours)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert second.sources is first.sources
    assert kept < 64 * 1024


def test_b73_the_handshake_does_not_grow_with_the_number_of_blocks() -> None:
    few, many = (
        seal({}, RankPayload(paper("there", 1, blocks)[0, 0], b""))
        for blocks in (10_000, 1_000_000)
    )
    assert len(many) - len(few) <= 64 * 8  # numbers of more digits


def test_b73_a_request_costs_what_it_moves() -> None:
    plan, _, _ = planned(10_000)
    ids = [BlockTable(range(first, first + 400, 4)) for first in (17, 9_000)]
    plan.lower(*[[table] for table in ids], end_token=1600)
    tracemalloc.start()
    try:
        (batch,) = plan.lower(*[[table] for table in ids], end_token=1600)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.nbytes.size == 64 * 2 * 100
    assert most < 4 * 3 * batch.nbytes.nbytes  # of 10,000 blocks it would be a hundred times that


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producers", "consumers", "read"),
    [(8, 2, [0, 4]), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]), (3, 3, [0, 1, 2]), (2, 3, [0, 0, 1])],
)
def test_consumers_are_spread_over_replicas(
    producers: int, consumers: int, read: list[int]
) -> None:
    """A latent that every rank holds, and a single head that every rank has a copy of."""
    for kind in ("mla", "attention"):
        table = Tables({(kind, 0): BlockTable([0])})
        model = Model((kind,), heads=1)
        here = World(Case(model, engine(1, producers), engine(1, consumers), table, table, 0, 4))
        plans = move(here)
        assert [
            [rank for _, rank in (s.rank for s in plan.sources)] for plan in plans.values()
        ] == [[rank] for rank in read]


# --- problems of the field's own connectors ------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("prompt", "cached"), [(40, 1), (48, 1), (36, 1), (52, 2)])
def test_field_a_a_prefix_hit_with_other_page_sizes_pairs_by_token(
    prompt: int, cached: int, direction: Direction
) -> None:
    start = 16 * cached
    here = world(
        engine(tokens=4, blocks=14),
        engine(tokens=16, blocks=5),
        source=BlockTable(range(13)),
        destination=BlockTable([4, 2, 1], start_token=start),
        start=start,
        end=prompt,
        direction=direction,
    )
    move(here)
    first = (
        {there: here for _, here, there, _ in pieces(here)}
        if here.reads
        else {here: there for _, here, there, _ in pieces(here)}
    )
    assert first[start * 8] == 4 * 16 * 8  # the first token that is not cached, not a later one


def test_field_b_pieces_that_every_rank_holds_are_read_whole() -> None:
    """One group of B and C cannot be split; x is 8 channels of 12 bytes, B and C are 1 each."""
    model = Model(("mamba2",), content=1, state_heads=4, state_groups=1)
    here = hybrid(model, engine(1, 1), engine(1, 2), {"mamba2": (BlockTable([0]), BlockTable([0]))})
    move(here)
    assert pieces(here, 0) == [(0, 0, 0, 48), (0, 48, 96, 24 + 8)]
    assert pieces(here, 1) == [(0, 0, 48, 48 + 24), (0, 72, 120 + 8, 8)]


def test_field_c_push_leaves_no_replica_unwritten() -> None:
    plans = move(world(engine(4, 2), engine(4, 8), heads=4, direction="write"))
    assert [sorted(heads_read(plan)) for plan in plans.values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_field_d_push_writes_every_cell_once() -> None:
    plans = move(world(engine(2, 8), engine(2, 1), heads=2, direction="write"))
    writers = {tp: heads_read(plan)[0] for tp, plan in plans.items() if plan.sources}
    assert sorted(writers.values()) == [(0, 1), (1, 2)]
    assert all(plan.readers == {(0, 0): 2} for plan in plans.values())


def test_field_e_a_latent_beside_heads_is_read_once() -> None:
    block = (BlockTable([0]), BlockTable([1]))
    here = hybrid(
        Model(("attention", "mla"), heads=4),
        engine(4, 4, stages=(2,)),
        engine(4, 1, stages=(2,)),
        {"attention": block, "mla": block},
    )
    read = sources_of(move(here)[0])
    assert read[0] == [0, 1, 2, 3]
    assert len(read[1]) == 1


def test_field_f_more_producers_than_heads_are_all_read_or_told() -> None:
    plans = move(world(engine(4, 8), engine(4, 2), heads=4))
    assert [sorted(heads_read(plan)) for plan in plans.values()] == [[0, 2], [4, 6]]
    assert sorted(tp for plan in plans.values() for _, tp in plan.notify_only) == [1, 3, 5, 7]
    assert all(set(plan.readers.values()) == {1} for plan in plans.values())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_field_h_nothing_to_move_moves_nothing(direction: Direction) -> None:
    here = world(
        engine(),
        engine(),
        source=BlockTable([0, 1]),
        destination=BlockTable([], start_token=8),
        start=8,
        end=8,
        direction=direction,
    )
    move(here)
    assert here.lower(here.plan((0, 0))) == []


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("producer_pages", "consumer_pages"), [(2, 1), (1, 2)])
def test_field_w_logical_blocks_may_differ_where_pages_are_equal(
    producer_pages: int, consumer_pages: int, direction: Direction
) -> None:
    tables = {1: [5, 0, 3], 2: [2, 1]}
    pages = {1: [5, 0, 3], 2: [4, 5, 2]}
    here = world(
        engine(tokens=64, pages_per_block=producer_pages, blocks=6),
        engine(tokens=64, pages_per_block=consumer_pages, blocks=6),
        source=BlockTable(tables[producer_pages]),
        destination=BlockTable(tables[consumer_pages]),
        end=192,
        direction=direction,
    )
    move(here)
    assert page_pairs(here) == sorted(
        zip(pages[producer_pages], pages[consumer_pages], strict=True)
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("producers", "consumers"), [(1, 2), (4, 1)])
def test_field_x_hybrids_may_differ_in_logical_blocks_and_in_tp(
    producers: int, consumers: int, direction: Direction
) -> None:
    here = hybrid(
        Model(("attention", "mamba2"), heads=2, state_groups=4),
        engine(2, producers, pages_per_block=3, stages=(2,), blocks=3),
        engine(2, consumers, pages_per_block=1, stages=(2,), blocks=8),
        {
            "attention": (BlockTable([2, 0]), BlockTable([7, 1, 4], start_token=8)),
            "mamba2": (BlockTable([1]), BlockTable([6])),
        },
        start=8,
        end=19,
        direction=direction,
    )
    move(here)


# --- and of those who use them -------------------------------------------------------------------


def test_a_state_is_registered_whole() -> None:
    pool = Pool(0)
    whole = pooled("here", 0, pool)
    assert whole.regions == (Region(pool.data.ctypes.data, pool.data.nbytes),)
    with pytest.raises(UnsupportedLayoutError, match=r"\(1, 'm1'\) component 'ssm'"):
        replace(
            whole, layers=whole.layers[1:], regions=(memory_region(pool.data.ravel()[: -16 + 9]),)
        )


@pytest.mark.parametrize(
    ("axes", "tokens", "end", "count", "merged"),
    [
        ("BNHC", 4, 8, 2, 1),  # two whole pages, neighbours
        ("BNHC", 4, 6, 2, 1),  # and a part of one
        ("BHNC", 4, 8, 2 * 2 * 4, 15),  # pages x heads x tokens; the corners of pages touch
        ("BHNC", 4, 6, 2 * (4 + 2), 11),
        ("BHNC", 1, 2, 2, 1),  # of a single token both orders are one
    ],
)
def test_a_batch_knows_how_many_pieces_it_was(
    axes: str, tokens: int, end: int, count: int, merged: int
) -> None:
    here = world(
        engine(2, tokens=tokens),
        engine(2, tokens=tokens, axes=axes),
        heads=2,
        source=BlockTable([0, 1]),
        destination=BlockTable([0, 1]),
        end=end,
    )
    (batch,) = here.lower(here.plan((0, 0)))
    assert (batch.piece_count, batch.nbytes.size) == (count, merged)


@pytest.mark.parametrize("blocks", [[0, 1, 2], [2, 1, 0], [0, 2, 1]])
def test_blocks_are_neighbours_in_whatever_order_they_were_handed_out(blocks: list[int]) -> None:
    here = world(
        engine(), engine(), source=BlockTable(blocks), destination=BlockTable(blocks), end=12
    )
    (batch,) = here.lower(here.plan((0, 0)))
    assert (batch.piece_count, batch.nbytes.size) == (3, 1)


def test_a_plan_says_who_is_told_and_how_often() -> None:
    here = world(engine(4, 8), engine(4, 2), heads=4)
    words = here.plan((0, 0)).explain()
    assert "tells without bytes: [(0, 1), (0, 3)]" in words
    assert "our engine reports to: (0, 0) by 1, (0, 1) by 1, (0, 2) by 1" in words
    assert "tells" not in world(engine(), engine()).plan((0, 0)).explain()


def test_calls_that_name_no_pp_rank_mean_the_first_stage() -> None:
    here = world(engine(4, 2, stages=(2,)), engine(4, 2, stages=(1, 1)), heads=4)
    theirs = here.consumer.caches
    ours = topology("prefill", tp_size=2, heads=4)
    for info in transfer_infos(theirs):
        ours.register_remote_engine("decode", info)
    assert ours.get_engine_info("decode") == ours.get_engine_info("decode", 0)
    assert ours.get_engine_info("decode") != ours.get_engine_info("decode", 1)
    assert "remote_pp=0" in ours.describe("decode")
    plan = generate_engine_transfer_plan(
        ours, here.producer.caches[0, 0], theirs, direction="write"
    )
    assert [source.rank for source in plan.sources] == [(0, 0), (1, 0)]
