"""The half of a connector that a rank has: meets engines, reads, and keeps blocks for readers."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.lookup import look_up
from kvbridge.connector.step import Load, StepMetadata
from kvbridge.connector.values import Loaded, WorkerReport
from kvbridge.errors import ConfigError, KVBridgeError
from kvbridge.handshake import (
    Dialer,
    HandshakeMetadata,
    Networks,
    Registry,
    load_keys,
    open_registry,
)
from kvbridge.model import RankCache, TransferTopology
from kvbridge.plan import BlockTable
from kvbridge.session import Asks, Introduction, Introductions, RankAgent, Transfer
from kvbridge.transport import State, Transport, open_transport

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A load whose engine has not been met yet."""

    load: Load
    introduction: Introduction
    deadline_s: float


@dataclass(slots=True)
class _Reading:
    """A load that has begun."""

    request_id: str
    transfer: Transfer
    is_overdue: bool = False


@dataclass(slots=True)
class Failures:
    """What went wrong on one rank, each kind for itself (report B71).

    Attributes:
        handshakes: Loads whose engine could not be met.
        transfers: Loads that failed while bytes were moved, or before any were.
        notices: Engines that could not be told what they wait for.
        leases: Requests whose readers did not all report in time.
    """

    handshakes: int = 0
    transfers: int = 0
    notices: int = 0
    leases: int = 0


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
        """
        self._config, self._name, self._topology = config, name, topology
        self._named = {"model": model, "revision": revision, "draft_layers": draft_layers}
        self._incarnation, self._clock, self._threads = incarnation, clock, threads
        self._transport, self._dialer, self._registry = transport, dialer, registry
        self._uniform = uniform
        self._agent: RankAgent | None = None
        self._introductions: Introductions | None = None
        self._waiting: list[_Waiting] = []
        self._reading: list[_Reading] = []
        self._held: dict[str, tuple[str, float]] = {}  # transfer: its request, and its deadline
        self._loaded: dict[str, Loaded] = {}
        self._sent: set[str] = set()
        self._expired: set[str] = set()
        self._failures = Failures()
        self._said_unleased = False

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
    def failures(self) -> Failures:
        """What went wrong so far."""
        unsent = self._agent.unsent if self._agent is not None else 0
        return replace(self._failures, notices=self._failures.notices + unsent)

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
        """Take the rank's cache, or another one in its place."""
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
            clock=self._clock,
            **self._named,  # type: ignore[arg-type]
        )
        self._introductions = Introductions(
            self._agent,
            self._dialer,
            timeout_s=self._config.handshake.timeout_s,
            threads=self._threads,
            clock=self._clock,
            uniform=self._uniform,
        )

    def metadata(self) -> HandshakeMetadata:
        """Return what the rank publishes."""
        return self.agent.metadata()

    def begin(self, step: StepMetadata) -> None:
        """Begin what the scheduler half asked for."""
        if step.engine is not None:
            self.agent.share_engine(step.engine)
        now_s = self._clock()
        for hold in step.holds:
            if self.agent.hold(hold.transfer_id, hold.lease):
                self._sent.add(hold.request_id)
            else:
                self._held[hold.transfer_id] = (hold.request_id, now_s + self._config.lease_s)
        for transfer_id, lease_s in step.renewed.items():
            if transfer_id in self._held:
                self._held[transfer_id] = (self._held[transfer_id][0], now_s + lease_s)
        if step.drain_s is not None:
            end_s = now_s + step.drain_s
            self._held = {each: (name, min(at, end_s)) for each, (name, at) in self._held.items()}
        for load in step.loads:
            self.load(load, timeout_s=self._config.timeout_s)

    def load(self, load: Load, *, timeout_s: float) -> None:
        """Begin a load."""
        remote = load.remote
        known = self._meetings.meet(
            remote.engine_id,
            remote.address,
            incarnation=remote.incarnation,
            generation=remote.generation,
        )
        self._waiting.append(_Waiting(load, known, self._clock() + timeout_s))

    def report(self) -> WorkerReport:
        """Make progress, and return what has ended."""
        if self._agent is None:
            return WorkerReport()
        self._meetings.poll()
        self._waiting = list(self._still_waiting())
        for transfer_id in self._agent.poll().released:
            request_id, _ = self._held.pop(transfer_id, (None, 0.0))
            if request_id is not None:
                self._sent.add(request_id)
        self._end_readings()
        self._expire()
        report = WorkerReport(self._loaded, frozenset(self._sent), frozenset(self._expired))
        self._loaded, self._sent, self._expired = {}, set(), set()
        return report

    def close(self) -> None:
        """Give everything back."""
        self._dialer.close()
        if self._introductions is not None:
            self._introductions.close()
        if self._agent is not None:
            self._agent.close()
        else:
            self._transport.close()
        if self._registry is not None:
            self._registry.close()

    @property
    def _meetings(self) -> Introductions:
        if self._introductions is None:
            raise ConfigError("no cache is registered yet; call register_kv_caches first")
        return self._introductions

    def _still_waiting(self) -> Iterator[_Waiting]:
        """Start the loads whose engines have been met, and yield the others."""
        now_s = self._clock()
        for each in self._waiting:
            load, state = each.load, each.introduction.state
            if state == "live":
                self._start(load, each.deadline_s - now_s)
            elif state == "failed":
                self._fail_to_meet(load, str(each.introduction.error))
            elif now_s >= each.deadline_s:
                self._fail_to_meet(
                    load,
                    f"engine {load.remote.engine_id!r} at {load.remote.address} was not met within "
                    f"the {self._config.timeout_s:g} s that connector {self._name!r} may take",
                )
            else:
                yield each

    def _start(self, load: Load, timeout_s: float) -> None:
        remote = load.remote
        session = self.agent.sessions.get(remote.engine_id)
        if session is None:
            self._fail(load, f"engine {remote.engine_id!r} has gone again before the load began")
            return
        if remote.incarnation not in {None, session.incarnation}:
            self._fail(
                load,
                f"engine {remote.engine_id!r} has restarted: its incarnation is "
                f"{session.incarnation!r}, the request's blocks are of {remote.incarnation!r}",
            )
            return
        if remote.generation and session.generation != remote.generation:
            self._fail(
                load,
                f"engine {remote.engine_id!r} has registered other memory since: registration "
                f"{session.generation}, the request's blocks are of {remote.generation}",
            )
            return
        if load.is_empty:
            self.agent.decline(remote.engine_id, remote.request_id)
            return
        if remote.lease is None and not self._said_unleased:
            self._said_unleased = True
            _log.warning(
                "request %s comes without a lease, so nothing shows that its blocks were kept "
                "until they are read; have proxies pass on all of kv_transfer_params (said once)",
                load.request_id,
            )
        try:
            transfer = self.agent.pull(
                remote.engine_id,
                remote.request_id,
                [BlockTable(ids) for ids in load.block_ids],
                [BlockTable(ids) for ids in remote.block_ids],
                start_token=load.start_token,
                end_token=load.end_token,
                timeout_s=max(timeout_s, 1e-3),
                lease=remote.lease,
            )
        except KVBridgeError as error:
            self._fail(load, str(error))
            self.agent.decline(remote.engine_id, remote.request_id)  # nothing will be read
            return
        self._reading.append(_Reading(load.request_id, transfer))

    def _fail_to_meet(self, load: Load, error: str) -> None:
        if load.is_empty:
            self._failures.notices += 1
            _log.info("engine %s was not told: %s", load.remote.engine_id, error)
        else:
            self._failures.handshakes += 1
            self._loaded[load.request_id] = Loaded(error, self._name)

    def _fail(self, load: Load, error: str) -> None:
        if load.is_empty:
            self._fail_to_meet(load, error)
        else:
            self._failures.transfers += 1
            self._loaded[load.request_id] = Loaded(error, self._name)

    def _end_readings(self) -> None:
        """Report what has ended and is quiet: until then, nobody may have the blocks."""
        running = []
        for each in self._reading:
            transfer = each.transfer
            if transfer.state is State.PENDING or not transfer.quiet:
                if transfer.state is not State.PENDING and not each.is_overdue:
                    each.is_overdue = True
                    _log.warning(
                        "request %s is given up over %s: %s; its blocks are kept until that is "
                        "quiet",
                        each.request_id,
                        self._name,
                        transfer.reason,
                    )
                running.append(each)
                continue
            if transfer.state is not State.DONE:
                self._failures.transfers += 1
                self._meetings.doubt(transfer.session.engine_id)
            sources, seconds = tuple(transfer.sources), transfer.seconds
            loaded = Loaded(transfer.reason, self._name, sources, seconds)
            self._loaded[each.request_id] = loaded
        self._reading = running

    def _let_go(self, transfer_id: str) -> str:
        """Keep blocks no longer, though not every reader has reported; return their request."""
        request_id, _ = self._held.pop(transfer_id)
        self.agent.expire(transfer_id)
        self._sent.add(request_id)
        self._expired.add(request_id)
        self._failures.leases += 1
        return request_id

    def _expire(self) -> None:
        now_s = self._clock()
        late = [transfer for transfer, (_, end_s) in self._held.items() if now_s >= end_s]
        for transfer_id in late:
            request_id = self._let_go(transfer_id)
            _log.warning(
                "request %s: not every reader over %s has reported in time; it is kept no longer",
                request_id,
                self._name,
            )
