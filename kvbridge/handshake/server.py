"""The side channel: one port per engine that serves the metadata of all its ranks."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from kvbridge.errors import ConfigError, HandshakeError, UnknownHostError
from kvbridge.handshake.address import EngineAddress, look_up
from kvbridge.handshake.base import PPAwareHandshake
from kvbridge.handshake.compatibility import compare, engine_factors, listed
from kvbridge.handshake.messages import (
    MetadataReply,
    MetadataRequest,
    RefusalReply,
    RenewalReply,
    RenewalRequest,
    Request,
    decode_request,
)
from kvbridge.handshake.metadata import HandshakeMetadata, decode_factors
from kvbridge.handshake.security import Keys
from kvbridge.handshake.sockets import channel_socket
from kvbridge.handshake.wire import REQUEST_MAX_BYTES, WIRE, common_version, encode
from kvbridge.model import Rank

_log = logging.getLogger(__name__)

_STOP_CHECK_MS = 100
_GREETING_MS = 10_000
_REFUSALS_KEPT = 16
_WAITING_MAX = 4
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_PROVEN, _ENDED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


class HandshakeServer(PPAwareHandshake):
    """Serves an engine's metadata on one port, from a thread of its own.

    The port is bound when the constructor returns, and answers "not yet" until metadata has been
    set. Without keys it serves this machine alone. What cannot be served is counted and the next
    request looked at; nothing that comes over the port ends the thread.

    Attributes:
        address: Where it listens.
        refused: Requests that were malformed or could not be served.
        unauthenticated: Connections that did not prove who they are, or did not speak the
            protocol.
        refusals: Why the last requests were refused, in words.
        keep: Keeps the blocks of requests, by our names for them, for longer, and says which it
            does and for how many seconds; called from the server's thread. None refuses.
    """

    keep: Callable[[Sequence[str]], tuple[Sequence[bool], float]] | None = None

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, keys: Keys | None = None) -> None:
        """Bind the port and start the thread.

        Args:
            host: Address to listen on.
            port: Port to listen on; 0 takes a free one.
            keys: Own keys and those of peers; needed for every address but loopback.

        Raises:
            ConfigError: The host is not a loopback address and there are no keys, or the address
                is none.
            HandshakeError: The address cannot be bound.
        """
        address = EngineAddress.of(host, port, where="handshake address")
        _check_is_found(address)
        if keys is None and not address.is_loopback:
            raise ConfigError(
                f"the handshake channel would listen on {host!r} for everybody; give it a secret "
                "(secret_file, or variable KVBRIDGE_SECRET) or keys, or use a loopback address"
            )
        if keys is None:
            _log.info("no secret: the handshake channel serves this machine alone, on %s", address)
        self._lock = threading.Lock()  # what is published changes as a whole
        self._ranks: dict[Rank, HandshakeMetadata] = {}
        self._factors: dict[str, Any] = {}
        self._absent = RefusalReply("no ranks are published yet", not_yet=True)
        self._generation = 0
        self.refused = 0
        self.unauthenticated = 0
        self._failed = self._ended_unproven = 0
        self.refusals: deque[str] = deque(maxlen=_REFUSALS_KEPT)
        self._context = zmq.Context()
        self._gate: ThreadAuthenticator | None = None
        try:
            self._socket = self._listening(address, keys)
            self._monitor = self._socket.get_monitor_socket(_FAILED | _PROVEN | _ENDED)
        except BaseException:
            self._shut()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = EngineAddress.of(
            address.host, bound.rstrip("\0").rpartition(":")[2], where="bound address"
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvbridge-handshake", daemon=True)
        self._thread.start()

    def _listening(self, address: EngineAddress, keys: Keys | None) -> Any:
        listener = channel_socket(self._context, zmq.ROUTER, REQUEST_MAX_BYTES)
        listener.setsockopt(zmq.HANDSHAKE_IVL, _GREETING_MS)
        # Answers to an asker that does not read them are dropped, once a few of them wait; and an
        # asker's requests wait in its own memory.
        listener.setsockopt(zmq.SNDHWM, _WAITING_MAX)
        listener.setsockopt(zmq.RCVHWM, _WAITING_MAX)
        if keys is not None:
            known = frozenset(keys.peers.values())
            self._gate = ThreadAuthenticator(self._context)
            self._gate.start()
            self._gate.configure_curve_callback(credentials_provider=_KnownKeys(known))
            listener.curve_server = True
            listener.curve_publickey, listener.curve_secretkey = keys.public, keys.secret
        try:
            listener.bind(address.endpoint)
        except zmq.ZMQError as error:
            raise HandshakeError(
                f"cannot listen on {address}: {error.strerror}; choose another address or port, "
                "or port 0 for a free one"
            ) from error
        return listener

    @property
    def host(self) -> str:
        """Address that it listens on."""
        return self.address.host

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return self.address.port

    @property
    def generation(self) -> int:
        """How often metadata has been set."""
        return self._generation

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        """Serve the ranks of a single stage."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, tp_rank): data for tp_rank, data in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Serve every rank of an engine.

        Raises:
            HandshakeError: There is no rank, its metadata is listed under another, or ranks
                contradict each other.
        """
        wrong = [rank for rank, data in metadata.items() if data.rank != rank]
        if not metadata:
            raise HandshakeError("there are no ranks to serve; register a cache on each first")
        if wrong:
            raise HandshakeError(
                f"{len(metadata)} ranks of metadata to serve, listed under wrong ranks: {wrong}"
            )
        factors = engine_factors(decode_factors(data.payload) for data in metadata.values())
        with self._lock:
            self._generation += 1
            self._ranks = dict(sorted(metadata.items()))
            self._factors = factors

    def withdraw(self) -> None:
        """Refuse everybody, until metadata is set again."""
        with self._lock:
            self._absent = RefusalReply(
                "this engine has no cache now: it sleeps, and what it held for others is gone"
            )
            self._ranks = {}

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._shut()

    def _shut(self) -> None:
        if self._gate is not None and self._gate.is_alive():
            self._gate.stop()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(_STOP_CHECK_MS))
            if self._monitor in ready:
                self._follow(recv_monitor_message(self._monitor)["event"])
            if self._socket in ready:
                frames = self._socket.recv_multipart()
                # A ROUTER prefixes the sender; a DEALER sends its request as one more frame.
                if len(frames) != 2:
                    self._refuse(f"a request of {len(frames) - 1} frames came; one was expected")
                    continue
                try:
                    answer = self._answer(frames[1])
                except Exception:  # a fault of ours, which the next asker shall not feel
                    _log.exception("a handshake request could not be answered")
                    answer = encode(self._refuse("fault in the engine that was asked; see its log"))
                self._socket.send_multipart([frames[0], answer])

    def _follow(self, event: int) -> None:
        """Count strangers, and say so now and then: at 1, 2, 4, 8 of them.

        Some connections that fail say so, and some just end.
        """
        self._failed += bool(event & _FAILED)
        self._ended_unproven += (event == _ENDED) - (event == _PROVEN)
        strangers = max(self._failed, self._ended_unproven)
        if strangers <= self.unauthenticated:
            return
        self.unauthenticated = strangers
        if not self.unauthenticated & (self.unauthenticated - 1):
            _log.warning(
                "handshake: %d connections to %s so far had not the right secret or keys, did not "
                "speak the protocol, or ended before they could",
                self.unauthenticated,
                self.address,
            )

    def _answer(self, data: bytes) -> bytes:
        with self._lock:
            ranks, factors, generation = self._ranks, self._factors, self._generation
        if not ranks:
            return encode(self._absent)
        try:
            request = decode_request(data)
            _check_engine(request, ranks)
            if isinstance(request, RenewalRequest):
                return encode(self._renew(request, ranks))
            _check_ranks(request, ranks)
        except HandshakeError as error:
            return encode(self._refuse(str(error)))
        version = common_version(request.wire)
        if request.factors is not None:
            differences = [
                each
                for each in compare(factors, request.factors, skewed=version != WIRE)
                if each.severity == "error"
            ]
            if differences:
                fields = {each.field: (each.local, each.remote) for each in differences}
                reason = f"engine {request.asker!r:.200} is incompatible: {listed(differences)}"
                return encode(self._refuse(reason, fields))
        wanted = ranks if request.ranks is None else {rank: ranks[rank] for rank in request.ranks}
        return encode(MetadataReply(generation, tuple(wanted.values()), version))

    def _renew(
        self, request: RenewalRequest, ranks: Mapping[Rank, HandshakeMetadata]
    ) -> RenewalReply:
        incarnation = next(iter(ranks.values())).incarnation
        if request.incarnation not in {"", incarnation}:
            raise HandshakeError(
                f"engine {request.engine_id!r:.200} has restarted: its incarnation is "
                f"{incarnation!r}, the blocks were of {request.incarnation!r:.200}"
            )
        if self.keep is None:
            raise HandshakeError(f"engine {request.engine_id!r:.200} keeps no blocks for others")
        kept, lease_s = self.keep(request.requests)
        return RenewalReply(tuple(kept), lease_s, common_version(request.wire))

    def _refuse(
        self, reason: str, differences: dict[str, tuple[Any, Any]] | None = None
    ) -> RefusalReply:
        self.refused += 1
        self.refusals.append(reason)
        # Engines that do not fit ask again after a pause; others may ask as fast as they can.
        if differences or not self.refused & (self.refused - 1):
            _log.warning("handshake refused (%d so far): %.2000s", self.refused, reason)
        return RefusalReply(reason, differences=msgspec.Raw(encode(differences or {})))


def _check_engine(request: Request, ranks: Mapping[Rank, HandshakeMetadata]) -> None:
    engine_id = next(iter(ranks.values())).engine_id
    if request.engine_id not in {None, engine_id}:
        raise HandshakeError(
            f"engine {request.engine_id!r:.200} was expected here, this is {engine_id!r}; "
            "the address belongs to another engine"
        )


def _check_ranks(request: MetadataRequest, ranks: Mapping[Rank, HandshakeMetadata]) -> None:
    unknown = [rank for rank in request.ranks or () if rank not in ranks]
    if unknown:
        engine_id = next(iter(ranks.values())).engine_id
        raise HandshakeError(
            f"ranks {unknown[:8]} were asked for, engine {engine_id!r} has {sorted(ranks)}"
        )


def _check_is_found(address: EngineAddress) -> None:
    """Refuse a typing error as such: a name that is neither an interface nor an address."""
    if address.host in {name for _, name in socket.if_nameindex()}:
        return
    try:
        look_up(address.host)
    except UnknownHostError as error:
        raise ConfigError(
            f"handshake address {address}: {error}; name an address, or a network interface, of "
            "this machine"
        ) from error


class _KnownKeys:
    """Tells ZeroMQ which public keys may connect."""

    def __init__(self, known: frozenset[bytes]) -> None:
        self._known = known

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._known
