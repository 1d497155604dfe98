"""The topology: the field's formulas with the field's numbers, and the registry of engines."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvbridge.errors import TopologyConflictError, UnknownEngineError, UnsupportedLayoutError
from kvbridge.model import EngineTransferInfo, TransferTopology
from kvbridge.plan import TPMapping, compute_tp_mapping

INFO = EngineTransferInfo(
    remote_tp_size=2,
    remote_block_len=4096,
    remote_block_size=16,
    remote_physical_blocks_per_logical=1,
    start_layer=0,
    end_layer=8,
)


def topology(rank: int = 0, size: int = 1, **changes: Any) -> TransferTopology:
    return TransferTopology(
        **{
            "tp_rank": rank,
            "tp_size": size,
            "block_size": 16,
            "engine_id": "here",
            "is_mla": False,
            "is_mamba": False,
            "total_num_kv_heads": 8,
            **changes,
        }
    )


# --- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "remote", "ratio"),
    [(1, 1, 1), (4, 4, 1), (8, 2, 4), (2, 1, 2), (2, 8, -4), (1, 2, -2), (3, 6, -2), (6, 3, 2)],
)
def test_tp_ratio_is_negative_where_the_remote_is_larger(
    local: int, remote: int, ratio: int
) -> None:
    assert topology(0, local).tp_ratio(remote) == ratio


@pytest.mark.parametrize(("local", "remote"), [(3, 2), (2, 3), (8, 3), (4, 6)])
def test_sizes_that_do_not_divide_have_no_ratio(local: int, remote: int) -> None:
    here = topology(0, local)
    with pytest.raises(UnsupportedLayoutError, match=rf"{local} \(local\) and {remote} \(remote\)"):
        here.tp_ratio(remote)
    with pytest.raises(UnsupportedLayoutError, match=rf"{local} \(local\) and {remote} \(remote\)"):
        compute_tp_mapping(here, remote, ["attention"])


@pytest.mark.parametrize(("local", "remote"), list(product(range(1, 9), repeat=2)))
def test_ranks_to_meet_are_those_whose_share_overlaps_for_every_pair_of_sizes(
    local: int, remote: int
) -> None:
    for rank in range(local):
        overlapping = [
            r
            for r in range(remote)
            if rank * remote < (r + 1) * local and r * local < (rank + 1) * remote
        ]
        assert topology(rank, local).handshake_target_ranks(remote) == overlapping


def test_a_tp_size_below_one_is_refused() -> None:
    for call in (topology().tp_ratio, topology().handshake_target_ranks):
        with pytest.raises(UnsupportedLayoutError, match="remote_tp_size 0"):
            call(0)
    with pytest.raises(UnsupportedLayoutError, match="remote_dcp_size 0"):
        topology().handshake_target_ranks(1, 0)


def test_block_size_ratio() -> None:
    assert topology(block_size=64).block_size_ratio(16) == 4
    assert topology(block_size=16).block_size_ratio(16) == 1
    with pytest.raises(UnsupportedLayoutError, match=r"16 \(local\) and 64 \(remote\)"):
        topology(block_size=16).block_size_ratio(64)
    with pytest.raises(UnsupportedLayoutError, match="remote_block_size 0"):
        topology().block_size_ratio(0)


@pytest.mark.parametrize(
    ("heads", "size", "held", "replicated"),
    [(8, 1, 8, False), (8, 4, 2, False), (8, 8, 1, False), (8, 16, 1, True), (2, 3, 1, True)],
)
def test_heads_of_a_rank(heads: int, size: int, held: int, replicated: bool) -> None:
    here = topology(0, size, total_num_kv_heads=heads)
    assert here.local_physical_heads == held
    assert here.local_replicates_kv_cache is replicated


def test_replication_is_by_heads_or_by_mla() -> None:
    wide = replace(INFO, remote_tp_size=8)
    for heads, is_mla, replicated, holds_the_same in (
        (8, False, False, False),
        (4, False, True, True),
        (8, True, True, True),  # MLA counts as one head
    ):
        here = topology(total_num_kv_heads=heads, is_mla=is_mla)
        here.register_remote_engine("there", wide)
        assert here.is_kv_replicated("there") is replicated
        assert here.replicates_kv_cache("there") is holds_the_same
    mla = topology(is_mla=True)
    mla.register_remote_engine("there", replace(INFO, remote_tp_size=1))
    assert not mla.is_kv_replicated("there")
    assert mla.replicates_kv_cache("there")
    assert mla.local_replicates_kv_cache
    assert mla.total_num_kv_heads == 1
    assert mla.local_physical_heads == 1


# --- the golden numbers of the field -------------------------------------------------------------

A = ("attention",)
HYBRID = ("attention", "state")


@pytest.mark.parametrize(
    ("rank", "size", "remote", "heads", "sources", "offset", "slots", "consumers"),
    [
        (2, 4, 2, 8, (1,), 0, {1: 0}, 2),
        (3, 4, 2, 8, (1,), 1, {1: 0}, 2),
        (0, 1, 2, 8, (0, 1), 0, {0: 0, 1: 1}, 1),
        (0, 2, 8, 4, (0, 2), 0, {0: 0, 2: 1}, 1),
        (1, 2, 8, 4, (4, 6), 0, {4: 0, 6: 1}, 1),
        (0, 2, 8, 2, (0,), 0, {0: 0}, 1),
        (1, 2, 16, 4, (8, 12), 0, {8: 0, 12: 1}, 1),
        (3, 4, 16, 8, (12, 14), 0, {12: 0, 14: 1}, 1),
        (1, 4, 8, 8, (2, 3), 0, {2: 0, 3: 1}, 1),
    ],
)
def test_mapping_of_one_rank(
    rank: int,
    size: int,
    remote: int,
    heads: int,
    sources: tuple[int, ...],
    offset: int,
    slots: dict[int, int],
    consumers: int,
) -> None:
    here = topology(rank, size, total_num_kv_heads=heads)
    assert compute_tp_mapping(here, remote, A) == TPMapping(
        (sources,), sources, slots, offset, consumers
    )


@pytest.mark.parametrize(
    ("size", "remote", "heads", "sources", "offsets", "consumers"),
    [
        (16, 2, 8, [0] * 8 + [1] * 8, [0, 0, 1, 1, 2, 2, 3, 3] * 2, 8),
        (8, 2, 8, [0] * 4 + [1] * 4, [0, 1, 2, 3] * 2, 4),
        (8, 4, 4, [0, 0, 1, 1, 2, 2, 3, 3], [0] * 8, 2),
        (8, 1, 4, [0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], 8),
    ],
)
def test_mapping_of_all_ranks_of_the_larger_side(
    size: int, remote: int, heads: int, sources: list[int], offsets: list[int], consumers: int
) -> None:
    mappings = [
        compute_tp_mapping(topology(rank, size, total_num_kv_heads=heads), remote, A)
        for rank in range(size)
    ]
    assert [mapping.all_source_ranks for mapping in mappings] == [(rank,) for rank in sources]
    assert [mapping.rank_offset_factor for mapping in mappings] == offsets
    assert {mapping.local_consumers for mapping in mappings} == {consumers}


def test_state_is_read_from_every_rank_and_attention_from_one_rank_per_head() -> None:
    mapping = compute_tp_mapping(topology(0, 1, total_num_kv_heads=2), 4, HYBRID)
    assert mapping.source_ranks_per_group == ((0, 2), (0, 1, 2, 3))
    assert mapping.all_source_ranks == (0, 1, 2, 3)
    assert mapping.rank_to_attention_slot == {0: 0, 1: 0, 2: 1, 3: 1}
    assert mapping.rank_offset_factor == 0
    for rank, attention, state in ((0, (0, 2), (0, 1, 2, 3)), (1, (4, 6), (4, 5, 6, 7))):
        mapping = compute_tp_mapping(topology(rank, 2, total_num_kv_heads=4), 8, HYBRID)
        assert mapping.source_ranks_per_group == (attention, state)
        assert mapping.local_consumers == 1


def test_state_is_read_where_attention_is_when_the_local_side_is_the_larger() -> None:
    mapping = compute_tp_mapping(topology(3, 4), 2, HYBRID)
    assert mapping.source_ranks_per_group == ((1,), (1,))


def test_mla_reads_one_replica_and_meets_all() -> None:
    for rank, source, met in ((0, 0, [0, 1, 2, 3]), (1, 4, [4, 5, 6, 7])):
        here = topology(rank, 2, is_mla=True)
        assert here.handshake_target_ranks(8) == met
        mapping = compute_tp_mapping(here, 8, ["mla"])
        assert mapping == TPMapping(((source,),), (source,), {source: 0}, 0, 1)


@pytest.mark.parametrize(
    ("local", "remote", "consumers"),
    [(1, 1, 1), (2, 1, 2), (4, 1, 4), (1, 4, 1), (4, 2, 2), (8, 2, 4)],
)
def test_consumers_of_a_remote_rank(local: int, remote: int, consumers: int) -> None:
    assert compute_tp_mapping(topology(0, local), remote, A).local_consumers == consumers


@pytest.mark.parametrize(
    ("local", "remote", "local_dcp", "remote_dcp", "consumers"),
    [
        (4, 2, 4, 2, 2),
        (4, 4, 4, 4, 1),
        (4, 1, 4, 1, 4),
        (4, 4, 1, 4, 4),
        (2, 4, 2, 4, 1),
        (8, 2, 8, 2, 4),
        (2, 8, 1, 8, 2),
    ],
)
def test_consumers_with_context_parallelism(
    local: int, remote: int, local_dcp: int, remote_dcp: int, consumers: int
) -> None:
    here = topology(0, local, dcp_size=local_dcp, is_mla=True)
    assert compute_tp_mapping(here, remote, ["mla"], remote_dcp).local_consumers == consumers


@pytest.mark.parametrize(
    ("rank", "local", "remote", "local_dcp", "remote_dcp", "sources"),
    [
        (0, 1, 8, 1, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, 2, 4, 2, 4, [1, 3]),
        (3, 4, 2, 4, 2, [1]),
        (5, 8, 4, 8, 4, [1]),
    ],
)
def test_sources_with_context_parallelism(
    rank: int, local: int, remote: int, local_dcp: int, remote_dcp: int, sources: list[int]
) -> None:
    here = topology(rank, local, dcp_size=local_dcp, is_mla=True)
    assert here.dcp_rank == rank % local_dcp
    assert here.handshake_target_ranks(remote, remote_dcp) == sources
    assert compute_tp_mapping(here, remote, ["mla"], remote_dcp).all_source_ranks == tuple(sources)


def test_heads_that_do_not_divide_have_no_mapping() -> None:
    with pytest.raises(UnsupportedLayoutError, match="6 KV heads and local tp size 4"):
        compute_tp_mapping(topology(0, 4, total_num_kv_heads=6), 2, A)
    with pytest.raises(UnsupportedLayoutError, match="6 KV heads and remote tp size 4"):
        compute_tp_mapping(topology(0, 2, total_num_kv_heads=6), 4, A)


def divides(heads: int, size: int) -> bool:
    return max(heads, size) % min(heads, size) == 0


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16])
def test_head_h_of_the_remote_lands_in_head_h(heads: int) -> None:
    """The field's own exhaustive check: sources, slots and offset place exactly the right heads."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 32) if divides(heads, size)]
    for local, remote in product(sizes, repeat=2):
        if not divides(local, remote):
            continue
        theirs = [r * heads // remote for r in range(remote)]
        for rank in range(local):
            here = topology(rank, local, total_num_kv_heads=heads)
            mapping = compute_tp_mapping(here, remote, A)
            (sources,) = mapping.source_ranks_per_group
            width = here.local_physical_heads
            share = width // len(sources)
            held: dict[int, int] = {}
            for source in sources:
                slot = mapping.rank_to_attention_slot[source]
                at = theirs[source] + mapping.rank_offset_factor * width
                held |= {slot * share + i: at + i for i in range(share)}
            first = rank * heads // local
            assert held == {i: first + i for i in range(width)}


# --- the registry --------------------------------------------------------------------------------


def test_the_same_info_again_returns_the_first_object() -> None:
    here = topology()
    assert here.register_remote_engine("there", INFO) is INFO
    assert here.register_remote_engine("there", replace(INFO)) is INFO
    assert here.get_engine_info("there") is INFO


def test_another_info_under_a_live_key_is_a_conflict_and_changes_nothing() -> None:
    here = topology()
    here.register_remote_engine("there", INFO)
    with pytest.raises(TopologyConflictError, match=r"remote_tp_size=2.*remote_tp_size=4"):
        here.register_remote_engine("there", replace(INFO, remote_tp_size=4))
    assert here.get_engine_info("there") is INFO


def test_the_local_id_cannot_be_registered() -> None:
    here = topology()
    with pytest.raises(TopologyConflictError, match="'here' is the local engine's own"):
        here.register_remote_engine("here", INFO)
    with pytest.raises(UnknownEngineError):
        here.get_engine_info("here")


def test_unknown_engines_and_stages_are_named() -> None:
    here = topology()
    here.register_remote_engine("there", INFO)
    calls = (
        here.get_engine_info,
        here.target_remote_ranks,
        here.is_kv_replicated,
        here.replicates_kv_cache,
        here.describe,
    )
    for call in calls:
        with pytest.raises(UnknownEngineError, match=r"'nowhere' is not registered.*\['there'\]"):
            call("nowhere")
        with pytest.raises(UnknownEngineError, match=r"no stage 1.*\[0\]"):
            call("there", 1)
    with pytest.raises(KeyError):
        here.unregister_remote_engine("nowhere")


def test_stages_are_kept_apart_and_dropped_together() -> None:
    here = topology(1, 4)
    stages = [
        replace(INFO, remote_pp_rank=0, remote_tp_size=2),
        replace(INFO, remote_pp_rank=3, remote_tp_size=8, start_layer=24, end_layer=32),
    ]
    for stage in stages:
        here.register_remote_engine("there", stage)
    assert here.get_engine_info("there") is stages[0]
    assert here.get_engine_info("there", 3) is stages[1]
    assert here.target_remote_ranks("there") == [0]
    assert here.target_remote_ranks("there", 3) == [2, 3]
    here.unregister_remote_engine("there")
    for pp_rank in (0, 3):
        with pytest.raises(UnknownEngineError):
            here.get_engine_info("there", pp_rank)
    changed = replace(INFO, remote_tp_size=4)
    assert here.register_remote_engine("there", changed) is changed


def test_target_ranks_come_from_the_registered_sizes() -> None:
    here = topology(1, 2, dcp_size=2, is_mla=True)
    here.register_remote_engine("there", replace(INFO, remote_tp_size=4, remote_dcp_size=4))
    assert here.target_remote_ranks("there") == [1, 3]


def test_description_is_one_line_and_names_the_stage() -> None:
    here = topology(2, 4, pp_rank=1, pp_size=2)
    here.register_remote_engine("there", replace(INFO, remote_pp_rank=3))
    line = here.describe("there", 3)
    assert "remote_pp=3" in line
    assert "there" in line
    assert "\n" not in line


# --- construction --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "dcp_size", "block_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=rf"'here'.*{name} 0"):
        topology(**{name: 0})


def test_heads_below_one_are_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="total_num_kv_heads 0"):
        topology(total_num_kv_heads=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_rank": 2, "tp_size": 2}, r"tp_rank 2 must be in \[0, tp_size 2\)"),
        ({"tp_rank": -1}, "tp_rank -1"),
        ({"pp_rank": 1}, r"pp_rank 1 must be in \[0, pp_size 1\)"),
    ],
)
def test_ranks_outside_their_size_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=message):
        topology(**changes)


class Backend:
    """An attention backend that says how it lays its cache out, as engines have them."""

    def __init__(self, order: str) -> None:
        self._order = order

    def get_kv_cache_shape(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        size = {"B": num_blocks, "K": 2, "N": block_size, "H": num_kv_heads, "C": head_size}
        return tuple(size[axis] for axis in self._order)


class SilentBackend:
    def get_kv_cache_shape(self, **_: int) -> tuple[int, ...]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("orders", "blocks_first"),
    [
        ([], True),
        (["BKNHC"], True),
        (["KBNHC"], False),
        (["BHNC", "BKNHC"], True),
        (["BHNC", "KBNHC"], False),
    ],
)
def test_backends_are_asked_where_the_block_axis_is(orders: list[str], blocks_first: bool) -> None:
    here = topology(attn_backends=[Backend(order) for order in orders])
    assert here.is_kv_layout_blocks_first is blocks_first


def test_backends_of_a_model_with_state_are_not_asked() -> None:
    assert topology(attn_backends=[SilentBackend()], is_mamba=True).is_kv_layout_blocks_first
