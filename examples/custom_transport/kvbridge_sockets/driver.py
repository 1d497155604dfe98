"""The transport ``sockets``: all that the contract asks for, but for the bytes themselves.

Those are moved by ``link``; ``line`` gives each peer a thread, so that nobody waits for another.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kvbridge.errors import PeerLostError, TransportError, TransportUnavailableError
from kvbridge.transport import (
    Availability,
    Capabilities,
    Descriptors,
    Finished,
    Handle,
    Notification,
    Op,
    Peer,
    Poll,
    Region,
    RegionTable,
    State,
    Transport,
    TransportConfig,
    open_agent_info,
    parse_config,
    seal_agent_info,
)
from kvbridge_sockets.config import SocketsConfig
from kvbridge_sockets.line import Job, Line
from kvbridge_sockets.link import CAPABILITIES, PATH, Endpoint, connect, probe

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, eq=False)
class SocketsPeer(Peer):
    """A peer, with the queue of what is to be done with it."""

    line: Line


class SocketsTransport(Transport):
    """Checks every call, keeps count of what is in use, and reports what has ended."""

    name: ClassVar[str] = "sockets"
    config_type: ClassVar[type[TransportConfig]] = SocketsConfig

    def __init__(self) -> None:
        """Make an agent that is not open yet."""
        super().__init__()
        self._endpoint: Endpoint | None = None
        self._closed = False
        self._peers: set[SocketsPeer] = set()
        self._lines: list[Line] = []  # of dropped peers too, until their last job has ended
        self._lock = threading.Lock()  # add_peer runs beside all other calls
        self._finished: deque[Finished] = deque()
        self._notifications: deque[Notification] = deque()

    @classmethod
    def probe(cls) -> Availability:
        return probe()

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._endpoint or self._closed:
            raise TransportError(f"transport {self.name!r} was opened before; make a new one")
        options = parse_config(SocketsConfig, config, where=f"options of transport {self.name!r}")
        available = probe()
        if not available.ok:
            raise TransportUnavailableError(
                f"transport {self.name!r} cannot run here: {available.reason}.", available.hint
            )
        self._endpoint = Endpoint(options, self.memory, self._notifications.append)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, regions: Sequence[Region]) -> None:
        endpoint = self._opened()
        self.check_regions(regions)
        self.memory.add(regions)
        endpoint.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        endpoint = self._opened()
        self.memory.remove(regions)
        endpoint.unregister(regions)

    def agent_info(self) -> bytes:
        return seal_agent_info(self.name, self._opened().info())

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        endpoint = self._opened()
        info = open_agent_info(self.name, agent_info)
        self.check_regions(regions)
        table = RegionTable(regions)
        link = connect(endpoint, info, timeout_s=timeout_s)
        with self._lock:
            if self._closed:
                link.close()
                raise TransportError(f"transport {self.name!r} was closed while a peer was added")
            line = Line(link, self._end)
            peer = SocketsPeer(link.agent, table, PATH, CAPABILITIES, line)
            self._peers.add(peer)
            self._lines = [*(line for line in self._lines if line.is_running()), line]
        return peer

    def drop_peer(self, peer: Peer) -> None:
        self._opened()
        if isinstance(peer, SocketsPeer) and peer in self._peers:
            with self._lock:
                self._peers.remove(peer)
            peer.line.stop("the peer was dropped")

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        self._opened()
        mine = self._mine(peer)
        pinned = self.check_submit(op, mine, local, remote, notification)
        handle = Handle(op, mine, local.total_nbytes, pinned)
        mine.line.put(Job(handle, local, remote, bytes(notification)))
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._opened()
        mine = self._mine(peer)
        self.check_notification(mine, payload)
        mine.line.put(bytes(payload))

    def poll(self) -> Poll:
        self.check_process()
        if self._endpoint is None:
            self._opened()
        return Poll(_drain(self._finished), _drain(self._notifications))

    def abandon(self, handle: Handle) -> None:
        self._opened()  # and nothing more: it runs to its end, and poll reports that

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        with self._lock:
            first, self._closed = not self._closed, True
        if self._endpoint is None:
            return ()
        deadline = time.monotonic() + timeout_s
        if first:
            for line in self._lines:
                line.stop("the transport was closed")
        for line in self._lines:
            line.join(max(deadline - time.monotonic(), 0.0))
        if first:
            self._endpoint.close()
        return self.memory.busy

    def _opened(self) -> Endpoint:
        self.check_process()
        if self._endpoint is None:
            raise TransportError(f"transport {self.name!r} is not open; call open() first")
        if self._closed:
            raise TransportError(f"transport {self.name!r} is closed; make a new one")
        return self._endpoint

    def _mine(self, peer: Peer) -> SocketsPeer:
        if not isinstance(peer, SocketsPeer):
            raise TransportError(f"peer {peer.agent} was made by another transport")
        if peer not in self._peers:
            raise PeerLostError(f"peer {peer.agent} was dropped, or belongs to another agent")
        if peer.line.over:
            raise PeerLostError(f"peer {peer.agent} is lost: {peer.line.over}; add it again")
        return peer

    def _end(self, handle: Handle, why: str) -> None:
        self.memory.unpin(handle.pinned)
        self._finished.append(Finished(handle, State.FAILED if why else State.DONE, why))


def _drain(items: deque[_Item]) -> tuple[_Item, ...]:
    # Only this thread takes, so what is counted is there; what comes meanwhile waits.
    return tuple(items.popleft() for _ in range(len(items)))
