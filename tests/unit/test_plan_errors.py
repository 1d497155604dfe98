"""Bad inputs of the planner: each is refused with its own error, which names what disagrees."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbridge.errors import (
    BlockTableError,
    CoverageError,
    PlanError,
    UnboundPlanError,
    UnsupportedLayoutError,
)
from kvbridge.model import CacheGroup, LayerCache, Rank, RankCache
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    PlanOptions,
    generate_engine_transfer_plan,
)
from kvbridge.plan import generate as generate_module
from tests.property.engines import Engine, Layout, Model, Paging, even_shares
from tests.property.oracle import Fleet

MODEL = Model(("attention", "attention"), heads=4, content=1)


def fleet(name: str, tp: int = 1, **changes: Any) -> Fleet:
    stages = changes.pop("stages", (len(MODEL.layers),))
    return Fleet(MODEL, Engine(even_shares(MODEL.heads, tp), stages, **changes), name)


THERE = fleet("there", 2)
HERE = fleet("here", 2)


def generate(
    rank: Rank = (0, 0),
    *,
    ours: Fleet = HERE,
    local: RankCache | None = None,
    remotes: Mapping[Rank, RankCache] | None = None,
    **arguments: Any,
) -> EngineTransferPlan:
    return generate_engine_transfer_plan(
        ours.topology(rank),
        ours.ranks[rank].cache if local is None else local,
        THERE.caches if remotes is None else remotes,
        **arguments,
    )


def with_layers(cache: RankCache, change: Callable[[LayerCache], LayerCache]) -> RankCache:
    return replace(cache, layers=tuple(change(layer) for layer in cache.layers))


# --- engines that contradict themselves ----------------------------------------------------------


def test_every_remote_rank_is_needed() -> None:
    with pytest.raises(PlanError, match="remote engine has no ranks"):
        generate(remotes={})
    with pytest.raises(PlanError, match=r"2 ranks, but these are missing: \[\(0, 0\)\]"):
        generate(remotes={(0, 1): THERE.caches[0, 1]})


def test_remote_ranks_are_of_one_engine() -> None:
    remotes = THERE.caches
    remotes[0, 1] = replace(remotes[0, 1], engine_id="elsewhere")
    with pytest.raises(PlanError, match=r"several engine ids: \['elsewhere', 'there'\]"):
        generate(remotes=remotes)


def test_remote_ranks_stand_under_their_own_coordinate() -> None:
    remotes = THERE.caches
    remotes[0, 0], remotes[0, 1] = remotes[0, 1], remotes[0, 0]
    with pytest.raises(
        PlanError, match=r"lists engine 'there' rank \(pp 0, tp 1\) under rank \(0, 0\)"
    ):
        generate(remotes=remotes)


def test_remote_ranks_share_their_cache_groups() -> None:
    remotes = THERE.caches
    extra = CacheGroup("attention", 8)
    remotes[0, 1] = replace(remotes[0, 1], groups=(*remotes[0, 1].groups, extra))
    with pytest.raises(PlanError, match="different cache groups"):
        generate(remotes=remotes)


def test_local_cache_is_that_of_the_topology() -> None:
    with pytest.raises(PlanError, match=r"tp 1\) is not the topology's rank \(pp 0, tp 0\)"):
        generate(local=HERE.caches[0, 1])
    with pytest.raises(PlanError, match="belongs to engine 'other', the topology to 'here'"):
        generate(local=replace(HERE.caches[0, 0], engine_id="other"))


def test_local_engine_does_not_contradict_the_local_rank() -> None:
    caches = HERE.caches
    with pytest.raises(PlanError, match=r"local engine has .* missing: \[\(0, 0\)\]"):
        generate(local_engine={(0, 1): caches[0, 1]})
    with pytest.raises(PlanError, match="local engine has no ranks"):
        generate(local_engine={})
    longer = with_layers(caches[0, 0], lambda layer: replace(layer, page_count=1))
    with pytest.raises(PlanError, match=r"holds another cache for engine 'here'"):
        generate(local_engine={**caches, (0, 0): longer})
    with pytest.raises(PlanError, match=r"sizes \(1, 1\), the topology \(1, 2\)"):
        generate(local_engine={(0, 0): caches[0, 0]})
    with pytest.raises(PlanError, match="several engine ids"):
        generate(local_engine={**caches, (0, 1): replace(caches[0, 1], engine_id="x")})


def test_other_stages_cannot_be_assumed() -> None:
    staged = fleet("here", stages=(1, 1))
    with pytest.raises(PlanError, match=r"has 2 stages.*pass local_engine"):
        generate(ours=staged)
    assert generate(ours=staged, local_engine=staged.caches).sources


def test_an_uneven_share_cannot_be_assumed() -> None:
    uneven = Fleet(MODEL, Engine(((0, 1), (1, 4)), (2,)), "here")
    with pytest.raises(PlanError, match=r"\('k', 0, 1\).*\('k', 0, 2\).*pass local_engine"):
        generate(
            ours=uneven,
        )
    assert generate(ours=uneven, local_engine=uneven.caches).sources


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"direction": "push"}, PlanError, "direction 'push' is unknown; known: read, write"),
        (
            {"direction": "write", "options": PlanOptions(strategy="staged")},
            UnsupportedLayoutError,
            "a plan that writes has no staged form",
        ),
    ],
)
def test_what_is_asked_for_must_exist(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(**arguments)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(PlanError, match="'fast' is unknown; known: auto, direct, staged"):
        PlanOptions(strategy="fast")  # type: ignore[arg-type]


# --- kinds of caches -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["state", "sliding_window", "chunked"])
def test_a_layer_of_another_kind_there_is_refused(kind: str) -> None:
    def changed(cache: RankCache) -> RankCache:
        return replace(cache, groups=tuple(replace(group, kind=kind) for group in cache.groups))

    with pytest.raises(PlanError, match=rf"\(kind, window\) is \('attention', None\) .*'{kind}'"):
        generate(remotes={rank: changed(cache) for rank, cache in THERE.caches.items()})


def test_tokens_that_no_rank_holds_are_refused() -> None:
    """A producer whose ranks all hold the first of two token shares lacks the other."""
    remotes = {rank: replace(cache, dcp_size=2) for rank, cache in THERE.caches.items()}
    with pytest.raises(CoverageError, match="token share 1 of 2"):
        generate(remotes=remotes)


# --- engines that do not match -------------------------------------------------------------------


def without_layer(cache: RankCache, index: int) -> RankCache:
    return replace(cache, layers=tuple(x for x in cache.layers if x.layer != index))


def test_a_layer_that_nobody_holds_is_refused() -> None:
    remotes = {rank: without_layer(cache, 1) for rank, cache in THERE.caches.items()}
    with pytest.raises(CoverageError, match=r"1 layers .* first \(1, 'layers.1'\)"):
        generate(remotes=remotes)
    with pytest.raises(CoverageError, match=r"layers.1"):
        generate(direction="write", local=without_layer(HERE.caches[0, 0], 1))


def test_layers_may_be_left_out_when_that_is_asked_for() -> None:
    remotes = {rank: without_layer(cache, 1) for rank, cache in THERE.caches.items()}
    plan = generate(remotes=remotes, options=PlanOptions(require_all_layers=False))
    assert plan.left_out == ((1, "layers.1"),)
    assert {region.key for source in plan.sources for region in source.regions} == {(0, "layers.0")}
    assert EngineTransferPlan.from_json(plan.to_json()) == plan
    assert "leaves out 1 layers" in plan.explain()


def test_layers_of_the_producer_that_nobody_needs_are_no_error() -> None:
    plan = generate(local=without_layer(HERE.caches[0, 0], 1))
    assert plan.left_out == ()
    assert len(plan.sources[0].regions) == len(generate().sources[0].regions) // 2


def test_layers_pair_by_name_too() -> None:
    renamed = {
        rank: with_layers(cache, lambda layer: replace(layer, name=f"model.{layer.name}"))
        for rank, cache in THERE.caches.items()
    }
    with pytest.raises(CoverageError, match=r"2 layers .* first \(0, 'layers.0'\).*model.layers.0"):
        generate(remotes=renamed)


def test_heads_that_nobody_holds_are_refused() -> None:
    half = Fleet(MODEL, Engine(((0, 2), (1, 3)), (2,)), "there")
    with pytest.raises(
        CoverageError, match=r"\(0, 'layers.0'\).*units \[3, 4\).*consumer ranks \[\(0, 1\)\]"
    ):
        generate((0, 1), remotes=half.caches)
    with pytest.raises(CoverageError, match=r"units \[3, 4\)"):
        generate((0, 0), remotes=half.caches)  # every rank refuses what one of them cannot get


def test_components_must_be_the_same() -> None:
    def scales(layer: LayerCache) -> LayerCache:
        (k, v) = layer.components
        return replace(layer, components=(replace(k, name="k_scale"), v))

    remotes = {rank: with_layers(cache, scales) for rank, cache in THERE.caches.items()}
    with pytest.raises(PlanError, match=r"\['k', 'v'\], the producer \['k_scale', 'v'\]"):
        generate(remotes=remotes)


def test_models_must_have_the_same_heads() -> None:
    more = Fleet(replace(MODEL, heads=8), Engine(even_shares(8, 2), (2,)), "there")
    with pytest.raises(PlanError, match="unit_total is 4 here and 8 there"):
        generate(remotes=more.caches)


def test_groups_must_be_of_one_kind() -> None:
    remotes = {
        rank: replace(cache, groups=(CacheGroup("mla", 4),)) for rank, cache in THERE.caches.items()
    }
    with pytest.raises(PlanError, match=r"\('attention', None\) here and \('mla', None\) there"):
        generate(remotes=remotes)


def test_every_plan_is_checked_before_it_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_module._known_plans.clear()
    monkeypatch.setattr(generate_module, "_sources", lambda *_: ())
    with pytest.raises(CoverageError, match=r"layer 0 'layers.0', .* would be written 0 times"):
        generate()


# --- block tables --------------------------------------------------------------------------------

PLAN = generate()  # pages of 4 tokens, blocks 0 to 7


def lower(
    local: Any = range(4),
    remote: Any = range(4),
    start: int = 0,
    end: int = 16,
) -> None:
    ours, theirs = (
        ids if isinstance(ids, BlockTable) else BlockTable(ids) for ids in (local, remote)
    )
    PLAN.lower([ours], [theirs], start_token=start, end_token=end)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local": [0, 1, 2]}, r"local block table of group 0 covers tokens \[0, 12\) .*\[0, 16\)"),
        ({"remote": [0, 1, 2]}, r"remote block table of group 0 covers tokens \[0, 12\)"),
        ({"remote": []}, r"covers tokens \[0, 0\)"),
        ({"local": BlockTable(range(4), 4)}, r"local .* covers tokens \[4, 20\) .*\[0, 16\)"),
        ({"remote": BlockTable(range(4), 1)}, r"remote .* covers tokens \[1, 17\)"),
        ({"local": [0, 1, -2, 3]}, "local .* lists block -2; blocks 0 to 7 exist"),
        ({"remote": [0, 1, -2, 3]}, "remote .* lists block -2"),
        ({"local": [0, 1, 8, 3]}, "local .* lists block 8; blocks 0 to 7 exist"),
        ({"remote": [0, 1, 8, 3]}, "remote .* lists block 8"),
        ({"local": [0, 1, 2, 1]}, "local .* lists block 1 twice"),
        ({"local": [0.0, 1.0, 2.0, 3.0]}, "local .* must list integers, got float64"),
        (
            {"remote": np.zeros((4, 1), np.int64)},
            r"remote .* must list integers, got int64 \(4, 1\)",
        ),
        (
            {"remote": BlockTable([0, 1, 7, 3], null_block_id=7)},
            "remote .* null block for token 8, which must move",
        ),
        ({"start": -1}, r"tokens \[-1, 16\) are no range"),
        ({"start": 17}, r"tokens \[17, 16\) are no range"),
    ],
)
def test_block_tables_that_cannot_be_right_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(BlockTableError, match=message):
        lower(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[3, 1]],), r"must list integers, got int64 \(1, 2\)"),
        (([[3, 1], [2]],), "must list integers: .*inhomogeneous"),
        (([3, 1 << 63],), f"lists block {1 << 63}; blocks 0 to 7 exist"),
        (([3, 1 << 70],), f"lists block {1 << 70}; blocks 0 to 7 exist"),
    ],
)
def test_entries_that_are_no_blocks_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BlockTableError, match=message):
        lower(remote=BlockTable(*arguments), end=8)


def test_a_nested_list_is_no_short_table() -> None:
    with pytest.raises(BlockTableError, match=r"must list integers, got int64 \(1, 4\)"):
        lower(local=BlockTable([[0, 1, 2, 3]]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "lists block ids, got int; pass a list or an array"),
        ((None,), "got NoneType"),
        ("12", "got str"),
        ((b"12",), "got bytes"),
        (({1, 2},), "got set"),
        ((iter([1]),), "got list_iterator"),
        ((np.array(3),), "got ndarray"),
        (([1], -1), "starts at token -1; the first token is 0"),
        (([1], 0.0), "start_token is 0.0, a float; pass a whole number"),
        (([1], None), "start_token is None, a NoneType"),
        (([1], 0, "x"), "null_block_id is 'x', a str"),
    ],
)
def test_what_is_no_table_is_refused_when_it_is_made(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(BlockTableError, match=message):
        BlockTable(*arguments)


@pytest.mark.parametrize("number", [np.uint8, np.int16, np.uint64])
def test_tables_and_ranges_may_be_of_any_whole_numbers(number: type[np.integer[Any]]) -> None:
    """Small unsigned numbers would wrap where positions are subtracted."""
    plain = PLAN.lower(
        [BlockTable([5, 6], 4, 7)], [BlockTable(range(4))], start_token=4, end_token=12
    )
    ids = np.array([5, 6], number)
    table = BlockTable(block_ids=ids, start_token=number(4), null_block_id=number(7))  # type: ignore[arg-type]
    batches = PLAN.lower(
        [table],
        (BlockTable(np.arange(4, dtype=number)),),
        start_token=number(4),  # type: ignore[arg-type]
        end_token=number(12),  # type: ignore[arg-type]
    )
    assert sum(b.total_nbytes for b in plain) > 0
    assert np.array_equal(batches[0].local_address, plain[0].local_address)
    with pytest.raises(BlockTableError, match=r"covers tokens \[4, 12\)"):
        PLAN.lower([table], [BlockTable(range(4))], end_token=12)


def test_tables_are_equal_when_they_list_the_same() -> None:
    table = BlockTable([3, 1], 4, 0)
    for ids in ((3, 1), np.array([3, 1], np.uint8), range(3, -1, -2)):
        assert BlockTable(ids, 4, 0) == table
        assert hash(BlockTable(ids, 4, 0)) == hash(table)
    others = (BlockTable([3, 2], 4, 0), BlockTable([3], 4, 0), BlockTable([3, 1], 5, 0))
    for other in (*others, BlockTable([3, 1], 4), [3, 1]):
        assert other != table


WHAT_NEWCOMERS_PASS: list[tuple[Any, Any, str]] = [
    ([0, 1], [BlockTable([0, 1])], r"the local block tables are \[0, 1\]; .*\[BlockTable\(\[3, 1"),
    ([BlockTable([0, 1])], [[0, 1]], r"the remote block tables are \[\[0, 1\]\]"),
    (BlockTable([0, 1]), [BlockTable([0, 1])], "pass a list with one BlockTable"),
    (None, [BlockTable([0, 1])], "the local block tables are None"),
    ([BlockTable([0, 1])] * 2, [BlockTable([0, 1])], "2 local .* engine has 1 cache groups"),
    ([BlockTable([0, 1])], [BlockTable([0, 1])] * 3, "3 remote .* engine has 1 cache groups"),
]


@pytest.mark.parametrize("form", ["lower", "lower_staged", "read_specs"])
@pytest.mark.parametrize(("local", "remote", "message"), WHAT_NEWCOMERS_PASS)
def test_tables_are_lists_of_one_table_for_each_group(
    form: str, local: Any, remote: Any, message: str
) -> None:
    with pytest.raises(BlockTableError, match=message):
        getattr(PLAN, form)(local, remote, end_token=8)


@pytest.mark.parametrize("form", ["lower", "lower_staged", "read_specs"])
@pytest.mark.parametrize("end", [8.0, np.float64(8), "8", None], ids=repr)
def test_a_range_is_of_whole_numbers(form: str, end: Any) -> None:
    with pytest.raises(
        BlockTableError, match=rf"end_token is .*a {type(end).__name__}; pass a who"
    ):
        getattr(PLAN, form)([BlockTable([0, 1])], [BlockTable([0, 1])], end_token=end)


@pytest.mark.parametrize(
    ("address", "error"), [(-1, PlanError), (1 << 64, PlanError), (1.5, BlockTableError)]
)
def test_staging_memory_has_an_address(address: Any, error: type[Exception]) -> None:
    table = [BlockTable([0, 1])]
    with pytest.raises(error, match="staging_address"):
        PLAN.lower_staged(table, table, end_token=8, staging_address=address)


@pytest.mark.parametrize(("null", "token"), [(8, 16), (2, 48)])
@pytest.mark.parametrize("start", [0, 5])
def test_a_null_block_is_named_with_its_own_first_token(null: int, token: int, start: int) -> None:
    """Pages of 16 tokens here and 32 there: a run of ours is not where a block of theirs is."""
    sizes = {"there": Paging(16), "here": Paging(32)}
    fleets = {name: fleet(name, pagings=(size,), blocks=10) for name, size in sizes.items()}
    plan = generate(ours=fleets["here"], remotes=fleets["there"].caches)
    remote = [BlockTable([7, 8, 9, 2], null_block_id=null)]
    with pytest.raises(
        BlockTableError, match=f"null block for token {token}, .*: entry {token // 16} is {null}, "
    ):
        plan.lower([BlockTable([3, 1])], remote, start_token=start, end_token=50)


def test_a_source_may_repeat_blocks_and_spare_entries_are_ignored() -> None:
    lower(remote=[1, 1, 1, 1])
    lower(local=[0, 1, 2, 3, 3, -1, 99], remote=[0, 1, 2, 3, 99])


def test_null_blocks_are_skipped_where_both_or_only_the_destination_have_them() -> None:
    hole = BlockTable([0, 1, 7, 3], null_block_id=7)
    for remote in (BlockTable(range(4)), hole):
        batches = PLAN.lower([hole], [remote], end_token=16)
        whole = PLAN.lower([BlockTable(range(4))], [BlockTable(range(4))], end_token=16)
        assert sum(b.total_nbytes for b in batches) * 4 == sum(b.total_nbytes for b in whole) * 3


def test_the_consumers_table_is_the_one_that_may_not_repeat() -> None:
    push = generate(direction="write")
    push.lower([BlockTable([1, 1])], [BlockTable([0, 1])], end_token=8)
    with pytest.raises(BlockTableError, match=r"remote .* lists block 1 twice"):
        push.lower([BlockTable([0, 1])], [BlockTable([1, 1])], end_token=8)


def test_every_group_has_a_table() -> None:
    two = {"pagings": (Paging(4), Paging(2))}
    plan = generate(ours=fleet("here", 2, **two))
    tables = [BlockTable(range(8)), BlockTable(range(8))]
    plan.lower(tables, tables[:1], end_token=16)
    with pytest.raises(BlockTableError, match=r"1 local block tables given, none for .* \[1\]"):
        plan.lower(tables[:1], tables[:1], end_token=16)
    with pytest.raises(BlockTableError, match=r"0 remote block tables given, none for .* \[0\]"):
        plan.lower(tables, [], end_token=16)
    with pytest.raises(BlockTableError, match="1 local block tables given"):
        plan.read_specs(tables[:1], tables[:1], end_token=16)


def test_read_specs_check_what_they_list() -> None:
    (spec,) = PLAN.read_specs(
        [BlockTable([5, 6], 4)], [BlockTable(range(4))], start_token=5, end_token=9
    )
    assert spec.remote_rank == (0, 0)
    assert spec.local_block_ids == ((5, 6),)
    assert spec.remote_block_ids == ((1, 2),)
    with pytest.raises(BlockTableError, match=r"does not hold tokens \[0, 9\)"):
        PLAN.read_specs([BlockTable([5, 6], 4)], [BlockTable(range(4))], end_token=9)


# --- plans from elsewhere ------------------------------------------------------------------------


def test_a_plan_without_addresses_is_not_lowered() -> None:
    plan = EngineTransferPlan.from_json(PLAN.to_json())
    with pytest.raises(UnboundPlanError, match="bind it"):
        plan.lower([BlockTable([0])], [BlockTable([0])], end_token=4)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "\x00\xff"])
def test_garbled_plans_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="no transfer plan"):
        EngineTransferPlan.from_json(text)


def first_regions(document: dict[str, Any]) -> dict[str, Any]:
    regions: dict[str, Any] = document["sources"][0]["regions"][0]
    return regions


TAMPERING: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], str]] = {
    "version": (lambda d: d.update(version=2), PlanError, "version 2, this code reads 1"),
    "new field": (lambda d: d.update(surprise=1), PlanError, "surprise"),
    "new field of a source": (lambda d: d["sources"][0].update(a=1), PlanError, "field `a`"),
    "new field of regions": (lambda d: first_regions(d).update(b=1), PlanError, "field `b`"),
    "new field of needs": (lambda d: d["needs"][0].update(c=1), PlanError, "field `c`"),
    "new field of readers": (lambda d: d["readers"][0].update(d=1), PlanError, "field `d`"),
    "direction": (lambda d: d.update(direction="push"), PlanError, "push"),
    "no grids": (lambda d: d.update(grids=[]), PlanError, "no transfer plan"),
    "grid beyond": (lambda d: first_regions(d).update(local=99), PlanError, "no transfer plan"),
    "grid below": (lambda d: first_regions(d).update(local=-1), PlanError, "no transfer plan"),
    "no groups": (lambda d: d.update(local_groups=[]), PlanError, "cache groups"),
    "group": (lambda d: d["local_groups"][0].update(kind="flash"), PlanError, "'flash' is unknown"),
    "strategy": (lambda d: d["options"].update(strategy="fast"), PlanError, "enum value 'fast'"),
    "hole": (
        lambda d: first_regions(d).update(units=[0, 1]),
        CoverageError,
        r"rank \(0, 0\), layer 0 'layers.0', component 'k': units \[1, 2\) .* written 0 times",
    ),
    "too many heads": (
        lambda d: first_regions(d).update(units=[0, 3]),
        CoverageError,
        r"units \[2, 3\) must be written 0 times and would be written 1 times",
    ),
    "no heads": (lambda d: first_regions(d).update(units=[1, 1]), CoverageError, "written 0 times"),
    "no heads beside": (
        lambda d: d["sources"][0]["regions"].append({**first_regions(d), "units": [1, 1]}),
        CoverageError,
        r"has the empty range \[1, 1\)",
    ),
    "no sources": (lambda d: d.update(sources=[]), CoverageError, "written 0 times"),
    "twice": (
        lambda d: d["sources"][0]["regions"].append(first_regions(d)),
        CoverageError,
        "must be written 1 times and would be written 2 times",
    ),
    "source twice": (
        lambda d: d["sources"].append(d["sources"][0]),
        CoverageError,
        "written 2 times",
    ),
    "no layer": (
        lambda d: first_regions(d)["layers"].pop(),
        CoverageError,
        "layer 1.* written 0 times",
    ),
    "no needs": (lambda d: d.update(needs=[]), CoverageError, "must be written 0 times"),
    "fewer needs": (lambda d: d["needs"][0]["layers"].pop(), CoverageError, "layer 1"),
    "needed twice": (
        lambda d: d["needs"].append(d["needs"][0]),
        CoverageError,
        r"units \[0, 2\) are listed 2 times among what must be written",
    ),
    "page stride": (lambda d: d["grids"][0].update(page_stride=0), PlanError, ">= 1.*page_stride"),
    "unit stride": (lambda d: d["grids"][0].update(unit_stride=-8), PlanError, ">= 0.*unit_stride"),
    "token stride": (lambda d: d["grids"][0].update(token_stride=-8), PlanError, ">= 0.*token_str"),
    "no page": (lambda d: d["grids"][0].update(page_tokens=-1), PlanError, ">= 0.*page_tokens"),
    "pages": (lambda d: d["grids"][0].update(pages_per_block=0), PlanError, ">= 1.*pages_per_bl"),
    "cells": (lambda d: d["grids"][0].update(cells=0), PlanError, ">= 1.*cells"),
    "page without tokens": (
        lambda d: d["grids"][0].update(page_tokens=0),
        PlanError,
        "tokens move in pages of 0 tokens; state has 0",
    ),
    "state with tokens": (
        lambda d: d["grids"][0].update(moves="state"),
        PlanError,
        "state move in pages of 4 tokens; state has 0",
    ),
    "no cell": (lambda d: first_regions(d).update(cell_bytes=0), PlanError, "cells of 0 bytes"),
    "group below": (lambda d: d["grids"][0].update(group=-1), PlanError, ">= 0.*group"),
    "share": (lambda d: d["grids"][0]["share"].update(size=0), PlanError, ">= 1.*share.size"),
    "share of none": (
        lambda d: d["grids"][0]["share"].update(rank=5, size=2),
        PlanError,
        "token share 5 of 2",
    ),
    "no readers": (lambda d: d.update(readers=[]), PlanError, r"rank \(0, 0\), .* those of \[\]"),
    "read by none": (lambda d: d["readers"][0].update(count=0), PlanError, ">= 1.*count"),
    "told beyond": (lambda d: d.update(notify_only=[[9, 9]]), PlanError, r"remote rank \(9, 9\)"),
    "negative heads": (
        lambda d: first_regions(d).update(units=[-1, 2]),
        CoverageError,
        r"units \[-1, 0\)",
    ),
}


@pytest.mark.parametrize("case", TAMPERING)
def test_tampered_plans_are_refused(case: str) -> None:
    change, error, message = TAMPERING[case]
    document = json.loads(PLAN.to_json())
    change(document)
    with pytest.raises(error, match=message):
        EngineTransferPlan.from_json(json.dumps(document))


# --- binding -------------------------------------------------------------------------------------


def test_a_plan_is_bound_to_its_own_rank() -> None:
    with pytest.raises(PlanError, match=r"for rank \(0, 0\), the cache is of .*tp 1\)"):
        PLAN.bind(HERE.caches[0, 1], THERE.caches)


def test_a_plan_is_bound_to_all_its_sources() -> None:
    with pytest.raises(PlanError, match=r"needs remote rank \(0, 0\); got \[\(0, 1\)\]"):
        PLAN.bind(HERE.caches[0, 0], {(0, 1): THERE.caches[0, 1]})


@pytest.mark.parametrize("fresh", [False, True])
def test_a_plan_is_not_bound_to_ranks_that_it_does_not_know(fresh: bool) -> None:
    plan = EngineTransferPlan.from_json(PLAN.to_json()) if fresh else PLAN
    more = fleet("there", 4).caches
    with pytest.raises(PlanError, match=r"knows .*\(0, 1\)\], got also \[\(0, 2\), \(0, 3\)\]"):
        plan.bind(HERE.caches[0, 0], more)
    assert plan.bind(HERE.caches[0, 0], {(0, 0): THERE.caches[0, 0]}).binding, "the one it reads"


def test_a_plan_is_not_bound_to_a_consumer_that_it_would_leave_partly_empty() -> None:
    three = replace(MODEL, layers=MODEL.layers[:1] * 3)
    longer = Fleet(three, Engine(even_shares(MODEL.heads, 2), (3,)), "here").caches[0, 0]
    plan = EngineTransferPlan.from_json(PLAN.to_json())
    with pytest.raises(PlanError, match=r"fills 2 layers, .* also holds \[\(2, 'layers.2'\)\]"):
        plan.bind(longer, THERE.caches)
    skipping = generate(
        ours=HERE,
        local=longer,
        local_engine={(0, 0): longer, (0, 1): replace(longer, tp_rank=1)},
        options=PlanOptions(require_all_layers=False),
    )
    EngineTransferPlan.from_json(skipping.to_json()).bind(longer, THERE.caches)


def test_a_plan_is_not_bound_to_a_consumer_with_more_heads_or_components() -> None:
    ours = HERE.caches[0, 0]
    plan = EngineTransferPlan.from_json(PLAN.to_json())

    def halved(layer: LayerCache) -> LayerCache:
        return replace(layer, components=tuple(replace(c, unit_count=2) for c in layer.components))

    alone = fleet("here")
    whole = alone.caches[0, 0]
    half = with_layers(whole, halved)
    narrow = generate(ours=alone, local=half, local_engine={(0, 0): half})
    with pytest.raises(PlanError, match=r"units \[0, 4\) of component 'k', which the plan does"):
        EngineTransferPlan.from_json(narrow.to_json()).bind(whole, THERE.caches)

    def scaled(layer: LayerCache) -> LayerCache:
        scale = replace(layer.components[0], name="k_scale")
        return replace(layer, components=(*layer.components, scale))

    with pytest.raises(PlanError, match=r"units \[0, 2\) of component 'k_scale', which the plan"):
        plan.bind(with_layers(ours, scaled), THERE.caches)


def test_caches_of_another_shape_are_refused_by_what_differs() -> None:
    padded = fleet("there", 2, layout=Layout(padded_axis="B")).caches
    plain = THERE.caches[0, 0].layers[0].page_stride
    with pytest.raises(
        PlanError,
        match=rf"component 'k': page_stride is \d+ in the cache and {plain} in the plan; make",
    ):
        PLAN.bind(HERE.caches[0, 0], padded)


@pytest.mark.parametrize(
    ("local", "remotes", "message"),
    [
        (None, THERE.caches, "local is None; pass the RankCache"),
        (HERE.caches[0, 0], None, "remotes is None; pass a mapping"),
        (HERE.caches[0, 0], list(THERE.caches.values()), r"remotes is \[RankCache.*pass a mapping"),
        (HERE.caches[0, 0], {(0, 0): None}, r"remotes is \{\(0, 0\): None\}"),
    ],
)
def test_only_caches_are_planned_for_and_bound(local: Any, remotes: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLAN.bind(local, remotes)
    with pytest.raises(PlanError, match=message):
        generate_engine_transfer_plan(HERE.topology((0, 0)), local, remotes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": "staged"}, r"options is 'staged'; pass PlanOptions\(\.\.\.\)"),
        ({"options": {}}, r"options is \{\}; pass PlanOptions"),
        ({"topology": None}, "topology is None; pass TransferTopology"),
        ({"local_engine": [HERE.caches[0, 0]]}, "local_engine is .*pass a mapping"),
    ],
)
def test_arguments_of_another_type_are_named(arguments: dict[str, Any], message: str) -> None:
    given = {
        "topology": HERE.topology((0, 0)), "local": HERE.caches[0, 0], "remotes": THERE.caches,
    }  # fmt: skip
    with pytest.raises(PlanError, match=message):
        generate_engine_transfer_plan(**{**given, **arguments})


@pytest.mark.parametrize(
    "changes",
    [
        {"pagings": (Paging(8),)},
        {"pagings": (Paging(4, 2),)},
        {"layout": Layout("BKNHC", padded_axis="B")},
        {"layout": Layout("KBHNC")},
        {"layout": Layout("BKNHC")},
    ],
    ids=repr,
)
def test_a_plan_is_not_bound_to_another_shape(changes: dict[str, Any]) -> None:
    """Each differs in one number at least: page stride, tokens, pages of a block, strides."""
    other_ours, other_theirs = fleet("here", 2, **changes), fleet("there", 2, **changes)
    with pytest.raises(PlanError):
        PLAN.bind(other_ours.caches[0, 0], THERE.caches)
    with pytest.raises(PlanError):
        PLAN.bind(HERE.caches[0, 0], other_theirs.caches)


def test_a_plan_is_not_bound_to_a_rank_without_its_layers_or_heads() -> None:
    with pytest.raises(PlanError, match=r"'here'.* does not hold layer \(1, 'layers.1'\)"):
        PLAN.bind(without_layer(HERE.caches[0, 0], 1), THERE.caches)
    remotes = THERE.caches
    moved = replace(THERE.caches[0, 1], tp_rank=0)  # heads [2, 4) where [0, 2) were
    with pytest.raises(CoverageError, match=r"units \[0, 2\), the rank holds \[2, 4\)"):
        PLAN.bind(HERE.caches[0, 0], {**remotes, (0, 0): moved})
