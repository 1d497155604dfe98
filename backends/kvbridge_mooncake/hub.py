"""The thread that takes what peers send, and that sends what our channels have queued."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import cast

from kvbridge.errors import TransportError
from kvbridge.transport import Events
from kvbridge_mooncake.channel import Channel, dial
from kvbridge_mooncake.sockets import winding_up
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

logger = logging.getLogger(__name__)

# Strangers may connect; they have this long to say hello.
HELLO_TIMEOUT_S = 10.0
# Asked whether all is quiet, an agent waits this long for news of closed connections that is
# still on its way, and then looks again every so often.
SETTLE_S, LOOK_S = 0.5, 0.02


class Hub:
    """Accepts the connections of peers, and is where ours are served.

    Attributes:
        heard: Is told what came.
        port: Where peers connect.
        data_ports: Ports of the engine; see :func:`winding_up`.
    """

    def __init__(self, agent: str, token: bytes, address: str, events: Events) -> None:
        """Listen, and start the thread.

        Raises:
            OSError: The address is not this host's.
        """
        self.heard = events.heard
        self.data_ports: frozenset[int] = frozenset()
        self._agent, self._token = agent, token
        self._channels: set[Channel] = set()
        self._lock = threading.Lock()  # held to change them: several threads may connect at once
        self._incoming: set[_Incoming] = set()
        self._listener = socket.create_server((address, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvbridge-mooncake-io", daemon=True)
        self._thread.start()

    def connect(self, card: AgentCard, deadline: float, on_change: Callable[[], None]) -> Channel:
        """Connect to a peer. Blocks up to the deadline.

        Args:
            card: What it published.
            deadline: When to give up.
            on_change: Called, in the hub's thread, when the peer is lost or has answered.

        Raises:
            PeerLostError: It has ended, does not answer in time, or is somebody else.
        """
        sock = dial(card, self._agent, deadline)
        channel = Channel(card.agent, self._loop, sock, on_change)
        with self._lock:
            self._channels = {other for other in self._channels if not other.lost} | {channel}
        return channel

    def stop(self, timeout_s: float) -> None:
        """Send what is queued if that is possible in time, then close everything."""
        deadline = time.monotonic() + timeout_s
        while any(c.unsent_nbytes for c in self._channels) and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(RuntimeError):  # a second stop
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # What follows runs in the thread of the hub.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Incoming(self), sock=self._listener)
        )
        self._loop.run_forever()
        server.close()
        for channel in self._channels:
            channel.close()
        for incoming in list(self._incoming):
            incoming.hang_up()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # Two rounds: what was closed or cancelled just now is told so, and lets go.
        for _ in range(2):
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def welcome(self, kind: bytes, body: bytes) -> tuple[str, bytes]:
        """Take a hello: return who says it, and our answer.

        Raises:
            TransportError: It is none, or not meant for this agent.
        """
        return decode_hello(kind, body, self._token), encode_hello(self._agent, self._token)

    def joined(self, incoming: "_Incoming") -> None:
        """Note a connection."""
        self._incoming.add(incoming)

    def left(self, incoming: "_Incoming") -> None:
        """Forget a connection."""
        self._incoming.discard(incoming)


class _Incoming(asyncio.Protocol):
    """A connection that somebody else opened."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._sender = ""
        self._received = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._hub.joined(self)
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(HELLO_TIMEOUT_S, self._refuse, "no hello in time")

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for kind, body in take_messages(self._received):
                self._take(kind, body)
        except TransportError as error:
            self._refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.cancel()
        self._hub.left(self)

    def hang_up(self) -> None:
        """End it."""
        self._transport.abort()

    def _take(self, kind: bytes, body: bytes) -> None:
        if not self._sender:
            self._sender, answer = self._hub.welcome(kind, body)
            self._patience.cancel()
            self._transport.write(answer)
        elif kind == NOTIFICATION:
            self._hub.heard(self._sender, body)
        elif kind == ARE_YOU_QUIET:
            task = asyncio.get_running_loop().create_task(self._answer_when_quiet(body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise TransportError(f"a message of kind {kind!r} has no place here")

    async def _answer_when_quiet(self, question: bytes) -> None:
        await asyncio.sleep(SETTLE_S)
        while winding_up(self._hub.data_ports):
            await asyncio.sleep(LOOK_S)
        self._transport.write(encode(QUIET, question))

    def _refuse(self, why: str) -> None:
        logger.warning("closed a connection of %r: %s", self._sender or "a stranger", why)
        self._transport.abort()
