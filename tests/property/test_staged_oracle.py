"""The staged form of random reads: the same bytes in the same places, in fewer copies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model import Rank
from kvbridge.plan import BlockTable, EngineTransferPlan, PlanOptions, StagedTransfer
from tests.property.engines import Case, Engine, Layout, Model, Paging, Tables, cases
from tests.property.oracle import POISON, World, indices

pytestmark = pytest.mark.timeout(85)
STAGING = np.uint64(1 << 50)


def staged_plan(world: World, rank: Rank) -> EngineTransferPlan:
    return replace(world.plan(rank), options=PlanOptions(strategy="staged"))


def lower_staged(world: World, plan: EngineTransferPlan, address: int) -> StagedTransfer:
    return plan.lower_staged(
        world.ours.block_tables(world.our_tables),
        world.theirs.block_tables(world.their_tables),
        start_token=world.case.start,
        end_token=world.case.end,
        staging_address=address,
    )


def move_staged(world: World, rank: Rank) -> StagedTransfer:
    """Do what a staged plan says, byte by byte, and check the rank's memory."""
    staged = lower_staged(world, staged_plan(world, rank), int(STAGING))
    memory = world.ours.ranks[rank]
    counts = np.zeros(memory.data.size, np.int64)
    staging = np.full(staged.staging_nbytes, POISON, np.uint8)
    times = np.zeros(staged.staging_nbytes, np.int64)
    for batch in staged.batches:
        source = world.theirs.ranks[batch.remote_rank]
        values = source.data[indices(source, batch.remote_address, batch.nbytes)]
        direct = batch.local_address - STAGING >= np.uint64(staged.staging_nbytes)
        in_staging = np.repeat(~direct, batch.nbytes.astype(np.int64))
        here = indices(memory, batch.local_address[direct], batch.nbytes[direct])
        np.add.at(counts, here, 1)
        memory.data[here] = values[~in_staging]
        there = bytes_of(batch.local_address[~direct] - STAGING, batch.nbytes[~direct])
        np.add.at(times, there, 1)
        staging[there] = values[in_staging]
    assert (times == 1).all(), "every byte of staging is used, once"
    scatter = staged.scatter
    target = indices(memory, scatter.target_address, scatter.nbytes)
    np.add.at(counts, target, 1)
    memory.data[target] = staging[bytes_of(scatter.source_address - STAGING, scatter.nbytes)]
    world._check(rank, memory, counts)
    return staged


def bytes_of(offset: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.int64]:
    sizes = nbytes.astype(np.int64)
    before = sizes.cumsum() - sizes
    return np.repeat(offset.astype(np.int64) - before, sizes) + np.arange(sizes.sum())


@settings(max_examples=200)
@given(case=cases())
def test_the_staged_form_moves_the_same_bytes(case: Case) -> None:
    assume_even = case.assume_even and case.direction == "read"
    world = World(replace(case, direction="read", assume_even=assume_even))
    for rank in world.ours.ranks:
        direct = sum(b.piece_count for b in world.lower(staged_plan(world, rank)))
        staged = move_staged(world, rank)
        assert sum(b.piece_count for b in staged.batches) <= direct
        unplaced = lower_staged(world, staged_plan(world, rank), 0)
        assert unplaced.staging_nbytes == staged.staging_nbytes


def heads_first_and_tokens_first(**changes: Any) -> World:
    producer = Engine(((0, 4),), (3,), (Paging(8),), Layout("BKHNC"))
    consumer = Engine(((0, 4),), (3,), (Paging(8),), Layout("BKNHC"))
    tables = Tables({("attention", 0): BlockTable([3, 5, 1])})
    model = Model(("attention",) * 3, heads=4)
    return World(replace(Case(model, producer, consumer, tables, tables, 0, 24), **changes))


def test_pages_are_read_whole_where_cells_are_scattered() -> None:
    world = heads_first_and_tokens_first()
    (direct,) = world.lower(world.plan((0, 0)))
    staged = move_staged(world, (0, 0))
    assert direct.piece_count == 3 * 2 * 24 * 4, "layers x K/V x tokens x heads"
    assert sum(batch.nbytes.size for batch in staged.batches) == 3 * 3, "layers x blocks"
    assert staged.scatter.total_nbytes == direct.total_nbytes


def test_auto_stages_small_cells_and_says_so() -> None:
    world = heads_first_and_tokens_first()
    plan = world.plan((0, 0))
    assert plan.strategy == "staged"
    assert "the plan is staged" in plan.explain()
    alike = replace(world.case, consumer=world.case.producer)
    assert World(alike).plan((0, 0)).strategy == "direct"


def test_auto_copies_large_cells_directly() -> None:
    """From 64 KiB a cell on, a copy of its own is cheaper than moving everything twice."""
    world = heads_first_and_tokens_first(model=Model(("attention",) * 3, heads=4, content=16 << 10))
    assert world.plan((0, 0)).strategy == "direct"


def test_a_direct_plan_needs_no_staging() -> None:
    world = heads_first_and_tokens_first()
    plan = replace(world.plan((0, 0)), options=PlanOptions(strategy="direct"))
    staged = lower_staged(world, plan, 0)
    assert staged.staging_nbytes == 0
    assert staged.scatter.nbytes.size == 0
    assert [b.nbytes.size for b in staged.batches] == [b.nbytes.size for b in world.lower(plan)]


def test_a_plan_that_writes_has_no_staged_form() -> None:
    world = heads_first_and_tokens_first(direction="write")
    assert world.plan((0, 0)).strategy == "direct"
    with pytest.raises(UnsupportedLayoutError, match="no staged form"):
        lower_staged(world, world.plan((0, 0)), 0)


def test_what_is_rearranged_does_not_reach_over_the_seam_of_two_regions() -> None:
    """K and V in tensors of their own may touch, and yet be buffers of their own."""
    producer = Engine(((0, 2),), (2,), (Paging(2),), Layout("BNHC", apart=True, gap=0), blocks=1)
    consumer = replace(producer, layout=Layout("BHNC", apart=True, gap=0))
    tables = Tables({("attention", 0): BlockTable([0])})
    model = Model(("attention", "attention"), heads=2)
    move_staged(World(Case(model, producer, consumer, tables, tables, 0, 2)), (0, 0))
