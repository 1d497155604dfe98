"""Notifications between agents: packets over Unix sockets in the abstract namespace.

An abstract name vanishes with the process that holds it, so nothing is left behind even after
``kill -9``. Each connection carries notifications one way, from who opened it to who listens;
its end tells both that the other one is gone.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvbridge.errors import TransportError
from kvbridge.transport import Events
from kvbridge.transport.local.channel import Channel
from kvbridge.transport.local.wire import (
    NOTIFICATION,
    NOTIFY_MAX_BYTES,
    AgentInfo,
    decode_hello,
    encode_hello,
)

log = logging.getLogger(__name__)

_PACKETS_PER_TURN = 64  # then the others get their turn
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Hub:
    """The I/O thread of one agent: accepts, receives, and sends what was queued."""

    def __init__(self, info: AgentInfo, events: Events) -> None:
        """Listen, and start to answer.

        Raises:
            OSError: The socket cannot be made.
        """
        self.refused = 0
        self._info = info
        self._events = events
        self._buffer = bytearray(NOTIFY_MAX_BYTES + 2)
        self._senders: dict[socket.socket, str] = {}
        self._channels: set[Channel] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # guards the life of the event descriptor
        self._ended = False
        self._deadline: float | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(info.socket_name)
            self._listener.listen(1024)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, _READ, self._woken)
        self._selector.register(self._listener, _READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="kvbridge-local-io", daemon=True)
        self._thread.start()

    def adopt(self, channel: Channel) -> None:
        """Watch a channel for its end, until :meth:`release`."""
        self._call(partial(self._adopt, channel))

    def release(self, channel: Channel) -> None:
        """Close a channel."""
        self._call(partial(self._release, channel))

    def when_writable(self, channel: Channel) -> None:
        """Flush a channel when there is room again."""
        self._call(partial(self._watch_writable, channel))

    def stop(self, timeout_s: float) -> None:
        """Send what is still queued if that is possible in time, then close everything."""
        self._call(partial(self._set_deadline, time.monotonic() + timeout_s))
        self._thread.join()

    def _call(self, function: Callable[[], object]) -> None:
        # Does nothing once the thread has ended, which has closed everything by then.
        with self._lock:
            if not self._ended:
                self._calls.append(function)
                os.eventfd_write(self._wake, 1)

    # What follows runs in the thread of the hub.

    def _set_deadline(self, deadline: float) -> None:
        self._deadline = deadline

    def _run(self) -> None:
        while not self._may_end():
            for key, events in self._selector.select(None if self._deadline is None else 0.02):
                key.data(events)
        with self._lock:
            self._ended = True
        for channel in list(self._channels):
            channel.lose("this transport was closed")
            channel.sock.close()
        for sock in (*self._senders, self._listener):
            sock.close()
        self._selector.close()
        os.close(self._wake)

    def _may_end(self) -> bool:
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline or all(c.flush() for c in self._channels)

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake)
        while self._calls:
            self._calls.popleft()()

    def _adopt(self, channel: Channel) -> None:
        self._channels.add(channel)
        self._selector.register(channel.sock, _READ, partial(self._outgoing, channel))

    def _watch_writable(self, channel: Channel) -> None:
        if channel in self._channels and not channel.lost:
            self._selector.modify(channel.sock, _READ | _WRITE, partial(self._outgoing, channel))

    def _release(self, channel: Channel) -> None:
        if channel in self._channels:
            self._channels.discard(channel)
            channel.flush()
            self._unwatch(channel.sock)
            channel.lose("it was dropped")
            channel.sock.close()

    def _unwatch(self, sock: socket.socket) -> None:
        # The end of a channel may be noticed before it is released: then nothing is left to do.
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def _outgoing(self, channel: Channel, events: int) -> None:
        if channel not in self._channels:
            return  # released by an earlier event of the same round
        if events & _READ or channel.lost:
            # Nobody answers on this connection after the hello: it has ended.
            self._unwatch(channel.sock)
            channel.lose("its process, or its agent, has ended")
        elif channel.flush():
            self._selector.modify(channel.sock, _READ, partial(self._outgoing, channel))

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, most likely: waiting is better than spinning.
            log.warning("cannot accept a peer: %s", error)
            time.sleep(0.05)
            return
        sock.setblocking(False)
        self._senders[sock] = ""
        self._selector.register(sock, _READ, partial(self._receive, sock))

    def _receive(self, sock: socket.socket, events: int) -> None:
        for _ in range(_PACKETS_PER_TURN):
            try:
                size = sock.recv_into(self._buffer)
                if not size:
                    raise ConnectionResetError
                self._take(sock, bytes(memoryview(self._buffer)[:size]))
            except BlockingIOError:
                return
            except TransportError as error:
                self.refused += 1
                log.warning("closed a connection of %r: %s", self._senders[sock], error)
                self._hang_up(sock)
                return
            except OSError:
                self._hang_up(sock)
                return

    def _take(self, sock: socket.socket, packet: bytes) -> None:
        sender = self._senders[sock]
        if not sender:
            self._senders[sock] = decode_hello(packet, self._info.token)
            sock.send(encode_hello(self._info.agent, self._info.token))
        elif packet[:1] == NOTIFICATION and len(packet) <= 1 + NOTIFY_MAX_BYTES:
            self._events.heard(sender, packet[1:])
        else:
            raise TransportError(f"a packet of {len(packet)} bytes is no notification")

    def _hang_up(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._senders[sock]
        sock.close()
