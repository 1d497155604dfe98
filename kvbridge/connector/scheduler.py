"""The half of a connector where an engine decides: which requests load what, and who holds what."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from kvbridge.connector import params
from kvbridge.connector.config import ConnectorConfig, known_peers
from kvbridge.connector.holds import Holds
from kvbridge.connector.lookup import Entry, advertised, look_up
from kvbridge.connector.offers import Offers
from kvbridge.connector.peers import KnownPeers
from kvbridge.connector.renewals import Renewals, Renews
from kvbridge.connector.series import LEASES_HELD, RENEWALS, SCHEDULER
from kvbridge.connector.sources import Sources
from kvbridge.connector.stats import Key, Meter, Stats
from kvbridge.connector.step import Load, StepMetadata
from kvbridge.connector.summary import Summary
from kvbridge.connector.values import BlockIds, Request, WorkerReport
from kvbridge.errors import ConfigError, MemoryBusyError
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    Networks,
    Registry,
    load_keys,
    open_registry,
)
from kvbridge.model import Rank
from kvbridge.session.tokens import digest_of_tokens

_log = logging.getLogger(__name__)


class Serves(Protocol):
    """Tells other engines what an engine has published, as ``HandshakeServer`` does.

    Attributes:
        keep: Is asked to keep blocks for longer.
    """

    keep: Callable[[Sequence[str]], tuple[Sequence[bool], float]] | None

    @property
    def address(self) -> EngineAddress:
        """Where it listens."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Tell this from now on."""

    def withdraw(self) -> None:
        """Refuse everybody, until there is something to tell."""

    def close(self) -> None:
        """Tell nobody anything any more."""


