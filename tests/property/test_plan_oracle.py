"""Plans of random pairs of engines, against an oracle that knows nothing of plans."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from kvbridge.model import Rank
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    TransferBatch,
    generate,
    generate_engine_transfer_plan,
)
from tests.property.engines import (
    DIRECTIONS,
    NULL,
    Case,
    Engine,
    Layout,
    Model,
    Paging,
    Tables,
    cases,
)
from tests.property.oracle import World

# One part is the quick tier. A test may not run for more than 90 seconds, so more of them are
# more parts, each of which draws for itself.
PARTS = [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 30))]
in_parts = pytest.mark.parametrize("part", PARTS)
pytestmark = pytest.mark.timeout(85)
many = settings(max_examples=200)
some = settings(max_examples=40)


@in_parts
@many
@given(case=cases())
def test_every_needed_byte_is_moved_exactly_once_and_nothing_else_is_touched(
    part: int, case: Case
) -> None:
    world = World(case)
    lowered = {rank: world.lower(plan) for rank, plan in world.plans().items()}
    world.move(lowered)
    for rank, batches in lowered.items():
        for batch in batches:
            assert batch.nbytes.size <= batch.piece_count
            assert not touching(batch, world, rank)


def touching(batch: TransferBatch, world: World, rank: Rank) -> list[tuple[int, ...]]:
    """Return the pieces that go on, on both sides and within a region, where another one ends."""
    order = np.argsort(batch.local_address)
    pieces = [
        (int(batch.local_address[i]), int(batch.remote_address[i]), int(batch.nbytes[i]))
        for i in order
    ]
    memories = (world.ours.ranks[rank], world.theirs.ranks[batch.remote_rank])
    seams = {region.address for memory in memories for region in memory.regions}
    return [
        after
        for (here, there, nbytes), after in pairwise(pieces)
        if (here + nbytes, there + nbytes) == after[:2] and seams.isdisjoint(after[:2])
    ]


# What the oracle has found, kept.


def move(case: Case) -> World:
    world = World(case)
    world.move({rank: world.lower(plan) for rank, plan in world.plans().items()})
    return world


@pytest.mark.parametrize("layout", [Layout("BNHC", gap=0), Layout("BHNC", apart=True, gap=0)])
def test_a_piece_does_not_reach_over_the_seam_of_two_regions(layout: Layout) -> None:
    """Memory of two layers, or of K and V, may touch and yet be registered apart."""
    engine = Engine(((0, 2),), (2,), layout=layout, blocks=2)
    tables = Tables({("attention", 0): BlockTable([0, 1])})
    move(Case(Model(("attention",) * 2, 2), engine, engine, tables, tables, 0, 8))


def test_all_blocks_of_layers_that_are_neighbours_are_one_piece() -> None:
    near = Engine(((0, 2),), (2,), layout=Layout("BNHC", gap=0, one_region=True), blocks=2)
    far = replace(near, layout=replace(near.layout, gap=64))
    tables = Tables({("attention", 0): BlockTable([0, 1])})
    for producer, consumer, count in ((near, near, 1), (far, near, 2), (near, far, 2)):
        world = move(Case(Model(("attention",) * 2, 2), producer, consumer, tables, tables, 0, 8))
        (batch,) = world.lower(world.plan((0, 0)))
        assert batch.nbytes.size == count


def test_a_table_of_nothing_but_null_blocks_moves_nothing() -> None:
    producer = Engine(((0, 2),), (1,), pagings=(Paging(3),))
    consumer = Engine(((0, 2),), (1,), pagings=(Paging(4),), layout=Layout("BKHNC"))
    world = move(
        Case(
            Model(("attention",), 2),
            producer,
            consumer,
            Tables({("attention", 0): BlockTable([0, 1])}),
            Tables({("attention", 0): BlockTable([NULL], null_block_id=NULL)}),
            0,
            4,
        )
    )
    assert world.lower(world.plan((0, 0))) == []


def test_layers_may_differ_in_whether_k_and_v_are_apart() -> None:
    """With pages of one token K and V are neighbours: one component in this layer, two in that."""
    model = Model(("attention",) * 2, 2)
    producer = Engine(((0, 2),), (2,), (Paging(4), Paging(1)), Layout("BHKNC"))
    consumer = Engine(((0, 2),), (2,), (Paging(4),), Layout("BHNKC"))
    tables = Tables({("attention", 0): BlockTable([0]), ("attention", 1): BlockTable(range(4))})
    for direction in DIRECTIONS:
        move(Case(model, producer, consumer, tables, tables, 0, 4, direction))


@in_parts
@some
@given(case=cases(plain=True))
def test_a_batch_has_the_bytes_of_all_its_tokens(part: int, case: Case) -> None:
    world = World(case)
    tokens = case.end - case.start
    for plan in world.plans().values():
        due = {s.rank: tokens * sum(r.nbytes_per_token for r in s.regions) for s in plan.sources}
        moved = {batch.remote_rank: batch.total_nbytes for batch in world.lower(plan)}
        assert moved == {rank: nbytes for rank, nbytes in due.items() if nbytes}


@in_parts
@some
@given(case=cases())
def test_all_our_ranks_agree_on_who_reports_to_whom(part: int, case: Case) -> None:
    world = World(case)
    plans = world.plans()
    carried = {rank: [s.rank for s in plan.sources] for rank, plan in plans.items()}
    for remote in world.theirs.ranks:
        readers = [rank for rank in plans if remote in carried[rank]]
        tellers = [rank for rank, plan in plans.items() if remote in plan.notify_only]
        assert len(tellers) == (0 if readers else 1)
        assert {plan.readers[remote] for plan in plans.values()} == {len(readers) + len(tellers)}
    for rank, plan in plans.items():
        assert set(plan.readers) == set(world.theirs.ranks)
        assert carried[rank] == sorted(carried[rank])


@in_parts
@some
@given(case=cases())
def test_a_plan_survives_its_json(part: int, case: Case) -> None:
    world = World(case)
    for rank, plan in world.plans().items():
        copy = EngineTransferPlan.from_json(plan.to_json())
        assert copy == plan
        assert hash(copy) == hash(plan)
        assert copy.fingerprint == plan.fingerprint
        assert copy.binding is None
        bound = copy.bind(world.ours.ranks[rank].cache, world.theirs.caches)
        assert as_lists(world.lower(bound)) == as_lists(world.lower(plan))


@in_parts
@some
@given(case=cases())
def test_addresses_are_no_part_of_a_plan(part: int, case: Case) -> None:
    """Nor is the number of blocks, where no stride depends on it; such engines share a plan."""
    consumer = replace(case.consumer, base=case.consumer.base + 4096)
    if consumer.layout.axes.startswith("B"):
        consumer = replace(consumer, blocks=64)
    producer = replace(case.producer, base=case.producer.base + 8192)
    moved = replace(case, producer=producer, consumer=consumer)
    here, there = World(case), World(moved)
    plans = here.plans()
    shared = there.plans()
    generate._known_plans.clear()
    lowered = {}
    for rank, anew in there.plans().items():
        assert anew == plans[rank] == shared[rank]
        assert anew.to_json() == plans[rank].to_json()
        rebound = plans[rank].bind(there.ours.ranks[rank].cache, there.theirs.caches)
        lowered[rank] = there.lower(shared[rank])
        assert as_lists(lowered[rank]) == as_lists(there.lower(anew))
        assert as_lists(lowered[rank]) == as_lists(there.lower(rebound))
    there.move(lowered)


@in_parts
@some
@given(case=cases())
def test_the_order_in_which_ranks_are_given_does_not_matter(part: int, case: Case) -> None:
    world = World(case)
    for rank, plan in world.plans().items():
        generate._known_plans.clear()
        backwards = generate_engine_transfer_plan(
            world.ours.topology(rank),
            world.ours.ranks[rank].cache,
            dict(reversed(world.theirs.caches.items())),
            local_engine=dict(reversed(world.ours.caches.items())),
            direction=case.direction,
        )
        assert backwards == plan


def as_lists(batches: list[TransferBatch]) -> list[object]:
    return [
        (b.remote_rank, b.local_address.tolist(), b.remote_address.tolist(), b.nbytes.tolist())
        for b in batches
    ]
