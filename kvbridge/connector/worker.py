"""The half of a connector that a rank has: meets engines, reads, and keeps blocks for readers."""

import logging
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.loads import Loads
from kvbridge.connector.lookup import look_up
from kvbridge.connector.series import (
    LEASES_EXPIRED,
    NOTICES_IGNORED,
    NOTICES_LOST,
    PUSHES,
    QUARANTINED,
    STAGING,
    WORKER,
)
from kvbridge.connector.stats import Meter, Stats
from kvbridge.connector.step import Load, Progress, StepMetadata
from kvbridge.connector.summary import Summary
from kvbridge.connector.values import WorkerReport, block_tables
from kvbridge.errors import ConfigError, MemoryBusyError
from kvbridge.handshake import (
    Dialer,
    DigestRequest,
    HandshakeMetadata,
    Networks,
    Registry,
    load_keys,
    open_registry,
)
from kvbridge.model import RankCache, TransferTopology
from kvbridge.session import (
    Answers,
    Asks,
    Event,
    Gifts,
    Introductions,
    RankAgent,
    Readers,
    can_digest,
)
from kvbridge.transport import Transport, open_transport

_log = logging.getLogger(__name__)


class _Held(NamedTuple):
    """A request whose blocks are kept.

    Attributes:
        request_id: The engine's name for it.
        attempt: In which its blocks were filled.
        last_s: Clock when it is kept no longer, whatever is said.
    """

    request_id: str
    attempt: int
    last_s: float


