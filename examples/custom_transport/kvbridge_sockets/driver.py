"""The transport ``sockets``: what ``link`` and ``line`` do, as KVBridge asks for it.

``link`` moves the bytes; ``line`` gives each peer a thread, so that nobody waits for another.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvbridge.transport import (
    Agent,
    Availability,
    Capabilities,
    Descriptors,
    Driver,
    Events,
    Handle,
    LocalMemory,
    Peer,
    Region,
    RegionTable,
    TransportConfig,
)
from kvbridge_sockets.config import SocketsConfig
from kvbridge_sockets.line import Job, Line
from kvbridge_sockets.link import CAPABILITIES, PATH, Endpoint, connect, probe


@dataclass(frozen=True, slots=True, eq=False)
class SocketsPeer(Peer):
    """A peer, with the queue of what is to be done with it."""

    line: Line


class SocketsAgent(Agent[SocketsPeer]):
    """The endpoint that peers see, and the lines to them."""

    def __init__(self, options: SocketsConfig, events: Events, memory: LocalMemory) -> None:
        """Start to answer."""
        self._endpoint = Endpoint(options, memory, events.heard)
        self._events = events
        self._lines: list[Line] = []  # of dropped peers too, until their last job has ended
        self._lock = threading.Lock()

    def info(self) -> bytes:
        return self._endpoint.info()

    def register(self, regions: Sequence[Region]) -> None:
        self._endpoint.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._endpoint.unregister(regions)

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> SocketsPeer:
        link = connect(self._endpoint, info, timeout_s=deadline_s - time.monotonic())
        line = Line(link, self._events.ended)
        with self._lock:
            self._lines = [*(line for line in self._lines if line.is_running()), line]
        return SocketsPeer(link.agent, table, PATH, CAPABILITIES, line)

    def drop(self, peer: SocketsPeer) -> None:
        peer.line.stop("the peer was dropped")

    def lost(self, peer: SocketsPeer) -> str:
        return peer.line.over

    def submit(
        self,
        handle: Handle,
        peer: SocketsPeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        peer.line.put(Job(handle, local, remote, notification))

    def notify(self, peer: SocketsPeer, payload: bytes) -> None:
        peer.line.put(payload)

    def stop(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        for line in self._lines:
            line.stop("the transport was closed")
        for line in self._lines:
            line.join(max(deadline_s - time.monotonic(), 0.0))
        self._endpoint.close()
        return not any(line.is_running() for line in self._lines)


class SocketsTransport(Driver[SocketsConfig, SocketsAgent]):
    """What users open; KVBridge checks every call, and keeps count of what is in use."""

    name: ClassVar[str] = "sockets"
    config_type: ClassVar[type[TransportConfig]] = SocketsConfig

    @classmethod
    def probe(cls) -> Availability:
        return probe()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def start(self, options: SocketsConfig, events: Events) -> SocketsAgent:
        self.check_available()
        return SocketsAgent(options, events, self.memory)
