"""The field's formula for which tensor-parallel ranks to read.

The planner does not use it: it compares what ranks announce. It is here because engines and
tools know these numbers by name.
"""

from collections.abc import Sequence

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model import TransferTopology
from kvbridge.plan.values import TPMapping


def compute_tp_mapping(
    topology: TransferTopology,
    remote_tp_size: int,
    group_kinds: Sequence[str],
    remote_dcp_size: int = 1,
) -> TPMapping:
    """Return which remote ranks the local rank reads, and which share of each.

    Args:
        topology: The local rank.
        remote_tp_size: Tensor-parallel size of the remote engine.
        group_kinds: ``CacheGroup.kind`` of every cache group.
        remote_dcp_size: Decode-context-parallel size of the remote engine.

    Raises:
        UnsupportedLayoutError: The tensor-parallel sizes, or heads and sizes, do not divide.

    Source: vLLM ``compute_tp_mapping`` and ``dcp_consumer_count``; reports B01, B03, B04.
    """
    ratio = topology.tp_ratio(remote_tp_size)
    if not topology.is_mla:
        _check_heads(topology, remote_tp_size)
    attention = _attention_sources(topology, remote_tp_size, remote_dcp_size)
    state = attention
    if ratio < 0 and "state" in group_kinds:
        state = tuple(range(topology.tp_rank * -ratio, (topology.tp_rank + 1) * -ratio))
    per_group = tuple(state if kind == "state" else attention for kind in group_kinds)
    every = tuple(sorted(set().union(*per_group)))
    return TPMapping(
        source_ranks_per_group=per_group,
        all_source_ranks=every,
        rank_to_attention_slot=_slots(topology, remote_tp_size, attention, every),
        rank_offset_factor=_offset_factor(topology, remote_tp_size, ratio),
        local_consumers=_consumers(topology, remote_dcp_size, ratio),
    )


def _check_heads(topology: TransferTopology, remote_tp_size: int) -> None:
    heads = topology.total_num_kv_heads
    for side, size in (("local", topology.tp_size), ("remote", remote_tp_size)):
        if max(heads, size) % min(heads, size):
            raise UnsupportedLayoutError(
                f"{heads} KV heads and {side} tp size {size} do not divide; "
                "the planner needs no such ratio, use it instead"
            )


def _attention_sources(
    topology: TransferTopology, remote_tp_size: int, remote_dcp_size: int
) -> tuple[int, ...]:
    local, rank, heads = topology.tp_size, topology.tp_rank, topology.total_num_kv_heads
    if topology.is_mla and remote_dcp_size > 1:
        return tuple(topology.handshake_target_ranks(remote_tp_size, remote_dcp_size))
    if topology.is_mla or local >= remote_tp_size:
        return (rank * remote_tp_size // local,)
    ranks = topology.handshake_target_ranks(remote_tp_size)
    first_of_head = {r * heads // remote_tp_size: r for r in reversed(ranks)}
    return tuple(sorted(first_of_head.values()))


def _slots(
    topology: TransferTopology,
    remote_tp_size: int,
    attention: tuple[int, ...],
    every: tuple[int, ...],
) -> dict[int, int]:
    heads = topology.total_num_kv_heads
    slot_of_head = {r * heads // remote_tp_size: i for i, r in enumerate(attention)}
    return {r: slot_of_head.get(r * heads // remote_tp_size, 0) for r in every}


def _offset_factor(topology: TransferTopology, remote_tp_size: int, ratio: int) -> int:
    local, rank, heads = topology.tp_size, topology.tp_rank, topology.total_num_kv_heads
    if topology.is_mla or local <= remote_tp_size:
        return 0
    if local > heads:
        remote_rank = rank * remote_tp_size // local
        return rank * heads // local - remote_rank * heads // remote_tp_size
    return rank % ratio


def _consumers(topology: TransferTopology, remote_dcp_size: int, ratio: int) -> int:
    if remote_dcp_size == 1:
        return max(1, ratio)
    if topology.dcp_size == 1:
        return topology.tp_size
    return max(1, topology.dcp_size // remote_dcp_size)
