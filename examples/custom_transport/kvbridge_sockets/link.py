"""Plain TCP: one side asks, the owner of the memory checks and answers.

One connection leads from each agent to each of its peers. A thread of the owner serves it.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kvbridge.errors import (
    OutOfBoundsError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvbridge.transport import (
    Availability,
    Capabilities,
    Descriptors,
    LocalMemory,
    Op,
    Path,
    Region,
)
from kvbridge_sockets.config import SocketsConfig
from kvbridge_sockets.wire import (
    DESCRIPTORS_MAX,
    NOTIFY_MAX_BYTES,
    VERSION,
    Answer,
    Hello,
    Info,
    Request,
    receive,
    receive_pieces,
    send,
    send_pieces,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0

CAPABILITIES = Capabilities(
    read=True,
    write=True,
    notify=True,
    notify_with_transfer=True,
    notify_max_bytes=NOTIFY_MAX_BYTES,
    memory_kinds=frozenset({"dram"}),
    descriptors_max=DESCRIPTORS_MAX,
    peer_loss="on_use",
    owner_checks_bounds=True,
    peers_in_process=True,
    merge_helps_below=64 << 10,
    preferred_direction="read",  # one answer less than a write
)

PATH: Path = "tcp"


def probe() -> Availability:
    """Sockets are everywhere."""
    return Availability(True)


# ---------------------------------------------------------------- the owner's side


class Endpoint:
    """Listens, and serves every peer in a thread of its own."""

    def __init__(
        self,
        config: SocketsConfig,
        memory: LocalMemory,
        heard: Callable[[str, bytes], object],
    ) -> None:
        """Start to listen.

        Raises:
            TransportUnavailableError: The address cannot be listened on.
        """
        self.agent = uuid.uuid4().hex
        self.token = secrets.token_bytes(32)
        self._memory, self._heard = memory, heard
        self._served: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        try:
            self._listener = socket.create_server((config.host, config.port), backlog=128)
        except OSError as error:
            raise TransportUnavailableError(
                f"transport 'sockets' cannot listen on {config.host}:{config.port}: {error}.",
                "Set options 'host' and 'port'.",
            ) from error
        self._thread = threading.Thread(target=self._accept, name="sockets-accept", daemon=True)
        self._thread.start()

    def info(self) -> bytes:
        """Return what a peer needs to reach this agent."""
        host, port = self._listener.getsockname()[:2]
        return msgspec.msgpack.encode(Info(VERSION, self.agent, host, port, self.token))

    def register(self, regions: Sequence[Region]) -> None:
        """Nothing to do: each request is checked against what is registered at that moment."""

    def unregister(self, regions: Sequence[Region]) -> None:
        """Nothing to do either."""

    def close(self) -> None:
        """Stop serving; when this returns, no peer touches our memory any more."""
        with self._lock:
            self._closing.set()
            served = dict(self._served)
        for sock in (self._listener, *served):
            with contextlib.suppress(OSError):  # the other side may have hung up already
                sock.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *served.values()):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("cannot accept a peer: %s", error)
                    time.sleep(0.05)  # out of descriptors, most likely
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            with self._lock:
                if self._closing.is_set():
                    sock.close()
                    return
                self._served[sock] = thread
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(HELLO_TIMEOUT_S)
            sender = self._greet(sock)
            sock.settimeout(None)
            while True:
                self._answer(sock, sender, receive(sock, Request))
        except EOFError:
            pass  # the peer has hung up
        except (OSError, TransportError, ValueError) as error:
            if not self._closing.is_set():
                log.warning("closed the connection of a peer: %s", error)
        finally:
            with self._lock:
                del self._served[sock]
            sock.close()

    def _greet(self, sock: socket.socket) -> str:
        hello = receive(sock, Hello)
        if not hmac.compare_digest(hello.token, self.token):
            raise TransportError(f"agent {hello.agent} does not know our token")
        send(sock, Hello(self.agent, self.token))
        return hello.agent

    def _answer(self, sock: socket.socket, sender: str, request: Request) -> None:
        if request.op == "notify":
            self._heard(sender, request.payload)
            return
        pieces = Descriptors(
            np.frombuffer(request.address, "<u8"), np.frombuffer(request.nbytes, "<u8")
        )
        try:
            pinned = self._memory.pin(pieces)  # refuses what is not registered, keeps what is
        except OutOfBoundsError as error:
            send(sock, Answer(str(error)))
            return
        try:
            send(sock, Answer())
            if request.op == "read":
                send_pieces(sock, pieces)
            else:
                receive_pieces(sock, pieces)
        finally:
            self._memory.unpin(pinned)
        if request.op == "write":
            send(sock, Answer())


# ---------------------------------------------------------------- the asking side


class Link:
    """A connection to one peer."""

    def __init__(self, sock: socket.socket, agent: str) -> None:
        """Take over a connection on which both sides have said hello."""
        self.agent = agent
        self._sock = sock

    def transfer(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        """Move the pieces, and wait until both sides are through with them.

        Raises:
            PeerLostError: The connection has ended, and the peer's thread with it.
            TransportError: The owner refuses.
        """
        request = Request(
            op, remote.address.astype("<u8").tobytes(), remote.nbytes.astype("<u8").tobytes()
        )
        with self._losses():
            send(self._sock, request)
            self._take_answer()
            if op == "read":
                receive_pieces(self._sock, local)
            else:
                send_pieces(self._sock, local)
                self._take_answer()

    def notify(self, payload: bytes) -> None:
        """Send a notification; what was transferred before it is complete already."""
        with self._losses():
            send(self._sock, Request("notify", payload=payload))

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _take_answer(self) -> None:
        answer = receive(self._sock, Answer)
        if answer.refused:
            raise TransportError(f"peer {self.agent} refuses: {answer.refused}")

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise PeerLostError(f"peer {self.agent} is gone: {error}") from error


def connect(endpoint: Endpoint, info: bytes, *, timeout_s: float) -> Link:
    """Reach the agent whose ``info()`` this is.

    Raises:
        TransportError: The info cannot be read.
        PeerLostError: Nobody answers in time, or somebody else does.
    """
    try:
        card = msgspec.msgpack.decode(info, type=Info)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the agent info is garbled: {error}") from error
    if card.version != VERSION:
        raise TransportError(
            f"peer {card.agent} speaks version {card.version}, this side {VERSION}; run the same "
            "version on both sides"
        )
    deadline = time.monotonic() + timeout_s
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((card.host, card.port), timeout=timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        send(sock, Hello(endpoint.agent, card.token))
        answer = receive(sock, Hello)
        sock.settimeout(None)
        # A port is given out again: whoever has it now need not be who had it before.
        if answer.agent != card.agent or not hmac.compare_digest(answer.token, card.token):
            raise TransportError(f"agent {answer.agent} answers in its place")
    except (OSError, EOFError, TransportError) as error:
        if sock is not None:
            sock.close()
        raise PeerLostError(f"peer {card.agent} cannot be reached: {error}") from error
    return Link(sock, card.agent)
