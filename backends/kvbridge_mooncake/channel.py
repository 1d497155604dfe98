"""Our own connection to a peer, as seen by the side that opened it."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable
from typing import cast

from kvbridge.errors import PeerLostError, TransportError
from kvbridge_mooncake.wire import (
    ARE_YOU_QUIET,
    NOTIFICATION,
    QUIET,
    AgentCard,
    decode_hello,
    encode,
    encode_hello,
    take_messages,
)

# A peer that takes no notifications may be stopped for a while; it is not asked to hold more.
BACKLOG_MAX_BYTES = 64 << 20
# A host that vanished answers nothing. Asked after 10 s of silence, given up after 25 s.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Channel(asyncio.Protocol):
    """Carries notifications and questions to a peer; its end is how we know that the peer ended.

    The callbacks of ``asyncio.Protocol`` run in the hub's thread, all else in any thread.

    Attributes:
        lost: Why it cannot be used any more; empty while it can.
        peer_ended: Whether the peer's kernel said so: then nothing there moves any more. A peer
            that only stopped answering may be alive behind a broken network.
    """

    def __init__(
        self,
        agent: str,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_change: Callable[[], None],
    ) -> None:
        """Take over a connection on which both sides have said hello."""
        self.lost = ""
        self.peer_ended = False
        self._agent = agent
        self._loop = loop
        self._on_change = on_change
        self._lock = threading.Lock()
        self._backlog: list[bytes] = []
        self._backlog_nbytes = 0
        self._received = bytearray()
        self._questions = itertools.count(1)
        self._answered: set[int] = set()
        self._transport: asyncio.Transport | None = None
        asyncio.run_coroutine_threadsafe(loop.create_connection(lambda: self, sock=sock), loop)

    def notify(self, payload: bytes) -> None:
        """Send a notification, or queue it until there is room.

        Raises:
            PeerLostError: The peer is gone.
            TransportError: Too much is queued already.
        """
        self._send(encode(NOTIFICATION, payload))

    def ask_quiet(self) -> int:
        """Ask the peer whether its ends of our closed connections are gone; see :meth:`is_quiet`.

        Raises:
            PeerLostError: The peer is gone.
            TransportError: Too much is queued already.
        """
        question = next(self._questions)
        self._send(encode(ARE_YOU_QUIET, str(question).encode()))
        return question

    def is_quiet(self, question: int) -> bool:
        """Whether the peer has answered a question."""
        return question in self._answered

    def check(self) -> None:
        """Refuse to go on with a lost peer.

        Raises:
            PeerLostError: It is lost.
        """
        if self.lost:
            raise PeerLostError(f"peer {self._agent} is lost: {self.lost}; add it again")

    @property
    def unsent_nbytes(self) -> int:
        """Bytes that the kernel has not taken yet; 0 once the connection has ended."""
        if self.lost:
            return 0
        there = self._transport.get_write_buffer_size() if self._transport else 0
        return self._backlog_nbytes + there

    def close(self) -> None:
        """End the connection, once what is queued has been sent."""
        self._call(self._close)

    def _send(self, message: bytes) -> None:
        with self._lock:
            self.check()
            if self.unsent_nbytes + len(message) > BACKLOG_MAX_BYTES:
                raise TransportError(
                    f"{self.unsent_nbytes} bytes wait for peer {self._agent}, which takes none; "
                    f"at most {BACKLOG_MAX_BYTES} may wait"
                )
            self._backlog.append(message)
            self._backlog_nbytes += len(message)
            if len(self._backlog) == 1:  # whoever made it longer has called already
                self._call(self._flush)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has ended, and all its connections with it
            self.lost = self.lost or "this transport was closed"

    def _flush(self) -> None:
        if self._transport is None:  # connection_made comes back to this
            return
        with self._lock:
            messages, self._backlog = self._backlog, []
            if messages and not self.lost:
                self._transport.write(b"".join(messages))
            self._backlog_nbytes = 0

    def _close(self) -> None:
        self._flush()
        self.lost = self.lost or "it was dropped"
        if self._transport is not None:
            self._transport.close()

    # What follows is called by the loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._flush()
        if self.lost:  # closed before it had begun
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for kind, body in take_messages(self._received):
                if kind != QUIET or not body.isdigit():
                    raise TransportError(f"an answer of kind {kind!r}")
                self._answered.add(int(body))
                self._on_change()
        except TransportError as error:
            self.lost = self.lost or f"it does not speak our language: {error}"
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        ended = error is None or isinstance(error, ConnectionError)
        if not self.lost:
            self.peer_ended = ended
            self.lost = "its process, or its agent, has ended" if ended else str(error)
        with self._lock:
            self._backlog.clear()
            self._backlog_nbytes = 0
        self._on_change()


def dial(card: AgentCard, agent: str, deadline: float) -> socket.socket:
    """Connect to an agent, and make sure that it is the one meant.

    Raises:
        PeerLostError: It has ended, does not answer in time, or is somebody else.
    """
    try:
        sock = socket.create_connection((card.address, card.control_port), timeout=_left(deadline))
    except OSError as error:
        raise _unreachable(card, error) from error
    try:
        for option in _KEEPALIVE:
            sock.setsockopt(*option)
        sock.sendall(encode_hello(agent, card.token))
        answer = _first_message(sock, card, deadline)
        sock.setblocking(False)
    except (OSError, TransportError) as error:
        sock.close()
        raise _unreachable(card, error) from error
    if answer != card.agent:
        sock.close()
        raise PeerLostError(f"peer {card.agent} answers as {answer}; fetch its agent info again")
    return sock


def _first_message(sock: socket.socket, card: AgentCard, deadline: float) -> str:
    buffer = bytearray()
    while True:
        sock.settimeout(_left(deadline))
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError("it hung up")
        buffer += data
        for kind, body in take_messages(buffer):
            return decode_hello(kind, body, card.token)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _unreachable(card: AgentCard, error: Exception) -> PeerLostError:
    return PeerLostError(
        f"peer {card.agent} cannot be reached at {card.address}:{card.control_port}: "
        f"{error!r}; is it alive, and does its option host= lead there?"
    )