class BridgeWorker:
    """Works for one rank; see :class:`~kvbridge.connector.Connector` for the hooks."""

    def __init__(
        self,
        config: ConnectorConfig,
        name: str,
        topology: TransferTopology,
        transport: Transport,
        dialer: Asks,
        *,
        model: str,
        revision: str | None = None,
        draft_layers: tuple[int, ...] = (),
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        threads: Executor | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
        registry: Registry | None = None,
        digesting: Executor | None = None,
    ) -> None:
        """Take what it works with, which is closed with it; :meth:`open` makes that.

        Args:
            config: The connector.
            name: Its name.
            topology: The rank's place in its engine.
            transport: Open, and nobody else's.
            dialer: Asks other engines.
            model: Name of the model.
            revision: Its revision.
            draft_layers: Layers of a draft model.
            incarnation: Agreed with the engine's other ranks.
            clock: Seconds that never run backwards.
            threads: Where other engines are joined; some of its own if not given.
            uniform: Draws from between two numbers.
            registry: Where the dialer looks engines up.
            digesting: Where digests are taken, and what is staged is put in its place; a thread of
                its own if not given.
        """
        self._config, self._name, self._topology = config, name, topology
        self._named: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "draft_layers": draft_layers,
        }
        self._incarnation, self._clock, self._threads = incarnation, clock, threads
        self._transport, self._dialer, self._registry = transport, dialer, registry
        self._uniform, self._digesting = uniform, digesting
        self._agent: RankAgent | None = None
        self._introductions: Introductions | None = None
        self._loads: Loads | None = None
        self._meter = Meter(WORKER, name, config.transport)
        who = f"connector {name}, rank {topology.pp_rank, topology.tp_rank}"
        self._summary = Summary(who, self.stats, config.log_interval_s, clock)
        self._gifts: Gifts | None = None
        self._answers: Answers | None = None
        self._held: dict[str, _Held] = {}  # by transfer
        self._leaving: dict[str, _Held] = {}  # those that are over but still being read
        self._record_event: Callable[[], Event] | None = None
        self._sent: set[str] = set()
        self._expired: set[str] = set()

    @classmethod
    def open(
        cls,
        config: ConnectorConfig,
        name: str,
        topology: TransferTopology,
        *,
        incarnation: str | None = None,
        **others: Any,
    ) -> "BridgeWorker":
        """Open the transport and what asks other engines; see the constructor for the rest.

        Raises:
            ConfigError: Something in the configuration cannot be.
            TransportError: The transport is unknown or cannot run here.
        """
        ranks = topology.tp_size * topology.pp_size
        if incarnation is None and ranks > 1:
            raise ConfigError(
                f"engine {topology.engine_id!r} has {ranks} ranks and no incarnation; give all of "
                "them the same one, fresh at every start, such as a uuid4 of rank 0"
            )
        keys, networks = load_keys(config.handshake), Networks(config.handshake.allowed_networks)
        chosen = config.handshake.registry
        registry = None if chosen is None else open_registry(chosen)
        transport = open_transport({"transport": config.transport, "options": config.options})
        find = None if registry is None else partial(look_up, registry, name)
        dialer = Dialer(keys=keys, networks=networks, find=find)
        return cls(
            config,
            name,
            topology,
            transport,
            dialer,
            registry=registry,
            incarnation=incarnation,
            **others,
        )

    @property
    def timeout_s(self) -> float:
        """How long a load may take."""
        return self._config.timeout_s

    @property
    def agent(self) -> RankAgent:
        """The rank among others.

        Raises:
            ConfigError: No cache has been registered yet.
        """
        if self._agent is None:
            raise ConfigError("no cache is registered yet; call register_kv_caches first")
        return self._agent

    def register(self, cache: RankCache) -> None:
        """Take the rank's cache, or another one in its place.

        Raises:
            ConfigError: It cannot be checked, though the configuration says that it shall be.
        """
        if self._config.payload_check != "off" and not can_digest(cache):
            kinds = sorted({region.memory_kind for region in cache.regions})
            raise ConfigError(
                f"connector {self._name!r}: payload_check is {self._config.payload_check!r}, but "
                f"{cache.where} lies in {' and '.join(kinds)} memory, of which the host takes no "
                "digests; set payload_check to 'off'"
            )
        if self._agent is not None:
            self._agent.renew(cache)
            for transfer_id in list(self._held):  # the blocks that readers wait for are gone
                self._let_go(transfer_id)
            return
        self._agent = RankAgent(
            self._topology,
            cache,
            self._transport,
            incarnation=self._incarnation,
            gives=self._config.role != "consumer" and self._config.direction != "pull",
            clock=self._clock,
            digesting=self._digesting,
            staging_nbytes=self._config.staging_nbytes,
            takes=self._config.role != "producer" and self._config.direction != "pull",
            **self._named,
        )
        self._introductions = Introductions(
            self._agent,
            self._dialer,
            timeout_s=self._config.handshake.timeout_s,
            threads=self._threads,
            clock=self._clock,
            uniform=self._uniform,
        )
        self._loads = Loads(
            self._name,
            self._agent,
            self._introductions,
            self._meter,
            reads_max=self._config.reads_max,
            direction=self._config.direction,
            payload_check=self._config.payload_check,
            on_failure=self._config.on_failure,
            clock=self._clock,
        )
        self._gifts = Gifts(self._agent, self._introductions, clock=self._clock)
        readers = Readers(self._agent, self._introductions)
        self._answers = Answers(self._agent, readers, clock=self._clock)

    def record_events(self, record: Callable[[], Event]) -> None:
        """Write what steps have computed only once a device has come so far.

        Args:
            record: Records an event where the device is now.
        """
        self._record_event = record

    def unregister(self) -> None:
        """Take the rank's cache back, if it has one; what it holds for readers is let go.

        Raises:
            MemoryBusyError: It is in use.
        """
        agent, loads, gifts, answers = self._agent, self._loads, self._gifts, self._answers
        if agent is None or loads is None or gifts is None or answers is None:
            return
        if loads.unfinished:
            raise self._busy(f"{loads.unfinished} loads into it have not ended", "abort them, or ")
        for transfer_id in list(self._held):
            self._let_go(transfer_id)
        self._leave_quiet(gifts, answers)
        if self._leaving:
            raise self._busy(f"{len(self._leaving)} requests are being read there for others")
        agent.release()

    def _busy(self, why: str, advice: str = "") -> MemoryBusyError:
        return MemoryBusyError(
            f"connector {self._name!r} cannot let go of {self.agent.where}: {why}; {advice}go on "
            "with steps, and unregister it then"
        )

    def metadata(self) -> HandshakeMetadata | None:
        """Return what the rank publishes: nothing while it has no cache."""
        return self.agent.metadata() if self.agent.has_cache else None

    def begin(self, step: StepMetadata) -> None:
        """Begin what the scheduler half asked for."""
        if step.engine is not None:
            self.agent.share_engine(step.engine)
        if step.progress:
            self._progress(step.progress)
        last_s = self._clock() + self._config.lease_longest_s
        for hold in step.holds:
            tables = block_tables(hold.block_ids)
            promised = (hold.lease, tables, hold.num_tokens, hold.ids)
            if self.agent.hold(hold.transfer_id, *promised):
                self._sent.add(hold.request_id)
                if not self.agent.has_cache:  # it was offered before the cache was taken back
                    self._count_expired(hold.request_id)
            else:
                attempt = self.agent.attempt_of(hold.transfer_id)
                self._held[hold.transfer_id] = _Held(hold.request_id, attempt, last_s)
        self._expire([each for each in step.over if each in self._held])
        for transfer_id in step.never:
            self.agent.expire(transfer_id)
            if self._gifts is not None:
                self._gifts.stop(transfer_id)
        for load in step.loads:
            self.load(load, timeout_s=self._config.timeout_s)
        for request_id in step.aborted:
            self.abort(request_id)

    def _progress(self, progress: Iterable[Progress]) -> None:
        """Take note of what was computed, which is there once what records events says so."""
        event = None if self._record_event is None else self._record_event()
        for each in progress:
            if each.num_tokens:
                tables = block_tables(each.block_ids)
                self.agent.compute(each.transfer_id, tables, each.num_tokens, event)
            else:
                self.agent.take_away(each.transfer_id)

    def load(self, load: Load, *, timeout_s: float) -> None:
        """Begin a load.

        Raises:
            ConfigError: No cache has been registered yet.
        """
        if self._loads is None:
            raise ConfigError("no cache is registered yet; call register_kv_caches first")
        self._loads.add(load, timeout_s=timeout_s)

    def abort(self, request_id: str) -> None:
        """Go on no further with a load, if it has not ended."""
        if self._loads is not None:
            self._loads.abort(request_id)

    def report(self) -> WorkerReport:
        """Make progress, and return what has ended."""
        answers = self._answers
        if self._agent is None or self._loads is None or self._gifts is None or answers is None:
            return WorkerReport()
        self._loads.start()
        polled = self._agent.poll()
        for transfer_id in polled.released:
            if transfer_id in self._held:
                self._leave(transfer_id, self._gifts)
        for sender, note in polled.asked:
            if isinstance(note, DigestRequest):
                answers.heard(sender, note)
            else:
                self._gifts.heard(sender, note)
        for outcome in self._gifts.poll():
            self._meter.count(PUSHES, "failed" if outcome.cause else "ok", outcome.cause)
        answers.poll()
        self._loads.end()
        now_s = self._clock()  # the scheduler half ends a lease; this, what it says nothing of
        self._expire([each for each, held in self._held.items() if now_s >= held.last_s])
        self._leave_quiet(self._gifts, answers)
        sent, self._sent = frozenset(self._sent), set()
        expired, self._expired = frozenset(self._expired & sent), self._expired - sent
        self._summary.poll()
        return WorkerReport(self._loads.take(), sent, expired)

    @property
    def busy(self) -> bool:
        """Whether anything is loaded or kept, or another engine is still to be told something."""
        return bool(self._loads or self._held or self._leaving)

    def wait(self, timeout_s: float) -> None:
        """Return once the next report may say something, or the time is over."""
        self._transport.wait(timeout_s)

    def stats(self) -> Stats:
        """Return what this rank has counted; from any thread."""
        agent, loads, gifts, answers = self._agent, self._loads, self._gifts, self._answers
        if agent is None or loads is None or gifts is None or answers is None:
            return self._meter.stats({})
        ignored = {
            "duplicate": agent.releases.duplicates,
            "late": agent.releases.late,
            "unknown": agent.releases.forgotten,
            "unreadable": agent.unreadable,
            "unasked": agent.unasked,
            "stranger": gifts.strangers + answers.strangers,
            "too_many": gifts.ignored + answers.ignored,
        }
        return self._meter.stats(
            {
                **loads.pending(),
                (QUARANTINED.name,): agent.quarantined,
                (STAGING.name,): agent.staged_nbytes,
                (NOTICES_LOST.name, "transport"): agent.unsent,
                **{(NOTICES_IGNORED.name, reason): n for reason, n in ignored.items()},
            }
        )

    def close(self) -> None:
        """Give everything back."""
        if self._loads is not None:
            self._loads.close()
        self._dialer.close()
        if self._introductions is not None:
            self._introductions.close()
        busy = self._transport.close() if self._agent is None else self._agent.close()
        if busy:
            _log.warning(
                "connector %s: %d region(s) may still be written to; keep their memory mapped "
                "until the process ends",
                self._name,
                len(busy),
            )
        if self._registry is not None:
            self._registry.close()

    def _let_go(self, transfer_id: str) -> str:
        """Keep blocks no longer, though not every reader has reported; return their request."""
        request_id = self._held[transfer_id].request_id
        self.agent.expire(transfer_id)
        self._count_expired(request_id)
        if self._gifts is not None:
            self._leave(transfer_id, self._gifts)
        return request_id

    def _count_expired(self, request_id: str) -> None:
        self._expired.add(request_id)
        self._meter.count(LEASES_EXPIRED)

    def _leave(self, transfer_id: str, gifts: Gifts) -> None:
        """Take note that blocks are not kept any more; they are free once nothing reads them."""
        gifts.stop(transfer_id)
        self._leaving[transfer_id] = self._held.pop(transfer_id)

    def _leave_quiet(self, gifts: Gifts, answers: Answers) -> None:
        for transfer_id, held in list(self._leaving.items()):
            is_writing = gifts.is_writing(transfer_id, held.attempt)
            if not (is_writing or answers.is_reading(transfer_id)):
                self._sent.add(self._leaving.pop(transfer_id).request_id)

    def _expire(self, transfer_ids: Iterable[str]) -> None:
        for transfer_id in transfer_ids:
            request_id = self._let_go(transfer_id)
            _log.warning(
                "request %s: not every reader over %s has reported in time; it is kept no longer",
                request_id,
                self._name,
            )
