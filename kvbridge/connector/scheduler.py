"""The half of a connector where an engine decides: which requests load what, and who holds what."""

import contextlib
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from kvbridge.connector import params
from kvbridge.connector.config import ConnectorConfig, known_peers
from kvbridge.connector.holds import Holds
from kvbridge.connector.lookup import entry_id, look_up
from kvbridge.connector.params import RemoteRequest
from kvbridge.connector.peers import KnownPeers
from kvbridge.connector.renewals import Renewals, Renews
from kvbridge.connector.series import LEASES_HELD, OFFERS, PARAMS_REFUSED, RENEWALS, SCHEDULER
from kvbridge.connector.stats import Key, Meter, Stats
from kvbridge.connector.step import Load, StepMetadata
from kvbridge.connector.values import BlockIds, Request, WorkerReport
from kvbridge.errors import ConfigError, HandshakeError
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    EngineRecord,
    HandshakeMetadata,
    HandshakeServer,
    Networks,
    Registry,
    load_keys,
    open_registry,
)
from kvbridge.handshake.metadata import open_envelope
from kvbridge.model import Rank, RankCache
from kvbridge.session.leases import SLOTS
from kvbridge.session.session import body_of

_log = logging.getLogger(__name__)

CHOSEN_MAX = 4 * SLOTS
"""So many names that others chose are known, lest one of them mean two requests."""

