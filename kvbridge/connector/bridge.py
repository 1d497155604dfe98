"""The connector over one transport."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvbridge.config import check_timeout
from kvbridge.connector.base import Connector
from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.scheduler import BridgeScheduler
from kvbridge.connector.stats import Stats
from kvbridge.connector.step import Load, StepMetadata
from kvbridge.connector.values import BlockIds, Request, WorkerReport
from kvbridge.connector.worker import BridgeWorker
from kvbridge.errors import ConfigError, WrongHalfError
from kvbridge.handshake import HandshakeMetadata
from kvbridge.model import Rank, RankCache, TransferTopology
from kvbridge.session import Event


class BridgeConnector(Connector):
    """Moves caches over one transport. Make one with :meth:`scheduler` or :meth:`worker`.

    Attributes:
        name: Name of the connector, the same on both engines.
    """

    def __init__(
        self,
        name: str,
        *,
        scheduler_half: BridgeScheduler | None = None,
        worker_half: BridgeWorker | None = None,
    ) -> None:
        """Take the half that does the work."""
        self.name = name
        self._scheduler_half, self._worker_half = scheduler_half, worker_half

    @classmethod
    def scheduler(
        cls, config: ConnectorConfig, *, engine_id: str, name: str | None = None
    ) -> "BridgeConnector":
        """Return the half where an engine decides.

        Args:
            config: The connector.
            engine_id: The engine.
            name: Name of the connector; the configured one if not given.

        Raises:
            ConfigError: A key, secret or address is none.
            HandshakeError: The handshake port cannot be bound.
        """
        name = name or config.name or config.transport
        return cls(name, scheduler_half=BridgeScheduler.open(config, name, engine_id))

    @classmethod
    def worker(
        cls,
        config: ConnectorConfig,
        topology: TransferTopology,
        *,
        model: str,
        revision: str | None = None,
        draft_layers: tuple[int, ...] = (),
        incarnation: str | None = None,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "BridgeConnector":
        """Return the half of one rank.

        Args:
            config: The connector.
            topology: The rank's place in its engine.
            model: Name of the model, compared with peers.
            revision: Revision of the model, if it is pinned.
            draft_layers: Layers that belong to a draft model, by global index.
            incarnation: Agreed with the engine's other ranks; needed if there are any.
            name: Name of the connector; the configured one if not given.
            clock: Seconds that never run backwards.

        Raises:
            ConfigError: Something in the configuration cannot be.
            TransportError: The transport is unknown or cannot run here.
        """
        name = name or config.name or config.transport
        half = BridgeWorker.open(
            config,
            name,
            topology,
            model=model,
            revision=revision,
            draft_layers=draft_layers,
            incarnation=incarnation,
            clock=clock,
        )
        return cls(name, worker_half=half)

    @property
    def scheduler_half(self) -> BridgeScheduler:
        """The half where the engine decides.

        Raises:
            WrongHalfError: This is a worker's connector.
        """
        if self._scheduler_half is None:
            raise WrongHalfError(f"connector {self.name!r} of a worker was asked to decide")
        return self._scheduler_half

    @property
    def worker_half(self) -> BridgeWorker:
        """The half of a rank.

        Raises:
            WrongHalfError: This is the scheduler's connector.
        """
        if self._worker_half is None:
            raise WrongHalfError(
                f"connector {self.name!r} of the scheduler was asked to move bytes"
            )
        return self._worker_half

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        """Serve the ranks of a single stage."""
        self.scheduler_half.publish({(0, tp_rank): data for tp_rank, data in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Serve every rank."""
        self.scheduler_half.publish(metadata)

    @property
    def ready(self) -> bool:
        return self.scheduler_half.ready

    def refusals(self) -> dict[str, str]:
        return self.scheduler_half.refusals()

    def drain(self, timeout_s: float) -> None:
        self.scheduler_half.drain(check_timeout(timeout_s, "timeout_s of drain()"))

    @property
    def drained(self) -> bool:
        return self.scheduler_half.drained

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler_half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self.scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self) -> StepMetadata:
        return self.scheduler_half.take_step()

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_half.finished(request, block_ids)

    def request_progressed(self, request: Request, block_ids: BlockIds) -> None:
        self.scheduler_half.progressed(request, block_ids)

    def request_preempted(self, request: Request) -> None:
        self.scheduler_half.preempted(request)

    def update_connector_output(self, report: WorkerReport) -> None:
        self.scheduler_half.ended(report)

    def not_needed(self, request: Request) -> None:
        self.scheduler_half.not_needed(request)

    def standby_load(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> Load | None:
        half = self.scheduler_half
        load = half.load(request, block_ids, num_external_tokens)
        if load is not None:
            half.settle(request)  # whoever has the load brings it to an end, by reading or not
        return load

    def register_kv_caches(self, cache: RankCache) -> None:
        self.worker_half.register(cache)

    def unregister_kv_caches(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.withdraw()
        if self._worker_half is not None:
            self._worker_half.unregister()

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return self.worker_half.metadata()

    def start_load_kv(self, metadata: object) -> None:
        if not isinstance(metadata, StepMetadata):
            raise ConfigError(
                f"connector {self.name!r} got metadata of type {type(metadata).__name__}, which is "
                "not what its scheduler half builds; configure both halves alike"
            )
        self.worker_half.begin(metadata)

    def get_finished(self) -> WorkerReport:
        return self.worker_half.report()

    @property
    def busy(self) -> bool:
        return self.worker_half.busy

    def wait(self, timeout_s: float) -> None:
        self.worker_half.wait(timeout_s)

    def start_standby(self, load: object, *, timeout_s: float) -> None:
        self.worker_half.load(_as_load(load), timeout_s=timeout_s)

    def drop_standby(self, load: object) -> None:
        half = self.worker_half
        half.load(_as_load(load).emptied(), timeout_s=half.timeout_s)

    def record_events(self, record: Callable[[], Event]) -> None:
        self.worker_half.record_events(record)

    def abort_load(self, request_id: str) -> None:
        self.worker_half.abort(request_id)

    def stats(self) -> Stats:
        halves = (self._scheduler_half, self._worker_half)
        return sum((half.stats() for half in halves if half is not None), Stats())

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.close()
        if self._worker_half is not None:
            self._worker_half.close()


def _as_load(load: object) -> Load:
    if not isinstance(load, Load):
        raise ConfigError(f"a load is expected, got {type(load).__name__}")
    return load
