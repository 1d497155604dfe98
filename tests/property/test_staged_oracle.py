"""The staged form of random reads: the same bytes in the same places, in fewer copies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbridge.errors import PlanError, UnsupportedLayoutError
from kvbridge.model import Rank
from kvbridge.plan import BlockTable, EngineTransferPlan, PlanOptions, StagedTransfer
from kvbridge.plan.cost import COPY_COST_BYTES
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
    move(world, rank, [staged])
    return staged


def move(world: World, rank: Rank, transfers: list[StagedTransfer]) -> None:
    """Move them one after the other, through staging that holds nothing of the one before."""
    memory = world.ours.ranks[rank]
    counts = np.zeros(memory.data.size, np.int64)
    for staged in transfers:
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


def portions_of(world: World, rank: Rank, **sizes: int) -> list[StagedTransfer]:
    """Return a request in portions, each as if it were a request of its own."""
    portions = staged_plan(world, rank).staged_portions(
        world.ours.block_tables(world.our_tables),
        world.theirs.block_tables(world.their_tables),
        start_token=world.case.start,
        end_token=world.case.end,
        **sizes,
    )
    at = int(STAGING)
    return [StagedTransfer(p.batches(at), p.scatter(at), p.staging_nbytes) for p in portions]


@settings(max_examples=100)
@given(case=cases(), most=st.integers(1, 4096), share=st.integers(1, 8))
def test_portions_add_up_to_the_request_and_each_fits(case: Case, most: int, share: int) -> None:
    """Windows, states, pages that move whole: all of it once, in whatever portions."""
    assume_even = case.assume_even and case.direction == "read"
    world = World(replace(case, direction="read", assume_even=assume_even))
    aim = max(1, most // share)
    for rank in world.ours.ranks:
        portions = portions_of(world, rank, most_nbytes=most, aim_nbytes=aim)
        move(world, rank, portions)
        assert all(each.staging_nbytes <= most for each in portions)
        assert all(each.staging_nbytes for each in portions[1:])
        for each in portions:
            pages = sum(b.nbytes.size for b in each.batches)
            assert each.staging_nbytes <= aim or pages == 1, "more than a page is within the aim"


def test_a_request_is_cut_where_a_page_ends() -> None:
    """Three layers of three pages of 1,024 bytes, of which two are to fit."""
    world = heads_first_and_tokens_first()
    (page,) = {int(n) for b in move_staged(world, (0, 0)).batches for n in b.nbytes.tolist()}
    portions = portions_of(world, (0, 0), most_nbytes=4 * page, aim_nbytes=2 * page)
    assert [each.staging_nbytes // page for each in portions] == [2, 2, 2, 2, 1]
    move(world, (0, 0), portions)


def test_pages_that_never_fit_are_copied_directly() -> None:
    world = heads_first_and_tokens_first()
    (page,) = {int(n) for b in move_staged(world, (0, 0)).batches for n in b.nbytes.tolist()}
    (only,) = portions_of(world, (0, 0), most_nbytes=page - 1)
    assert only.staging_nbytes == 0
    direct = world.lower(world.plan((0, 0)))
    assert [b.nbytes.size for b in only.batches] == [b.nbytes.size for b in direct]
    move(world, (0, 0), [only])


@pytest.mark.parametrize(("most", "aim"), [(0, 0), (4, 8), (-1, -1), (8, 0)])
def test_sizes_of_portions_that_cannot_be_are_refused(most: int, aim: int) -> None:
    with pytest.raises(PlanError, match="0 < aim_nbytes <= most_nbytes"):
        portions_of(heads_first_and_tokens_first(), (0, 0), most_nbytes=most, aim_nbytes=aim)


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


def test_pieces_below_a_quarter_of_what_a_copy_costs_are_packed_and_explain_says_so() -> None:
    """Three layers, pages of 8 tokens and 4 heads, cells of 8 bytes."""
    world = heads_first_and_tokens_first()
    for direction in ("read", "write"):
        plan = World(replace(world.case, direction=direction)).plan((0, 0))
        assert plan.is_packed
        nbytes = 3 * 2 * 8 * 4 * 8
        line = f"0 copies, {nbytes} bytes, {2 * nbytes} rearranged; a push is packed"
        assert f"the same, written in packed parts: {line}" in plan.explain()
        direct = replace(plan, options=PlanOptions(strategy="direct"))
        assert not direct.is_packed
        assert "a push is direct" in direct.explain()
    quarter, element = COPY_COST_BYTES // 4, 4
    for nbytes, packed in ((quarter - element, True), (quarter, False)):
        model = Model(("attention",) * 3, heads=4, content=nbytes // element)
        assert heads_first_and_tokens_first(model=model).plan((0, 0)).is_packed == packed


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