_KEEPS_ALL = frozenset({"attention", "mla"})
"""Kinds of cache groups whose tables have an entry for every token of a request."""


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
        self.server, self._registry, self._peers = server, registry, peers
        self._address = self._advertised()
        self._numbers = itertools.count(1)
        self._engine: dict[Rank, HandshakeMetadata] = {}
        self._engine_is_new = False
        self._cache: RankCache | None = None  # of any rank: all have the same groups of blocks
        self._settled: set[str] = set()  # requests whose blocks elsewhere have been dealt with
        self._loading: set[str] = set()  # those that have not been reported as loaded
        self._holds = Holds(config.lease_s, config.lease_longest_s, clock, most=config.leases_max)
        self._renewals = None
        if dialer is not None:
            meet_s = config.handshake.timeout_s
            self._renewals = Renewals(dialer, self._engine_id, timeout_s=meet_s, clock=clock)
        server.keep = self._holds.keep
        self._loads: list[Load] = []
        self._never: list[str] = []  # transfer ids of which nothing will be kept
        self._chosen: OrderedDict[str, None] = OrderedDict()  # those that others chose
        self._meter = Meter(SCHEDULER, name, config.transport)
        self._refused: set[str] = set()  # requests whose params are of no use here
        self._said: set[str] = set()  # reasons that hold for every request alike

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

    def _advertised(self) -> EngineAddress:
        """Return the address that requests carry (report B47)."""
        handshake, port = self._config.handshake, self.server.address.port
        host = handshake.advertise_host or handshake.host
        if host in {"0.0.0.0", "::", "[::]"}:  # noqa: S104 - nobody can dial that
            raise ConfigError(
                f"the handshake channel listens on every interface ({host}), which is no address "
                "that peers can dial; set advertise_host to the one by which they reach this engine"
            )
        address = EngineAddress.of(host, port, where="advertise_host")
        if address.is_loopback and not self.server.address.is_loopback:
            _log.warning(
                "engine %s listens on %s but advertises %s, which leads every other machine to "
                "itself; set advertise_host",
                self._engine_id,
                self.server.address,
                address,
            )
        return address

    def publish(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Serve what the ranks have published, and announce the engine where it is looked up.

        Raises:
            HandshakeError: The metadata contradicts itself, or the registry does not answer.
        """
        self.server.set_xfer_handshake_metadata_pp_aware(metadata)
        self._engine, self._engine_is_new = dict(metadata), True
        self._cache = body_of(next(iter(metadata.values()))).cache
        if self._registry is not None:
            record = EngineRecord(
                engine_id=entry_id(self._engine_id, self._name),
                incarnation=next(iter(metadata.values())).incarnation,
                host=self._address.host,
                port=self._address.port,
                labels={"transport": self._config.transport, "role": self._config.role},
            )
            self._registry.announce(record, ttl_s=self._config.handshake.ttl_s)
        if self._peers is not None:
            self._peers.ask(metadata)

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return how many tokens beyond those computed another engine holds.

        None while an earlier request of that id is still being loaded: two loads of one id could
        not be told apart.
        """
        if request.request_id in self._loading and request.request_id not in self._settled:
            return None
        remote = self._remote(request)
        if remote is None or request.request_id in self._settled:
            return 0
        matched = max(min(remote.num_tokens, request.prompt_tokens) - computed, 0)
        if self._renewals is not None:
            self._renewals.wait(request.request_id, remote)
        return matched

    def load(self, request: Request, block_ids: BlockIds, tokens: int) -> Load | None:
        """Return what reads the last ``tokens`` of those that another engine holds."""
        remote = self._remote(request)
        if remote is None:
            return None
        end = min(remote.num_tokens, request.prompt_tokens)
        start = end - tokens if tokens else end
        return Load(request.request_id, remote, block_ids, start, end, self._address)

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
        self._refused.discard(request.request_id)
        is_loading = request.request_id in self._loading
        if not is_loading:
            self._renew_no_more(request.request_id)
        try:
            chosen = params.chosen_id(request.params)
        except ConfigError as error:
            self._refuse(request, str(error))
            return is_loading, None
        wanted = params.wants_remote_decode(request.params) and not request.aborted
        if is_loading or not wanted or not request.computed_tokens or self._cache is None:
            # Given up while its blocks are written to, or of no use: who waits for it is told.
            self._never += filter(None, [chosen])
            return is_loading, None
        transfer_id, lease = chosen or f"{request.request_id}#{next(self._numbers)}", None
        reason, why = self._objection(request, block_ids, self._cache)
        if not reason and chosen is not None and not self._is_new(chosen):
            reason = "duplicate"
            why = f"its transfer_id {chosen!r:.200} has been another one's; give each its own"
            chosen = None
        if not reason:
            tokens = request.computed_tokens
            lease = self._holds.grant(request.request_id, transfer_id, block_ids, tokens)
            if lease is None:
                reason = "leases_max"
                why = f"the blocks of {len(self._holds)} others are held, and {reason} is as low"
        self._meter.count(OFFERS, "declined" if reason else "made", reason)
        if reason:
            level = self._once(reason) if reason == "role" else logging.WARNING
            _log.log(level, "request %s is not offered: %s", request.request_id, why)
            self._never += filter(None, [chosen])
            return False, None
        first = next(iter(self._engine.values()))
        remote = RemoteRequest(
            self._engine_id,
            transfer_id,
            self._address,
            block_ids,
            request.computed_tokens,
            first.incarnation,
            max(open_envelope(data.payload).generation for data in self._engine.values()),
            lease,
            self._config.lease_s,
        )
        pp, tp = (1 + max(rank[axis] for rank in self._engine) for axis in (0, 1))
        return True, params.offer(remote, self._name, tp_size=tp, pp_size=pp)

    def _is_new(self, chosen: str) -> bool:
        """Whether a name has not been another request's of late, which somebody may mean."""
        is_new = chosen not in self._chosen
        self._chosen[chosen] = None
        if len(self._chosen) > CHOSEN_MAX:
            self._chosen.popitem(last=False)
        return is_new

    def _renew_no_more(self, request_id: str) -> None:
        if self._renewals is not None:
            self._renewals.forget(request_id)

    def _objection(
        self, request: Request, block_ids: BlockIds, cache: RankCache
    ) -> tuple[str, str]:
        """Return why a request's blocks cannot be kept, in a word and more; empty if they can."""
        if self._config.role == "consumer":
            return "role", self._only("takes")
        if request.request_id in self._holds:
            return "duplicate", (
                "another one of that id is, since it has finished twice; give each request an id "
                "of its own"
            )
        if self._holds.draining:
            return "draining", "the engine is being drained"
        held = _tokens_in(block_ids, cache)
        if held < request.computed_tokens:
            # Which of both is wrong cannot be told; to offer part of it could be the wrong part.
            return "blocks", (
                f"the engine has computed {request.computed_tokens} tokens of it, the blocks that "
                f"it lists hold {held}; list its blocks from the first token on"
            )
        return "", ""

    def ended(self, report: WorkerReport) -> None:
        """Take note of what has ended on all ranks."""
        self._loading -= report.loaded.keys()
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
        if self._registry is not None:
            try:
                self._registry.withdraw(entry_id(self._engine_id, self._name))
            except HandshakeError as error:
                _log.warning("the entry of engine %s ends by itself: %s", self._engine_id, error)

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
        engine = self._engine if self._engine_is_new else None
        step = StepMetadata(tuple(self._loads), engine, *self._holds.take(), tuple(self._never))
        self._loads, self._never, self._engine_is_new = [], [], False
        return step

    def close(self) -> None:
        """Free the port, and take leave of the registry."""
        if self._registry is not None:
            self._registry.close()
        if self._peers is not None:
            self._peers.close()
        if self._renewals is not None:
            self._renewals.close()
        self._cache = None  # nobody can be offered anything any more
        self.server.close()

    def _remote(self, request: Request) -> RemoteRequest | None:
        """Return where a request's blocks are, if they are anywhere, and we take blocks."""
        given: object = request.params
        if given is not None and not isinstance(given, Mapping):
            self._refuse(request, f"its params are a {type(given).__name__}, no mapping")
            return None
        if not params.wants_remote_prefill(request.params) or request.params is None:
            return None
        if self._config.role == "producer":
            if self._is_new_refusal(request, "role"):
                why = self._only("gives")
                _log.log(
                    self._once("role"), "request %s is not loaded: %s", request.request_id, why
                )
            return None
        try:
            remote = params.remote_request(request.params, self._name)
            if remote is None and self._is_new_refusal(request, "unmatched"):
                _log.log(
                    self._once("unmatched"),
                    "request %s is offered by connectors %s and not by %r; connectors are paired "
                    "by their names, so give them the same on both engines (said once)",
                    request.request_id,
                    params.offered_by(request.params),
                    self._name,
                )
        except ConfigError as error:
            # The engine can compute what it cannot load: a stranger's mistake is not its end.
            self._refuse(request, str(error))
            return None
        return remote

    def _refuse(self, request: Request, why: str) -> None:
        if self._is_new_refusal(request, "malformed"):
            _log.warning("request %s cannot be loaded: %s", request.request_id, why)

    def _only(self, does: str) -> str:
        return (
            f"connector {self._name!r} has the role {self._config.role!r}, so its engine only "
            f"{does}; where blocks go both ways, give it the role 'both' (said once)"
        )

    def _once(self, reason: str) -> int:
        """Return how loud to say what holds for every request alike: the first time, aloud."""
        level = logging.INFO if reason in self._said else logging.WARNING
        self._said.add(reason)
        return level

    def _is_new_refusal(self, request: Request, reason: str) -> bool:
        """Count a request whose params are of no use, once, however often it is looked at."""
        if request.request_id in self._refused:
            return False
        self._refused.add(request.request_id)
        self._meter.count(PARAMS_REFUSED, reason)
        return True


def _tokens_in(block_ids: BlockIds, cache: RankCache) -> float:
    """Return how many tokens blocks can hold, by the groups that keep every token."""
    return min(
        (
            len(ids) * group.block_tokens * cache.dcp_size
            for ids, group in zip(block_ids, cache.groups, strict=False)
            if group.kind in _KEEPS_ALL
        ),
        default=math.inf,
    )
