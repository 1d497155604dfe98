"""The sending end of a connection between two agents."""

import socket
import threading
from collections import deque
from collections.abc import Callable

from kvbridge.errors import PeerLostError
from kvbridge.transport.local.translate import reason
from kvbridge.transport.local.wire import NOTIFICATION

_BACKLOG_MAX_BYTES = 64 << 20


class Channel:
    """The sending end of a connection. Never blocks on a peer that is merely slow."""

    def __init__(
        self,
        sock: socket.socket,
        agent: str,
        send_timeout_s: float,
        when_writable: Callable[["Channel"], None],
    ) -> None:
        """Take over an open connection; ``when_writable`` asks for one :meth:`flush` later."""
        self.sock = sock
        self.lost = ""
        self._agent = agent
        self._send_timeout_s = send_timeout_s
        self._when_writable = when_writable
        self._backlog: deque[bytes] = deque()
        self._backlog_nbytes = 0
        self._changed = threading.Condition()

    def send(self, payload: bytes) -> None:
        """Send one notification, or queue it until there is room.

        Raises:
            PeerLostError: The peer is gone, or took nothing for too long.
        """
        with self._changed:
            self.check()
            self._backlog.append(NOTIFICATION + payload)
            self._backlog_nbytes += 1 + len(payload)
            if len(self._backlog) == 1 and not self._flush():
                self._when_writable(self)
            if self._backlog_nbytes > _BACKLOG_MAX_BYTES and not self._changed.wait_for(
                lambda: self.lost or self._backlog_nbytes <= _BACKLOG_MAX_BYTES,
                self._send_timeout_s,
            ):
                self.lost = f"it took no notification for {self._send_timeout_s} s"
            self.check()

    def check(self) -> None:
        """Refuse to go on with a lost peer.

        Raises:
            PeerLostError: It is lost.
        """
        if self.lost:
            raise PeerLostError(f"peer {self._agent} is lost: {self.lost}; add it again")

    def flush(self) -> bool:
        """Send what is queued; say whether nothing is left."""
        with self._changed:
            empty = self._flush()
            self._changed.notify_all()
            return empty

    def lose(self, why: str) -> None:
        """Note that the peer is gone."""
        with self._changed:
            self.lost = self.lost or why
            self._backlog.clear()
            self._backlog_nbytes = 0
            self._changed.notify_all()

    def _flush(self) -> bool:
        while self._backlog and not self.lost:
            try:
                # Packets are atomic: one goes out whole or not at all.
                self.sock.send(self._backlog[0])
            except BlockingIOError:
                return False
            except OSError as error:
                self.lost = reason(error)
                break
            self._backlog_nbytes -= len(self._backlog.popleft())
        return True
