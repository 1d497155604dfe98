"""Faults that people who move KV caches have met, each as its small input and the right value.

The names carry the ids of the field reports. Every case also runs through the brute-force oracle.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvbridge.errors import PlanError
from kvbridge.model import (
    CacheComponent,
    CacheGroup,
    LayerCache,
    RankCache,
    Region,
    TransferTopology,
)
from kvbridge.plan import BlockTable, EngineTransferPlan, generate_engine_transfer_plan
from tests.property.oracle import (
    DIRECTIONS,
    Case,
    Direction,
    Engine,
    Layout,
    Model,
    Paging,
    Share,
    Tables,
    World,
    even_shares,
    indices,
)

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
    case = Case(
        Model((False,) * sum(producer.stages), heads, content),
        producer,
        consumer,
        Tables({(False, 0): source or BlockTable([0])}),
        Tables({(False, 0): destination or BlockTable([0])}),
        start,
        end,
        direction,
    )
    return World(case)


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


def page_pairs(world: World) -> list[tuple[int, int]]:
    """Return which pages meet, (producer's, consumer's), where both have pages of equal bytes."""
    (batch,) = world.lower(world.plan((0, 0)))
    (layer,) = world.ours.ranks[0, 0].cache.layers
    here = indices(world.ours.ranks[0, 0], batch.local_address, batch.nbytes) // layer.page_stride
    there = indices(world.theirs.ranks[0, 0], batch.remote_address, batch.nbytes)
    pairs = zip(here.tolist(), (there // layer.page_stride).tolist(), strict=True)
    return sorted({(there, here) if world.reads else (here, there) for here, there in pairs})


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
    change = {field: theirs}
    narrow = replace(
        remote,
        layers=(replace(layer, components=(replace(kv, **change),)),),  # type: ignore[arg-type]
    )
    with pytest.raises(PlanError, match=f"{field} is {ours} here and {theirs} there"):
        generate_engine_transfer_plan(
            topology("decode"), here.consumer.ranks[0, 0].cache, {(0, 0): narrow}
        )


def topology(engine_id: str) -> TransferTopology:
    return TransferTopology(
        tp_rank=0, tp_size=1, block_size=4, engine_id=engine_id, is_mla=False, is_mamba=False,
        total_num_kv_heads=1,
    )  # fmt: skip


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("producers", "consumers", "read"),
    [(8, 2, [0, 4]), (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]), (3, 3, [0, 1, 2]), (2, 3, [0, 0, 1])],
)
def test_consumers_are_spread_over_replicas(
    producers: int, consumers: int, read: list[int]
) -> None:
    """A latent that every rank holds, and a single head that every rank has a copy of."""
    for latent in (True, False):
        table = Tables({(latent, 0): BlockTable([0])})
        model = Model((latent,), heads=1)
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


def test_field_c_push_leaves_no_replica_unwritten() -> None:
    plans = move(world(engine(4, 2), engine(4, 8), heads=4, direction="write"))
    assert [sorted(heads_read(plan)) for plan in plans.values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_field_d_push_writes_every_cell_once() -> None:
    plans = move(world(engine(2, 8), engine(2, 1), heads=2, direction="write"))
    writers = {tp: heads_read(plan)[0] for tp, plan in plans.items() if plan.sources}
    assert sorted(writers.values()) == [(0, 1), (1, 2)]
    assert all(plan.readers == {(0, 0): 2} for plan in plans.values())


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
