"""The half of vLLM's connector that a worker has."""

import logging
import time
import uuid
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvbridge.connector import Stats, WorkerReport, worker_connector
from kvbridge.handshake import HandshakeMetadata
from kvbridge.integrations.vllm.caches import Place, layers_of_drafts, rank_cache
from kvbridge.integrations.vllm.settings import connector_values, model_name
from kvbridge.model import TransferTopology

_log = logging.getLogger(__name__)

_COUNT_INTERVAL_S = 1.0
_IDLE_S = 1e-3
"""So long waits a step in which nothing is computed, at most: new requests wait meanwhile."""


class WorkerHalf:
    """Moves bytes for one rank; hooks as :class:`~kvbridge.connector.Connector` has them.

    Attributes:
        rank: The rank.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
        """Open the transports.

        Raises:
            ConfigError: Something in the configuration cannot be.
            TransportError: A transport is unknown or cannot run here.
        """
        pp, tp = get_pp_group(), get_tp_group()
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        self.rank = (pp.rank_in_group, tp.rank_in_group)
        self._config = kv_cache_config
        self._layers = vllm_config.compilation_config.static_forward_context
        self._place = Place.of(vllm_config, pp_rank=self.rank[0], tp_rank=self.rank[1])
        topology = TransferTopology(
            tp_rank=self._place.tp_rank,
            tp_size=self._place.tp_size,
            block_size=vllm_config.cache_config.block_size,
            engine_id=self._place.engine_id,
            is_mla=model.use_mla,
            is_mamba=kv_cache_config.has_mamba_layers,
            total_num_kv_heads=self._place.total_num_kv_heads,
            pp_rank=self._place.pp_rank,
            pp_size=parallel.pipeline_parallel_size,
            dcp_size=self._place.dcp_size,
        )
        self._connector = worker_connector(
            connector_values(vllm_config),
            topology,
            model=model_name(vllm_config),
            revision=model.revision,
            draft_layers=layers_of_drafts(kv_cache_config),
            incarnation=_agreed_incarnation(pp, tp),
        )
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._counted, self._counted_s = Stats(), 0.0
        self._was_busy = False
        self._is_idle = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the rank's cache."""
        self._place = self._place.with_formats(self._layers)
        self._connector.register_kv_caches(rank_cache(kv_caches, self._config, self._place))
        self._kv_caches = kv_caches
        if any(tensor.device.type == "cuda" for tensor in kv_caches.values()):
            self._connector.record_events(_cuda_event)

    def unregister(self) -> None:
        """Take the cache back."""
        self._connector.unregister_kv_caches()

    def restore(self) -> None:
        """Take it again."""
        self._connector.register_kv_caches(rank_cache(self._kv_caches, self._config, self._place))

    def metadata(self) -> HandshakeMetadata | None:
        """Return what the rank publishes."""
        return self._connector.get_handshake_metadata()

    def begin(self, step: object, *, is_idle: bool) -> None:
        """Begin what the scheduler half asked for.

        Args:
            step: That.
            is_idle: Whether nothing is computed in this step.
        """
        self._connector.start_load_kv(step)
        self._is_idle = is_idle

    def poll(self) -> WorkerReport:
        """Make progress, and return what has ended."""
        report = self._connector.get_finished()
        if self._is_idle and report == WorkerReport() and self._connector.busy:
            # vLLM goes from step to step as fast as it can, and the interpreter with it.
            self._connector.wait(_IDLE_S)
            report = self._connector.get_finished()
        for request_id, loaded in report.loaded.items():
            if loaded.cause and loaded.cause != "aborted":
                _log.warning(
                    "request %s could not be loaded over %s (%s); it %s: %s",
                    request_id,
                    loaded.via,
                    loaded.cause,
                    "is computed here" if loaded.recompute else "fails",
                    loaded.error,
                )
        return report

    def news(self, report: WorkerReport) -> tuple[WorkerReport, bool, Stats | None] | None:
        """Return what the scheduler must know beside a report; None if that is nothing."""
        counted, is_busy = self._count(report), self._connector.busy
        has_news = report != WorkerReport() or counted is not None or is_busy != self._was_busy
        self._was_busy = is_busy
        return (report, is_busy, counted) if has_news else None

    def _count(self, report: WorkerReport) -> Stats | None:
        """Return all that has been counted, if something has ended or some time has passed."""
        now_s = time.monotonic()
        if report == WorkerReport() and now_s - self._counted_s < _COUNT_INTERVAL_S:
            return None
        before, self._counted, self._counted_s = self._counted, self._connector.stats(), now_s
        return self._counted if self._counted != before else None

    def close(self) -> None:
        """Give everything back."""
        self._connector.shutdown()


def _agreed_incarnation(pp: Any, tp: Any) -> str:
    """Return what tells this start of the engine from others: rank (0, 0) draws it for all."""
    drawn = pp.broadcast_object(uuid.uuid4().hex if pp.rank_in_group == 0 else None, src=0)
    return str(tp.broadcast_object(drawn if tp.rank_in_group == 0 else None, src=0))


def _cuda_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
