"""Who we are, and the one registry of the engines we know.

The ratio formulas are those of the field (vLLM's connectors); the planner needs none of them.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbridge.errors import TopologyConflictError, UnknownEngineError, UnsupportedLayoutError

EngineId = str


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """What is remembered of one pipeline stage of a remote engine.

    Attributes:
        remote_tp_size: Tensor-parallel size.
        remote_block_len: Bytes of a block of the stage's first layer on its lowest tp rank.
        remote_block_size: Tokens of a block.
        remote_physical_blocks_per_logical: Kernel pages that make up one block.
        remote_pp_rank: The pipeline stage.
        start_layer: Global index of the stage's first layer.
        end_layer: One past the stage's last layer.
        remote_dcp_size: Decode-context-parallel size.
    """

    remote_tp_size: int
    remote_block_len: int
    remote_block_size: int
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0
    remote_dcp_size: int = 1


class TransferTopology:
    """The shape of the local engine as seen by one rank, and every remote engine it knows."""

    def __init__(
        self,
        *,
        tp_rank: int,
        tp_size: int,
        block_size: int,
        engine_id: EngineId,
        is_mla: bool,
        is_mamba: bool,
        total_num_kv_heads: int,
        attn_backends: Sequence[Any] = (),
        pp_rank: int = 0,
        pp_size: int = 1,
        dcp_size: int = 1,
    ) -> None:
        """Describe the local rank.

        Args:
            tp_rank: Tensor-parallel rank of this worker.
            tp_size: Tensor-parallel size of the local engine.
            block_size: Tokens of a local block.
            engine_id: Id of the local engine.
            is_mla: Every rank holds the same latent instead of a share of the heads.
            is_mamba: The model has state layers; its backends are not asked for a cache shape.
            total_num_kv_heads: KV heads of the whole model; counts as 1 for MLA.
            attn_backends: Objects with ``get_kv_cache_shape``, asked where the block axis is.
            pp_rank: Pipeline stage of this worker.
            pp_size: Pipeline stages of the local engine.
            dcp_size: Decode-context-parallel size of the local engine.

        Raises:
            UnsupportedLayoutError: A size is below 1, or a rank is outside its size.
        """
        sizes = {
            "tp_size": tp_size,
            "pp_size": pp_size,
            "dcp_size": dcp_size,
            "block_size": block_size,
            "total_num_kv_heads": total_num_kv_heads,
        }
        for name, value in sizes.items():
            if value < 1:
                raise UnsupportedLayoutError(f"engine {engine_id!r}: {name} {value} must be >= 1")
        if dcp_size > tp_size:
            raise UnsupportedLayoutError(
                f"engine {engine_id!r}: dcp_size {dcp_size} must be at most tp_size {tp_size}; "
                "the ranks that share out the tokens are tensor-parallel ranks"
            )
        for name, rank, size in (("tp", tp_rank, tp_size), ("pp", pp_rank, pp_size)):
            if not 0 <= rank < size:
                raise UnsupportedLayoutError(
                    f"engine {engine_id!r}: {name}_rank {rank} must be in [0, {name}_size {size})"
                )
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.pp_rank, self.pp_size = pp_rank, pp_size
        self.dcp_rank, self.dcp_size = tp_rank % dcp_size, dcp_size
        self.block_size = block_size
        self.engine_id = engine_id
        self.is_mla, self.is_mamba = is_mla, is_mamba
        self.total_num_kv_heads = 1 if is_mla else total_num_kv_heads
        self.is_kv_layout_blocks_first = is_mamba or all(map(_blocks_first, attn_backends))
        self._engines: dict[EngineId, dict[int, EngineTransferInfo]] = {}

    def alone(self) -> "TransferTopology":
        """Return the same place in the same engine, that knows no other engine yet.

        Connectors that work side by side each know the others' engines by themselves.
        """
        topology = copy.copy(self)
        topology._engines = {}  # noqa: SLF001 - of one's own class
        return topology

    # --- the registry ------------------------------------------------------------------------

    def register_remote_engine(
        self, remote_engine_id: EngineId, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Remember one stage of a remote engine; the same info again returns the first object.

        Raises:
            TopologyConflictError: The id is the local engine's, or is live with different facts.
        """
        if remote_engine_id == self.engine_id:
            raise TopologyConflictError(
                f"engine id {remote_engine_id!r} is the local engine's own; "
                "give every engine an id of its own"
            )
        stages = self._engines.get(remote_engine_id, {})
        known = stages.get(info.remote_pp_rank)
        if known is not None and known != info:
            raise TopologyConflictError(
                f"engine {remote_engine_id!r} stage {info.remote_pp_rank} is registered as "
                f"{known}, now announced as {info}; unregister it before it comes back changed"
            )
        if known is None:
            self._engines.setdefault(remote_engine_id, stages)[info.remote_pp_rank] = info
            return info
        return known

    def get_engine_info(
        self, remote_engine_id: EngineId, remote_pp_rank: int = 0
    ) -> EngineTransferInfo:
        """Return what is known of one stage of a remote engine.

        Raises:
            UnknownEngineError: The engine, or that stage of it, was never registered.
        """
        stages = self._engines.get(remote_engine_id)
        if stages is None:
            raise UnknownEngineError(
                f"engine {remote_engine_id!r} is not registered; known: {sorted(self._engines)}"
            )
        if remote_pp_rank not in stages:
            raise UnknownEngineError(
                f"engine {remote_engine_id!r} has no stage {remote_pp_rank}; "
                f"registered stages: {sorted(stages)}"
            )
        return stages[remote_pp_rank]

    @property
    def remote_engines(self) -> tuple[EngineId, ...]:
        """Ids of the registered engines."""
        return tuple(sorted(self._engines))

    def unregister_remote_engine(self, remote_engine_id: EngineId) -> None:
        """Forget a remote engine with all its stages.

        Raises:
            UnknownEngineError: The engine was never registered.
        """
        if self._engines.pop(remote_engine_id, None) is None:
            raise UnknownEngineError(
                f"engine {remote_engine_id!r} is not registered; known: {sorted(self._engines)}"
            )

    # --- the formulas of the field -----------------------------------------------------------

    @property
    def local_physical_heads(self) -> int:
        """KV heads that one local rank holds; at least one, by replication."""
        return max(1, self.total_num_kv_heads // self.tp_size)

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether several local ranks hold the same KV."""
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    def is_kv_replicated(self, remote_engine_id: EngineId, remote_pp_rank: int = 0) -> bool:
        """Whether the remote engine has more ranks than the model has KV heads.

        Raises:
            UnknownEngineError: The engine was never registered.
        """
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return info.remote_tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: EngineId, remote_pp_rank: int = 0) -> bool:
        """Whether several ranks of the remote engine hold the same KV.

        Raises:
            UnknownEngineError: The engine was never registered.
        """
        return self.is_kv_replicated(remote_engine_id, remote_pp_rank) or self.is_mla

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return local over remote size, negative remote over local where the remote is larger.

        Raises:
            UnsupportedLayoutError: Neither size divides the other.

        Source: vLLM ``TransferTopology.tp_ratio``.
        """
        _positive("remote_tp_size", remote_tp_size)
        larger, smaller = max(self.tp_size, remote_tp_size), min(self.tp_size, remote_tp_size)
        if larger % smaller:
            raise UnsupportedLayoutError(
                f"tp sizes {self.tp_size} (local) and {remote_tp_size} (remote) have no ratio: "
                "neither divides the other; the planner needs none, use it instead"
            )
        return larger // smaller if self.tp_size >= remote_tp_size else -(larger // smaller)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many remote blocks make up a local one.

        Raises:
            UnsupportedLayoutError: The remote size does not divide the local one.

        Source: vLLM ``TransferTopology.block_size_ratio``.
        """
        _positive("remote_block_size", remote_block_size)
        if self.block_size % remote_block_size:
            raise UnsupportedLayoutError(
                f"block sizes {self.block_size} (local) and {remote_block_size} (remote) have no "
                "ratio: the remote does not divide the local; the planner needs none"
            )
        return self.block_size // remote_block_size

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """Return the remote tp ranks whose share of a stage overlaps this rank's.

        Both engines split the same line evenly; a rank's share is an interval of it, so this
        works for every pair of sizes. With decode-context parallelism it is the ranks that hold
        some token of ours: those whose residues agree modulo both sizes' common divisor, or one
        replica of them where ours is the finer split.

        Raises:
            UnsupportedLayoutError: A size is below 1.

        Source: vLLM ``handshake_target_ranks`` and ``dcp_source_ranks``, for sizes that divide.
        """
        _positive("remote_tp_size", remote_tp_size)
        _positive("remote_dcp_size", remote_dcp_size)
        if remote_dcp_size > 1:
            common = math.gcd(self.dcp_size, remote_dcp_size)
            candidates = remote_tp_size if self.dcp_size <= remote_dcp_size else remote_dcp_size
            return [r for r in range(candidates) if r % common == self.dcp_rank % common]
        first = self.tp_rank * remote_tp_size // self.tp_size
        end = -(-(self.tp_rank + 1) * remote_tp_size // self.tp_size)
        return list(range(first, end))

    def target_remote_ranks(self, remote_engine_id: EngineId, remote_pp_rank: int = 0) -> list[int]:
        """Return :meth:`handshake_target_ranks` for a registered engine.

        Raises:
            UnknownEngineError: The engine was never registered.
        """
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return self.handshake_target_ranks(info.remote_tp_size, info.remote_dcp_size)

    def describe(self, remote_engine_id: EngineId, remote_pp_rank: int = 0) -> str:
        """Return one line about how this rank sees one stage of a remote engine.

        Raises:
            UnknownEngineError: The engine was never registered.
        """
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return (
            f"engine={self.engine_id} local_pp={self.pp_rank}/{self.pp_size} "
            f"local_tp={self.tp_rank}/{self.tp_size} local_block={self.block_size} "
            f"-> remote={remote_engine_id} remote_pp={info.remote_pp_rank} "
            f"remote_tp={info.remote_tp_size} remote_dcp={info.remote_dcp_size} "
            f"layers=[{info.start_layer}, {info.end_layer}) remote_block={info.remote_block_size} "
            f"pages_per_block={info.remote_physical_blocks_per_logical} "
            f"block_len={info.remote_block_len}B "
            f"targets={self.target_remote_ranks(remote_engine_id, remote_pp_rank)}"
        )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise UnsupportedLayoutError(f"{name} {value} must be >= 1")


def _blocks_first(backend: Any) -> bool:
    """Ask a backend for a cache shape whose axes can be told apart, and look where blocks are."""
    num_blocks = 1031  # a prime that no other size equals
    shape = backend.get_kv_cache_shape(
        num_blocks=num_blocks, block_size=16, num_kv_heads=8, head_size=128
    )
    return bool(shape[0] == num_blocks)