class BridgeScheduler:
    """Decides for one connector; see :class:`~kvbridge.connector.Connector` for the hooks.

    Attributes:
        server: Serves the engine's metadata.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        name: str,
        engine_id: str,
        server: Serves,
        *,
        registry: Registry | None = None,
        peers: KnownPeers | None = None,
        dialer: Renews | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what it works with, which is closed with it; :meth:`open` makes that.

        Args:
            config: The connector.
            name: Its name.
            engine_id: The engine.
            server: Tells other engines what the ranks have published.
            registry: Where the engine is announced.
            peers: The engines that are known beforehand.
            dialer: Asks other engines to keep blocks for longer; without it, nobody is asked.
            clock: Seconds that never run backwards.

        Raises:
            ConfigError: Nobody can dial the address that the server listens on.
        """
        self._config, self._name = config, name
        self._engine_id = config.engine_id or engine_id
        self.server, self._peers = server, peers
        self._address = advertised(config.handshake, server.address, self._engine_id)
        self._entry = None
        if registry is not None:
            self._entry = Entry(registry, config, name, self._engine_id, self._address)
        self._engine: dict[Rank, HandshakeMetadata] = {}
        self._engine_is_new = False
        self._settled: set[str] = set()  # requests whose blocks elsewhere have been dealt with
        self._loading: set[str] = set()  # those that have not been reported as loaded
        self._holds = Holds(config.lease_s, config.lease_longest_s, clock, most=config.leases_max)
        self._renewals = None
        if dialer is not None:
            meet_s = config.handshake.timeout_s
            self._renewals = Renewals(dialer, self._engine_id, timeout_s=meet_s, clock=clock)
        server.keep = self._holds.keep
        self._loads: list[Load] = []
        self._aborted: list[str] = []  # those of which the workers have not been told
        self._meter = Meter(SCHEDULER, name, config.transport)
        self._summary = Summary(f"connector {name}", self.stats, config.log_interval_s, clock)
        self._sources = Sources(config, name, self._meter)
        self._offers = Offers(
            config,
            name,
            self._engine_id,
            self._address,
            holds=self._holds,
            sources=self._sources,
            meter=self._meter,
        )

    @classmethod
    def open(cls, config: ConnectorConfig, name: str, engine_id: str) -> "BridgeScheduler":
        """Bind the handshake port.

        Raises:
            ConfigError: A key, secret or address is none.
            HandshakeError: The address cannot be bound.
        """
        handshake = config.handshake
        registry = None if handshake.registry is None else open_registry(handshake.registry)
        keys, addresses = load_keys(handshake), known_peers(handshake)
        with contextlib.ExitStack() as opened:
            server = HandshakeServer(handshake.host, handshake.port, keys=keys)
            opened.callback(server.close)
            find = None if registry is None else partial(look_up, registry, name)
            networks = Networks(handshake.allowed_networks)
            dialer = Dialer(keys=keys, networks=networks, find=find)
            opened.callback(dialer.close)
            peers = None
            if addresses:
                peers = KnownPeers(
                    addresses,
                    dialer,
                    asker=config.engine_id or engine_id,
                    reads=config.role != "producer",
                    timeout_s=handshake.timeout_s,
                )
            half = cls(
                config, name, engine_id, server, registry=registry, peers=peers, dialer=dialer
            )
            opened.pop_all()
        return half

    def publish(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Serve what the ranks have published, and announce the engine where it is looked up.

        Raises:
            HandshakeError: The metadata contradicts itself, or the registry does not answer.
        """
        self.server.set_xfer_handshake_metadata_pp_aware(metadata)
        _log.info(
            "connector %s of engine %s: %d rank(s) over %s, role %s, direction %s; other engines "
            "meet it at %s",
            self._name,
            self._engine_id,
            len(metadata),
            self._config.transport,
            self._config.role,
            self._config.direction,
            self._address,
        )
        self._engine, self._engine_is_new = dict(metadata), True
        self._offers.publish(metadata)
        if self._entry is not None:
            self._entry.announce(next(iter(metadata.values())).incarnation)
        if self._peers is not None:
            self._peers.ask(metadata)

    def withdraw(self) -> None:
        """Serve and offer nothing, since the ranks have given their memory back.

        Raises:
            MemoryBusyError: Requests are being loaded, and other engines may have to meet this one
                to say that they do not write any more.
        """
        if self._loading:
            raise MemoryBusyError(
                f"connector {self._name!r}: {len(self._loading)} requests have not been reported "
                "as loaded; unregister the cache of the workers first, and go on with steps until "
                "they are"
            )
        self.server.withdraw()
        self._offers.withdraw()

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return how many tokens beyond those computed another engine holds.

        None while an earlier request of that id is still being loaded: two loads of one id could
        not be told apart.
        """
        if request.request_id in self._loading and request.request_id not in self._settled:
            return None
        remote = self._sources.of(request)
        if remote is None or request.request_id in self._settled:
            return 0
        matched = max(min(remote.num_tokens, request.prompt_tokens) - computed, 0)
        if self._renewals is not None:
            self._renewals.wait(request.request_id, remote)
        return matched

    def load(self, request: Request, block_ids: BlockIds, tokens: int) -> Load | None:
        """Return what reads the last ``tokens`` of those that another engine holds."""
        remote = self._sources.of(request)
        if remote is None:
            return None
        end = min(remote.num_tokens, request.prompt_tokens)
        start = end - tokens if tokens else end
        digest, ids = "", request.tokens
        if tokens and remote.is_expected and ids is not None and len(ids) >= end:
            digest = digest_of_tokens(ids, end)
        return Load(request.request_id, remote, block_ids, start, end, self._address, digest)

    def allocated(self, request: Request, block_ids: BlockIds, tokens: int) -> None:
        """Load into a request's blocks; or tell the other engine that there is no need to."""
        if request.request_id in self._settled:
            return
        load = self.load(request, block_ids, tokens)
        if load is not None:
            self.settle(request)
            self._loads.append(load)
            if load.is_empty:
                self._renew_no_more(request.request_id)
            else:
                self._loading.add(request.request_id)

    def settle(self, request: Request) -> None:
        """Take note that what another engine holds for a request is being dealt with."""
        self._settled.add(request.request_id)

    def not_needed(self, request: Request) -> None:
        """Tell the other engine that a request needs nothing from it."""
        self.allocated(request, (), 0)

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Keep a request's blocks, if another engine will want them."""
        self.not_needed(request)  # an abort before anything was allocated
        self._settled.discard(request.request_id)
        is_loading = request.request_id in self._loading
        if not is_loading:
            self._renew_no_more(request.request_id)
        elif request.aborted:
            self._aborted.append(request.request_id)
        try:
            chosen = params.chosen_id(request.params)
        except ConfigError as error:
            self._sources.refuse(request, "offered", str(error))
            return is_loading, None
        finally:
            self._sources.forget(request)
        wanted = params.wants_remote_decode(request.params) and not request.aborted
        if is_loading or not wanted or not request.computed_tokens:
            # Given up while its blocks are written to, or of no use: who waits for it is told.
            self._offers.withhold(chosen)
            return is_loading, None
        offer = self._offers.make(request, block_ids, chosen)
        return offer is not None, offer

    def progressed(self, request: Request, block_ids: BlockIds) -> None:
        """Let a request's tokens go that are there, if another engine may wait for them."""
        chosen = self._chosen(request)
        if chosen is not None:
            self._offers.progress(request, block_ids, chosen)

    def preempted(self, request: Request) -> None:
        """Take note that a request has lost its blocks."""
        chosen = self._chosen(request)
        if chosen is not None:
            self._offers.lose(chosen)

    def _chosen(self, request: Request) -> str | None:
        """Return the name under which another engine may wait for a request's tokens."""
        if not params.wants_remote_decode(request.params):
            return None
        try:
            return params.chosen_id(request.params)
        except ConfigError:
            return None  # which is said once it has finished

    def _renew_no_more(self, request_id: str) -> None:
        if self._renewals is not None:
            self._renewals.forget(request_id)

    def ended(self, report: WorkerReport) -> None:
        """Take note of what has ended on all ranks."""
        self._loading -= report.loaded.keys()
        # Who ended by itself is not to be aborted: its id may come again in the same step.
        self._aborted = [each for each in self._aborted if each not in report.loaded]
        for request_id in report.loaded:
            self._renew_no_more(request_id)
        self._holds.sent(report.sent)

    def stats(self) -> Stats:
        """Return what this half has counted; from any thread."""
        others: dict[Key, float] = {(LEASES_HELD.name,): len(self._holds)}
        if self._renewals is not None:
            counts = self._renewals.counts
            others[RENEWALS.name, "kept"] = counts.kept
            others[RENEWALS.name, "refused"] = counts.refused
            others[RENEWALS.name, "failed"] = counts.failed
        return self._meter.stats(others)

    def drain(self, within_s: float) -> None:
        """Offer nothing any more, and keep nothing for longer than so many seconds."""
        self._holds.drain(within_s)
        if self._entry is not None:
            self._entry.withdraw()

    @property
    def drained(self) -> bool:
        """Whether nothing is kept for others, and nothing loaded."""
        return not self._holds and not self._loading and not self._loads

    @property
    def ready(self) -> bool:
        """Whether no engine that is known beforehand speaks against requests."""
        return self._peers is None or self._peers.ready

    def refusals(self) -> dict[str, str]:
        """Return why engines that are known beforehand do not fit, by their addresses."""
        return {} if self._peers is None else self._peers.refusals()

    def take_step(self) -> StepMetadata:
        """Return what is new since the last step."""
        if self._peers is not None:
            self._peers.poll()
        if self._renewals is not None:
            self._renewals.poll()
        self._summary.poll()
        engine = self._engine if self._engine_is_new else None
        holds, over = self._holds.take()
        step = StepMetadata(
            tuple(self._loads),
            engine,
            holds,
            over,
            self._offers.take_progress(),
            self._offers.take_withheld(),
            tuple(self._aborted),
        )
        self._loads, self._aborted, self._engine_is_new = [], [], False
        return step

    def close(self) -> None:
        """Free the port, and take leave of the registry."""
        if self._entry is not None:
            self._entry.close()
        if self._peers is not None:
            self._peers.close()
        if self._renewals is not None:
            self._renewals.close()
        self._offers.withdraw()
        self.server.close()
