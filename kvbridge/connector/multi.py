"""Several connectors as one: the first that has the tokens loads, all save, the next stands by."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvbridge.config import check_timeout
from kvbridge.connector.base import Connector
from kvbridge.connector.multi_scheduler import MultiScheduler, MultiStep
from kvbridge.connector.multi_worker import MultiWorker
from kvbridge.connector.stats import Stats
from kvbridge.connector.values import BlockIds, OnFailure, Request, WorkerReport
from kvbridge.errors import ConfigError, HandshakeError
from kvbridge.handshake import HandshakeMetadata, PPAwareHandshake, hand_over
from kvbridge.handshake.wire import decode, encode
from kvbridge.model import Rank, RankCache
from kvbridge.session import Event

_log = logging.getLogger(__name__)


class MultiConnector(Connector):
    """Fans out to its children, which do not know of each other.

    Loads come from the first child that has the tokens; where that fails, on any rank, the next
    one that has them is tried there, as long as the request has time. Children that were not used
    are told. Finished requests are offered by all, and their blocks are free when the last child
    is done with them. A child that raises is left alone for a while; the others go on.

    Attributes:
        children: The children by name, in order of load priority.
    """

    def __init__(
        self,
        children: Mapping[str, Connector],
        *,
        pp_size: int = 1,
        timeout_s: float = 60.0,
        on_failure: OnFailure = "recompute",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the children: all of them scheduler halves, or all of them worker halves.

        Args:
            children: Connectors by name; the names are the same on both engines.
            pp_size: Pipeline stages of the engine.
            timeout_s: How long a load may take, over all children.
            on_failure: What is to become of requests that none of them could load, whatever the
                children say of their own loads.
            clock: Seconds that never run backwards.

        Raises:
            ConfigError: There is none, one is no connector, one cannot serve the engine's pipeline
                stages, or two need different layouts.
        """
        _check_children(children, pp_size)
        self.children = dict(children)
        layouts = (child.required_layout for child in self.children.values())
        self.required_layout = next(filter(None, layouts), None)
        self.scheduler_half = MultiScheduler(self.children, clock)
        self.worker_half = MultiWorker(self.children, timeout_s, on_failure, clock)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        """Give every child its own metadata back."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, tp_rank): data for tp_rank, data in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Give every child its own metadata back.

        Raises:
            HandshakeError: It was made by other children, or a child speaks for some ranks only.
        """
        parts = {rank: self._parts(data) for rank, data in metadata.items()}
        for i, (name, child) in enumerate(self.children.items()):
            own = {rank: part[i] for rank, part in parts.items()}
            given = {rank: data for rank, data in own.items() if data is not None}
            if given and len(given) < len(own):
                raise HandshakeError(
                    f"connector {name!r} has metadata of ranks {sorted(given)}, but none of "
                    f"{sorted(own.keys() - given.keys())}"
                )
            if given:
                hand_over(child, given)

    def _parts(self, data: HandshakeMetadata) -> list[HandshakeMetadata | None]:
        if isinstance(data.payload, bytes) or len(data.payload) != len(self.children):
            count = 1 if isinstance(data.payload, bytes) else len(data.payload)
            raise HandshakeError(
                f"metadata of rank {data.rank} has {count} payloads, this MultiConnector has "
                f"{len(self.children)} children {list(self.children)}; configure scheduler and "
                "workers alike"
            )
        return [
            None if each is None else decode(each, HandshakeMetadata, "metadata of a child")
            for each in data.payload
        ]

    def unregister_kv_caches(self) -> None:
        for child in self.children.values():
            child.unregister_kv_caches()

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        metadata = [child.get_handshake_metadata() for child in self.children.values()]
        first = next((data for data in metadata if data is not None), None)
        if first is None:
            return None
        return HandshakeMetadata(
            first.engine_id,
            first.incarnation,
            first.pp_rank,
            first.tp_rank,
            tuple(None if data is None else encode(data) for data in metadata),
        )

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
        return self.scheduler_half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        self.scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self) -> MultiStep:
        return self.scheduler_half.take_step()

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_half.finished(request, block_ids)

    def request_progressed(self, request: Request, block_ids: BlockIds) -> None:
        self.scheduler_half.tell_all(lambda child: child.request_progressed(request, block_ids))

    def request_preempted(self, request: Request) -> None:
        self.scheduler_half.tell_all(lambda child: child.request_preempted(request))

    def update_connector_output(self, report: WorkerReport) -> None:
        self.scheduler_half.ended(report)

    def not_needed(self, request: Request) -> None:
        self.scheduler_half.not_needed(request)

    def register_kv_caches(self, cache: RankCache) -> None:
        for child in self.children.values():
            child.register_kv_caches(cache)

    def start_load_kv(self, metadata: object) -> None:
        if not isinstance(metadata, MultiStep):
            raise ConfigError(
                f"a MultiConnector got metadata of type {type(metadata).__name__}; configure "
                "scheduler and workers alike"
            )
        self.worker_half.begin(metadata)

    def get_finished(self) -> WorkerReport:
        return self.worker_half.report()

    @property
    def busy(self) -> bool:
        return self.worker_half.busy

    def wait(self, timeout_s: float) -> None:
        self.worker_half.wait(timeout_s)

    def record_events(self, record: Callable[[], Event]) -> None:
        self.worker_half.tell_all(lambda child: child.record_events(record))

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker_half.tell_all(lambda child: child.wait_for_layer_load(layer_name))

    def save_kv_layer(self, layer_name: str) -> None:
        self.worker_half.tell_all(lambda child: child.save_kv_layer(layer_name))

    def wait_for_save(self) -> None:
        self.worker_half.tell_all(Connector.wait_for_save)

    def stats(self) -> Stats:
        """Return what the children have counted, and how often one took another one's place."""
        own = self.scheduler_half.stats() + self.worker_half.stats()
        return sum(map(_stats_of, self.children.items()), own)

    def shutdown(self) -> None:
        """Shut every child down, also where one raises.

        Raises:
            Exception: What a child raised.
        """
        errors = []
        for child in self.children.values():
            try:
                child.shutdown()
            except Exception as error:  # the others must be shut down first
                errors.append(error)
        if errors:
            raise errors[0]


