"""Windows, chunks, state, opaque pages and token shares: where each begins and ends.

The oracle shows that their bytes are right; here is what they refuse, and their exact edges.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.errors import BlockTableError, CoverageError, PlanError, UnsupportedLayoutError
from kvbridge.model import CacheComponent, LayerCache, Rank, RankCache
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    compute_tp_mapping,
    generate_engine_transfer_plan,
)
from tests.property.engines import DIRECTIONS, Direction, Engine, Layout, Model, Paging
from tests.property.oracle import Fleet

WHOLE = Engine(((0, 1),), (1,))
TWO_SHARES = Engine(((0, 1), (0, 1)), (1,), dcp=2)


def plan(
    model: Model,
    producer: Engine = WHOLE,
    consumer: Engine = WHOLE,
    *,
    change: Callable[[RankCache], RankCache] = lambda cache: cache,
    direction: Direction = "read",
) -> EngineTransferPlan:
    """Plan rank 0 of engines of one layer; ``change`` is what is changed about the other engine."""
    sides = Fleet(model, producer, "prefill"), Fleet(model, consumer, "decode")
    theirs, ours = sides if direction == "read" else sides[::-1]
    return generate_engine_transfer_plan(
        ours.topology((0, 0)),
        ours.ranks[0, 0].cache,
        {rank: change(cache) for rank, cache in theirs.caches.items()},
        local_engine=ours.caches,
        direction=direction,
    )


def tokens_moved(
    plan: EngineTransferPlan, start: int, end: int, *, first: int = 0, blocks: int = 6
) -> int:
    """Return how many tokens move, where tables begin with token ``first``."""
    table = BlockTable(range(blocks), start_token=first)
    batches = plan.lower([table], [table], start_token=start, end_token=end)
    nbytes = sum(region.nbytes_per_token for source in plan.sources for region in source.regions)
    return sum(batch.total_nbytes for batch in batches) // nbytes


# --- windows and chunks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "start", "end", "first_needed"),
    [
        ("sliding_window", 0, 20, 12),
        ("sliding_window", 0, 8, 0),
        ("sliding_window", 0, 9, 1),
        ("sliding_window", 15, 20, 15),
        ("sliding_window", 0, 0, 0),
        ("chunked", 0, 16, 8),
        ("chunked", 0, 17, 16),
        ("chunked", 0, 15, 8),
        ("chunked", 0, 8, 0),
        ("chunked", 10, 15, 10),
        ("chunked", 0, 0, 0),
    ],
)
def test_only_what_comes_next_can_see_is_moved(
    kind: str, start: int, end: int, first_needed: int
) -> None:
    made = plan(Model((kind,), window=8))
    assert tokens_moved(made, start, end) == end - first_needed
    # Nor need a table hold more than that.
    assert tokens_moved(made, start, end, first=first_needed) == end - first_needed
    if start < end:
        with pytest.raises(BlockTableError, match=rf"\[{first_needed}, {end}\) must move"):
            tokens_moved(made, start, end, first=first_needed + 1)


def test_other_kinds_move_all_that_is_asked_for() -> None:
    for kind in ("attention", "mla"):
        assert tokens_moved(plan(Model((kind,), window=8)), 3, 20) == 17


# --- state ---------------------------------------------------------------------------------------

STATE = Model(("mamba2",))


def state_bytes(local: list[int], remote: list[int], *, direction: Direction = "read") -> int:
    made = plan(STATE, direction=direction)
    batches = made.lower(
        [BlockTable(local, null_block_id=99)], [BlockTable(remote, null_block_id=99)], end_token=0
    )
    return sum(batch.total_nbytes for batch in batches)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_state_moves_whenever_the_destination_lists_it(direction: Direction) -> None:
    whole = (8 + 1 + 1) * 3 * 4 + 4 * 2 * 4  # channels x rows x bytes, heads x content x bytes
    assert state_bytes([3], [5], direction=direction) == whole
    assert state_bytes([99, 3, 99], [5, 5], direction=direction) == whole
    destination, source = ([99], [5]) if direction == "read" else ([5], [99])
    assert state_bytes(destination, source, direction=direction) == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_table_without_any_entry_wants_no_state_only_if_nothing_is_asked_for(
    direction: Direction,
) -> None:
    sides = [BlockTable([]), BlockTable([5])][:: 1 if direction == "read" else -1]
    made = plan(STATE, direction=direction)
    assert made.lower(*[[table] for table in sides], start_token=4, end_token=4) == []
    what = "local" if direction == "read" else "remote"
    with pytest.raises(
        BlockTableError, match=rf"{what} .* is empty, but tokens \[0, 4\) come with"
    ):
        made.lower(*[[table] for table in sides], end_token=4)


@pytest.mark.parametrize(
    ("local", "remote", "direction", "message"),
    [
        ([3, 4], [5], "read", r"local .* lists blocks \[3, 4\]; a state is one block"),
        ([3], [5, 6], "read", r"remote .* lists blocks \[5, 6\]"),
        ([8], [5], "read", "local .* lists block 8; blocks 0 to 7 exist"),
        ([3], [-1], "read", "remote .* lists block -1"),
        ([3], [99], "read", "remote .* lists no block, but .* the state in block 3"),
        ([], [5], "write", "local .* lists no block, but .* the state in block 5"),
    ],
)
def test_states_that_cannot_be_moved_are_refused(
    local: list[int], remote: list[int], direction: Direction, message: str
) -> None:
    with pytest.raises(BlockTableError, match=message):
        state_bytes(local, remote, direction=direction)


def test_a_state_in_read_specs_is_its_block() -> None:
    table = BlockTable([99, 3], null_block_id=99)
    (spec,) = plan(STATE).read_specs([table], [BlockTable([5])], end_token=0)
    assert (spec.local_block_ids, spec.remote_block_ids) == (((3,),), ((5,),))


def with_component(
    cache: RankCache, name: str, change: Callable[[CacheComponent], CacheComponent]
) -> RankCache:
    def changed(layer: LayerCache) -> LayerCache:
        components = (change(c) if c.name == name else c for c in layer.components)
        return replace(layer, components=tuple(components))

    return replace(cache, layers=tuple(map(changed, cache.layers)))


def test_a_state_has_the_same_rows_on_both_sides() -> None:
    with pytest.raises(PlanError, match=r"'conv.x': a block has \(rows, pages\) \(3, 1\) here and"):
        plan(
            STATE,
            change=lambda cache: with_component(
                cache, "conv.x", lambda c: replace(c, token_count=2)
            ),
        )


def test_a_state_has_the_same_pages_on_both_sides() -> None:
    def two_pages(cache: RankCache) -> RankCache:
        return replace(cache, groups=(replace(cache.groups[0], pages_per_block=2),))

    with pytest.raises(PlanError, match=r"\(rows, pages\) \(3, 1\) here and \(3, 2\) there"):
        plan(STATE, change=two_pages)


def test_state_says_what_it_costs() -> None:
    words = plan(STATE).explain()
    assert "rank (0, 0): 0 bytes a token" in words
    assert "conv.x units [0, 8): 1 pieces of 96 bytes for a state" in words


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "verb", "direct", "staged"),
    [
        # 4 heads of 8 bytes for K and V. Pages of 8 tokens there are halved by pages of 4 here.
        ("read", "reads from", "64 copies, 512 bytes", "2 copies, 512 bytes, 512 rearranged"),
        ("write", "writes to", "32 copies, 256 bytes", "2 copies, 256 bytes, 256 rearranged"),
    ],
)
def test_a_plan_says_what_either_form_costs(
    direction: Direction, verb: str, direct: str, staged: str
) -> None:
    producer = Engine(((0, 4),), (1,), (Paging(8),), Layout("BKHNC"))
    consumer = Engine(((0, 4),), (1,), (Paging(4),), Layout("BKNHC"))
    made = plan(Model(("attention",), heads=4), producer, consumer, direction=direction)
    words = made.explain()
    assert f"rank (0, 0) {verb} 1 ranks" in words
    assert f"a remote page of everything, direct: {direct}\n" in words
    assert f"the same, staged: {staged};" in words


# --- opaque pages --------------------------------------------------------------------------------

OPAQUE = Model(("opaque",), opaque_tokens=4)


def test_opaque_pages_move_whole() -> None:
    table = [BlockTable(range(6))]
    (batch,) = plan(OPAQUE).lower(table, table, start_token=4, end_token=9)
    assert batch.total_nbytes == 2 * 5 * 4
    assert "for a page" in plan(OPAQUE).explain()


@pytest.mark.parametrize(("end", "pages"), [(12, 2), (13, 3), (15, 3), (16, 2), (3, 1)])
def test_an_opaque_page_that_a_window_begins_in_moves_whole(end: int, pages: int) -> None:
    table = [BlockTable(range(6))]
    made = plan(Model(("opaque_window",), window=8))
    (batch,) = made.lower(table, table, end_token=end)
    assert batch.total_nbytes == pages * 5 * 4
    with pytest.raises(BlockTableError, match=r"pages of 4 tokens move whole.* token 2 of one"):
        made.lower(table, table, start_token=6, end_token=13)


@pytest.mark.parametrize(("local", "remote", "start"), [(0, 0, 3), (1, 0, 4), (0, 1, 4)])
def test_opaque_pages_are_not_cut(local: int, remote: int, start: int) -> None:
    tables = [[BlockTable(range(6), start_token=first)] for first in (local, remote)]
    with pytest.raises(BlockTableError, match=r"pages of 4 tokens move whole.* token 3 of one"):
        plan(OPAQUE).lower(*tables, start_token=start, end_token=12)


def test_opaque_pages_of_other_sizes_are_refused() -> None:
    def larger(cache: RankCache) -> RankCache:
        return replace(cache, groups=(replace(cache.groups[0], block_tokens=8),))

    with pytest.raises(UnsupportedLayoutError, match=r"\(4, TokenShare.* here and \(8, TokenShare"):
        plan(OPAQUE, change=larger)


def test_opaque_pages_of_other_token_shares_are_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="cut the sequence into pages alike"):
        plan(OPAQUE, TWO_SHARES)


def test_a_page_that_is_opaque_on_one_side_only_is_refused() -> None:
    def opaque(c: CacheComponent) -> CacheComponent:
        return replace(c, token_count=1)

    with pytest.raises(UnsupportedLayoutError, match="tokens are moved here and pages there"):
        plan(Model(("mla",)), change=lambda cache: with_component(cache, "latent", opaque))


# --- token shares --------------------------------------------------------------------------------

LATENT = Model(("mla",))


def test_a_token_has_one_owner_among_the_ranks_that_share_them_out() -> None:
    made = plan(LATENT, TWO_SHARES)
    assert [source.rank for source in made.sources] == [(0, 0), (0, 1)]
    assert tokens_moved_by_rank(made, 0, 9) == {(0, 0): 5, (0, 1): 4}
    assert tokens_moved_by_rank(made, 3, 4) == {(0, 1): 1}


def tokens_moved_by_rank(plan: EngineTransferPlan, start: int, end: int) -> dict[Rank, int]:
    table = [BlockTable(range(6))]
    batches = plan.lower(table, table, start_token=start, end_token=end)
    return {batch.remote_rank: batch.total_nbytes // 8 for batch in batches}


def test_ranks_without_common_tokens_exchange_nothing() -> None:
    made = plan(LATENT, TWO_SHARES, TWO_SHARES)
    assert [source.rank for source in made.sources] == [(0, 0)]
    assert made.readers == {(0, 0): 1, (0, 1): 1}
    # With other pieces of the sequence each of ours meets both of theirs.
    made = plan(LATENT, TWO_SHARES, replace(TWO_SHARES, interleave=2))
    assert [source.rank for source in made.sources] == [(0, 0), (0, 1)]
    assert made.readers == {(0, 0): 2, (0, 1): 2}


def test_the_fields_formula_knows_ranks_that_share_out_tokens() -> None:
    ours = Fleet(LATENT, WHOLE, "decode").topology((0, 0))
    assert compute_tp_mapping(ours, 2, ["mla"]).all_source_ranks == (0,)
    assert compute_tp_mapping(ours, 2, ["mla"], remote_dcp_size=2).all_source_ranks == (0, 1)


def test_one_engine_shares_out_tokens_in_one_way() -> None:
    def other(cache: RankCache) -> RankCache:
        return replace(cache, dcp_interleave_tokens=1 + cache.tp_rank)

    with pytest.raises(PlanError, match=r"in several ways.* \[\(2, 1\), \(2, 2\)\]"):
        plan(LATENT, TWO_SHARES, change=other)


def test_shares_that_never_repeat_together_are_refused() -> None:
    with pytest.raises(
        UnsupportedLayoutError,
        match=r"of 2 ranks \(interleave 4093\) and 2 ranks "
        r"\(interleave 4099\) repeat only after 33554414 tokens, .* divides the",
    ):
        plan(
            LATENT,
            replace(TWO_SHARES, interleave=4093),
            replace(TWO_SHARES, interleave=4099),
        )


def test_token_shares_of_ours_cannot_be_assumed() -> None:
    ours, theirs = Fleet(LATENT, TWO_SHARES, "decode"), Fleet(LATENT, TWO_SHARES, "prefill")
    with pytest.raises(PlanError, match=r"token shares of 2 ranks.*pass local_engine"):
        generate_engine_transfer_plan(ours.topology((0, 0)), ours.ranks[0, 0].cache, theirs.caches)


def test_a_table_of_token_shares_covers_the_tokens_of_all() -> None:
    made = plan(LATENT, TWO_SHARES)
    tables = [BlockTable(range(6))], [BlockTable([0, 1])]
    made.lower(*tables, end_token=16)
    with pytest.raises(BlockTableError, match=r"tokens \[0, 16\) in 2 blocks of 8; .*\[0, 17\)"):
        made.lower(*tables, end_token=17)
    with pytest.raises(BlockTableError, match=r"2 blocks of 8 does not hold tokens \[0, 17\)"):
        made.read_specs(*tables, end_token=17)


def test_logical_blocks_of_token_shares_may_be_many_pages() -> None:
    """A block of 3 pages of 2 tokens, on 2 ranks, stands for 12 tokens."""
    shared = replace(TWO_SHARES, pagings=(Paging(2, 3),))
    made = plan(LATENT, shared)
    table = [BlockTable([1])]
    made.lower([BlockTable(range(6))], table, end_token=12)
    with pytest.raises(BlockTableError, match="in 1 blocks of 12"):
        made.lower([BlockTable(range(6))], table, end_token=13)


SHARED = plan(LATENT, TWO_SHARES)


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (lambda d: d["sources"].pop(), 0),
        (lambda d: d["grids"][2].update(share=d["grids"][1]["share"]), 2),
        (lambda d: d["grids"][1].update(share=d["grids"][0]["share"]), 2),
    ],
    ids=["a share is missing", "a share comes twice", "one has all"],
)
def test_tokens_written_never_or_twice_are_refused(
    change: Callable[[dict[str, Any]], object], times: int
) -> None:
    document = json.loads(SHARED.to_json())
    assert len(document["grids"]) == 3
    change(document)
    with pytest.raises(
        CoverageError,
        match=rf"'latent'.* token \d must be written 1 times and would be written {times} times",
    ):
        EngineTransferPlan.from_json(json.dumps(document))


def test_a_plan_is_not_bound_to_other_token_shares() -> None:
    remotes = Fleet(LATENT, replace(TWO_SHARES, interleave=2), "prefill").caches
    ours = Fleet(LATENT, WHOLE, "decode").ranks[0, 0].cache
    with pytest.raises(PlanError, match="make a new plan"):
        SHARED.bind(ours, remotes)
