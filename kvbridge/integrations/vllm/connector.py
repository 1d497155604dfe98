"""The class that vLLM loads: its hooks, called on KVBridge's.

vLLM makes one in the process of each worker, before the one where it schedules. Hooks that are not
here do what vLLM's base class does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvbridge.connector import Stats, WorkerReport
from kvbridge.errors import ConfigError, WrongHalfError
from kvbridge.handshake import HandshakeMetadata
from kvbridge.integrations.vllm.logs import log_beside_vllm
from kvbridge.integrations.vllm.scheduler import SchedulerHalf
from kvbridge.integrations.vllm.settings import check_extra_config
from kvbridge.integrations.vllm.stats import BridgePromMetrics, BridgeStats
from kvbridge.integrations.vllm.worker import WorkerHalf
from kvbridge.model import Rank


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers must know of a step.

    Attributes:
        content: What the connector's scheduler half has built.
    """

    content: object


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """What a rank publishes."""

    content: HandshakeMetadata


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """What workers report of a step, by rank.

    Attributes:
        of: What has ended; whether more steps are needed; and all that has been counted, if that
            is new.
    """

    of: dict[Rank, tuple[WorkerReport, bool, Stats | None]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReports":
        """Return both together.

        Raises:
            ConfigError: The other one is not of this connector.
        """
        if not isinstance(other, WorkerReports):
            raise ConfigError(
                f"a worker reported a {type(other).__name__}; configure all workers alike"
            )
        return WorkerReports({**self.of, **other.of})


class KVBridgeConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV caches between instances of vLLM, over the transport that ``transport`` names.

    ``kv_connector_extra_config`` has the keys of :class:`~kvbridge.connector.ConnectorConfig`, and
    ``model``, the name that models are compared by where instances know them by different paths.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Make the half that a role asks for.

        Raises:
            ConfigError: Something in vLLM's configuration cannot be.
            TransportError: A transport is unknown or cannot run here.
        """
        self._check(vllm_config.kv_transfer_config.kv_connector_extra_config)
        super().__init__(vllm_config, role, kv_cache_config)
        log_beside_vllm()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._reported: WorkerReports | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, kv_cache_config)
        else:
            self._worker = WorkerHalf(vllm_config, kv_cache_config)

    @property
    def _decides(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise WrongHalfError("the connector of a worker was asked to decide")
        return self._scheduler

    @property
    def _moves(self) -> WorkerHalf:
        if self._worker is None:
            raise WrongHalfError("the connector of the scheduler was asked to move bytes")
        return self._worker

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for heads outside of tokens: what ranks of other numbers share are large pieces.

        Every layout can be moved into every other one; this one in the fewest pieces.
        """
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Say no, nothing is done layer by layer; and refuse a configuration that cannot be.

        Where vLLM uses full CUDA graphs it asks this first of all. What is wrong is better told
        here than when a model has been loaded for minutes.
        """
        cls._check(extra_config)
        return False

    @classmethod
    def _check(cls, extra_config: Mapping[str, Any]) -> None:
        """Refuse what cannot be, whatever else vLLM's configuration says."""
        check_extra_config(extra_config)

    # --- scheduler -------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Begin to have a request's blocks elsewhere kept; shorten what others will load."""
        self._decides.arrived(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return all groups that move: a load brings a request's own blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded."""
        return self._decides.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that were allocated."""
        self._decides.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return what the workers must know of this step."""
        manager = self._kv_cache_manager
        return StepMetadata(self._decides.step(scheduler_output, manager))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of what the workers have reported."""
        reports = connector_output.kv_connector_worker_meta
        if isinstance(reports, WorkerReports):
            self._decides.take(reports.of)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that another engine will want."""
        return self._decides.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that another engine will want."""
        return self._decides.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether steps must go on, though no request waits for them."""
        return self._decides.busy

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, KVConnectorHandshakeMetadata]
    ) -> None:
        """Serve what the ranks have published, of every pipeline stage.

        Raises:
            ConfigError: It is not ours.
        """
        strange = {type(each).__name__ for each in metadata.values()} - {RankMetadata.__name__}
        if strange:
            raise ConfigError(
                f"the workers have published {', '.join(sorted(strange))} instead of KVBridge's: "
                "vLLM's MultiConnector gives all of its children what the first one publishes; "
                "list KVBridge first, and no other connector that has a handshake of its own; for "
                "several transports, use KVBridgeMultiConnector"
            )
        ours = {rank: each for rank, each in metadata.items() if isinstance(each, RankMetadata)}
        self._decides.publish({rank: each.content for rank, each in ours.items()})

    # --- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the rank's cache."""
        self._moves.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Take the cache back, before the engine sleeps; of vLLM 0.33 on."""
        self._moves.unregister()

    def restore_kv_caches(self) -> None:
        """Take the same cache again, after the engine woke up; of vLLM 0.33 on."""
        self._moves.restore()

    def get_handshake_metadata(self) -> RankMetadata | None:
        """Return what the rank publishes."""
        published = self._moves.metadata()
        return None if published is None else RankMetadata(published)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of this step; none is waited for."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            is_idle = getattr(forward_context, "attn_metadata", None) is None
            self._moves.begin(metadata.content, is_idle=is_idle)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Make progress, and return what has ended."""
        report = self._moves.poll()
        news = self._moves.news(report)
        self._reported = None if news is None else WorkerReports({self._moves.rank: news})
        failed = {request_id for request_id, loaded in report.loaded.items() if not loaded.ok}
        return KVConnectorTransferResults(set(report.sent), set(report.loaded), failed)

    def build_connector_worker_meta(self) -> WorkerReports | None:
        """Return what the scheduler must know of the step."""
        return self._reported

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is only scheduled once all of it has come."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: others read the cache itself."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are kept while others read them."""

    # --- both ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what all of the engine has counted since the last time; from its scheduler."""
        return None if self._scheduler is None else self._scheduler.counted()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counts that have come from another process."""
        return BridgeStats(data) if data else BridgeStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return what shows our counts among vLLM's."""
        return BridgePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Give everything back."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()


class KVBridgeMultiConnector(KVBridgeConnector):
    """Several transports side by side: ``kv_connector_extra_config`` lists them in ``connectors``.

    Loads go over the first one that has a request's tokens, and over the next one if it fails.
    """

    @classmethod
    def _check(cls, extra_config: Mapping[str, Any]) -> None:
        if "connectors" not in extra_config:
            raise ConfigError(
                "KVBridgeMultiConnector needs the key 'connectors' in kv_connector_extra_config, "
                'such as {"connectors": [{"transport": "nixl"}, {"transport": "mooncake"}]}; for '
                "one transport, use KVBridgeConnector"
            )
        super()._check(extra_config)
