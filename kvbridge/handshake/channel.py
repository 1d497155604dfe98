"""The side channel: one port per engine that serves the metadata of all its ranks."""

import ipaddress
import threading
import time
from collections.abc import Mapping

import zmq

from kvbridge.config import check_timeout
from kvbridge.errors import ConfigError, HandshakeError, HandshakeTimeoutError
from kvbridge.handshake.base import PPAwareHandshake
from kvbridge.handshake.messages import (
    MESSAGE_MAX_BYTES,
    WIRE_MAJOR,
    WIRE_MINOR,
    HandshakeMetadata,
    MetadataReply,
    MetadataRequest,
    RefusalReply,
    decode_reply,
    decode_request,
    encode,
)
from kvbridge.model import Rank

_STOP_CHECK_MS = 100
_ASK_AGAIN_S = 0.05


def endpoint_of(host: str, port: int) -> str:
    """Return the ZeroMQ address of a host and port; IPv6 addresses get their brackets.

    Raises:
        ConfigError: The port is none.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} of host {host!r} must be in [0, 65535]")
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host names this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HandshakeServer(PPAwareHandshake):
    """Serves an engine's metadata on one port, from a thread of its own.

    The port is bound when the constructor returns, and answers "not yet" until metadata has been
    set. Requests are not authenticated yet, so only loopback addresses are served.

    Attributes:
        host: Address that it listens on.
        port: Port that it listens on.
        refused: Requests that were malformed or could not be served.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind the port and start the thread.

        Args:
            host: Loopback address to listen on.
            port: Port to listen on; 0 takes a free one.

        Raises:
            ConfigError: The host is not a loopback address, or the port is none.
            HandshakeError: The address cannot be bound.
        """
        if not is_loopback(host):
            raise ConfigError(
                f"the handshake channel is not authenticated and would listen on {host!r}; "
                "use a loopback address such as 127.0.0.1"
            )
        endpoint = endpoint_of(host, port)
        self._encoded = encode(RefusalReply("no ranks are published yet", not_yet=True))
        self._engine_id: str | None = None
        self._generation = 0
        self.refused = 0
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise HandshakeError(
                f"cannot listen on {endpoint}: {error.strerror}; choose another port, or 0 for a "
                "free one"
            ) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.host, self.port = host, int(bound.rpartition(":")[2].rstrip("\0"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kvbridge-handshake", daemon=True)
        self._thread.start()

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
            HandshakeError: There is no rank, or its metadata is listed under another.
        """
        wrong = [rank for rank, data in metadata.items() if data.rank != rank]
        if wrong or not metadata:
            raise HandshakeError(
                f"{len(metadata)} ranks of metadata to serve, listed under wrong ranks: {wrong}"
            )
        self._generation += 1
        ranks = tuple(data for _, data in sorted(metadata.items()))
        self._engine_id = ranks[0].engine_id
        self._encoded = encode(MetadataReply(self._generation, ranks))

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_STOP_CHECK_MS):
                continue
            frames = self._socket.recv_multipart()
            # A ROUTER prefixes the sender; a DEALER sends its request as one more frame.
            if len(frames) != 2:
                self.refused += 1
                continue
            self._socket.send_multipart([frames[0], self._answer(frames[1])])

    def _answer(self, data: bytes) -> bytes:
        try:
            request = decode_request(data)
        except HandshakeError as error:
            self.refused += 1
            return encode(RefusalReply(str(error)))
        reason = self._refusal(request)
        if reason:
            self.refused += 1
            return encode(RefusalReply(reason))
        return self._encoded

    def _refusal(self, request: MetadataRequest) -> str:
        if request.wire[0] != WIRE_MAJOR:
            return (
                f"wire version {request.wire[0]}.{request.wire[1]} was asked for, this engine "
                f"speaks {WIRE_MAJOR}.{WIRE_MINOR}; upgrade the older side"
            )
        if request.engine_id not in (None, self._engine_id):
            return (
                f"engine {request.engine_id!r} was expected here, this is {self._engine_id!r}; "
                "the address belongs to another engine"
            )
        return ""


def fetch_metadata(
    host: str, port: int, *, timeout_s: float, engine_id: str | None = None
) -> MetadataReply:
    """Ask an engine for the metadata of all its ranks; one that still starts is asked again.

    Args:
        host: Where its handshake server listens.
        port: Port of that server.
        timeout_s: How long to wait for the answer.
        engine_id: Engine that must be behind the address, if known.

    Raises:
        ConfigError: The port or the time is none.
        HandshakeTimeoutError: No answer came in time, or none but "not yet".
        HandshakeError: The answer is a refusal or cannot be read.
    """
    endpoint = endpoint_of(host, port)
    deadline_s = time.monotonic() + check_timeout(timeout_s, "timeout_s")
    answer = "no answer"
    context = zmq.Context()
    try:
        socket = _socket(context, zmq.DEALER)
        socket.connect(endpoint)
        while True:
            socket.send(encode(MetadataRequest(engine_id=engine_id)))
            if not socket.poll(max(0, int((deadline_s - time.monotonic()) * 1000))):
                raise HandshakeTimeoutError(
                    f"{answer} from {endpoint} within {timeout_s:g} s; check that the engine runs "
                    "and that this is its handshake port"
                )
            reply = decode_reply(socket.recv())
            if reply is not None:
                return reply
            answer = "nothing but 'not yet'"
            time.sleep(_ASK_AGAIN_S)
    except zmq.ZMQError as error:
        raise HandshakeError(f"cannot ask {endpoint}: {error.strerror}") from error
    finally:
        context.destroy(linger=0)


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