def _check_is_connector(name: str, child: object) -> None:
    """Refuse what lacks a hook now, rather than when it is first called (report B66)."""
    if not isinstance(child, Connector):
        hooks = sorted(Connector.__abstractmethods__)
        lacking = [hook for hook in hooks if not callable(getattr(child, hook, None))]
        raise ConfigError(
            f"child {name!r} is a {type(child).__name__}, no Connector (it lacks "
            f"{', '.join(lacking) or 'nothing but the base class'}); derive it from Connector"
        )


def _stats_of(child: tuple[str, Connector]) -> Stats:
    """Return what a child has counted; nothing if it raises, for that ends nobody's requests."""
    try:
        return child[1].stats()
    except Exception:
        _log.exception("connector %r does not say what it has counted", child[0])
        return Stats()


def _check_children(children: Mapping[str, Connector], pp_size: int) -> None:
    if not children:
        raise ConfigError("a MultiConnector needs at least one child")
    layouts: dict[str, str] = {}
    for name, child in children.items():
        kind = type(child)
        _check_is_connector(name, child)
        setter = kind.set_xfer_handshake_metadata_pp_aware
        if pp_size > 1 and setter is PPAwareHandshake.set_xfer_handshake_metadata_pp_aware:
            raise ConfigError(
                f"child {name!r} ({kind.__name__}) serves one pipeline stage, the engine has "
                f"{pp_size}; override set_xfer_handshake_metadata_pp_aware there, or leave it out"
            )
        if child.required_layout:
            layouts[name] = child.required_layout
    if len(set(layouts.values())) > 1:
        listed = ", ".join(f"{name!r} needs {layout}" for name, layout in layouts.items())
        raise ConfigError(f"children need different layouts: {listed}; leave one of them out")
