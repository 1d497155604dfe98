"""The transport ``local``: one-sided copies between processes of one Linux host."""

import ctypes
import os
import secrets
import select
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvbridge.errors import (
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvbridge.transport import (
    Availability,
    Capabilities,
    Descriptors,
    Handle,
    Op,
    Peer,
    Poll,
    Region,
    RegionTable,
    Transport,
    TransportConfig,
    parse_config,
)
from kvbridge.transport.local import library
from kvbridge.transport.local.channel import Channel
from kvbridge.transport.local.config import LocalConfig
from kvbridge.transport.local.hub import Hub
from kvbridge.transport.local.translate import reason
from kvbridge.transport.local.wire import (
    NOTIFY_MAX_BYTES,
    PROTOCOL_VERSION,
    TOKEN_BYTES,
    AgentInfo,
    connect,
)
from kvbridge.transport.local.worker import Copier, Job, LocalHandle, LocalPeer

_Item = TypeVar("_Item")

CAPABILITIES = Capabilities(
    read=True,
    write=True,
    notify=True,
    notify_with_transfer=True,
    notify_max_bytes=NOTIFY_MAX_BYTES,
    memory_kinds=frozenset({"dram"}),
    peer_loss="on_use",
    owner_passive=True,
    peers_in_process=True,
    merge_helps_below=64 << 10,
    preferred_direction="either",
)


class LocalTransport(Transport):
    """Copies by the kernel's cross-memory calls; notifies over Unix sockets.

    Two threads belong to an agent: one copies, one receives notifications. The owner of the
    memory does nothing for a copy, so it may as well be stopped.
    """

    name = "local"
    config_type = LocalConfig

    def __init__(self) -> None:
        """Make an agent that is not open yet."""
        super().__init__()
        self._config = LocalConfig()
        self._lock = threading.Lock()  # add_peer runs beside all other calls
        self._peers: set[LocalPeer] = set()
        self._hub: Hub | None = None
        self._copier: Copier | None = None
        self._closed = False

    @classmethod
    def probe(cls) -> Availability:
        return library.probe()

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._hub or self._closed:
            raise TransportError("transport 'local' was opened before; make a new one")
        self._config = parse_config(LocalConfig, config, where="options of transport 'local'")
        available = library.probe()
        if not available.ok:
            raise TransportUnavailableError(
                f"transport 'local' cannot run here: {available.reason}.", available.hint
            )
        if self._config.permit_same_user:
            library.permit_same_user()
        # Peers look for these bytes at this address, so the buffer lives as long as the agent.
        self._token = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
        self._info = AgentInfo(
            version=PROTOCOL_VERSION,
            agent=uuid.uuid4().hex,
            token=self._token.raw,
            token_address=ctypes.addressof(self._token),
        )
        try:
            self._hub = Hub(self._info)
        except OSError as error:
            raise TransportUnavailableError(
                f"transport 'local' cannot listen: {reason(error)}."
            ) from error
        self._copier = Copier(self._hub, self.memory, self._config.slice_bytes)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def refused_packets(self) -> int:
        """How many connections were closed because of what came over them."""
        return self._hub.refused if self._hub else 0

    def register(self, regions: Sequence[Region]) -> None:
        self._opened()
        self.check_regions(regions)
        self.memory.add(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._opened()
        self.memory.remove(regions)

    def agent_info(self) -> bytes:
        self._opened()
        return self._info.seal(self.name)

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        hub, _ = self._opened()
        info = AgentInfo.unseal(self.name, agent_info)
        self.check_regions(regions)
        table = RegionTable(regions)
        sock, pid = connect(info, self._info.agent, timeout_s=timeout_s)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            sock.close()
            raise PeerLostError(f"peer {info.agent} is gone: {reason(error)}") from error
        life = select.poll()
        life.register(pidfd, select.POLLIN)
        life.register(sock, select.POLLIN)
        peer = LocalPeer(
            agent=info.agent,
            table=table,
            path="memory" if pid == os.getpid() else "cma",
            capabilities=CAPABILITIES,
            pid=pid,
            pidfd=pidfd,
            channel=Channel(sock, info.agent, self._config.send_timeout_s, hub.when_writable),
            life=life,
        )
        with self._lock:
            if not self._closed:
                self._peers.add(peer)
                hub.adopt(peer.channel)
                return peer
        sock.close()
        os.close(pidfd)
        raise TransportError("transport 'local' was closed while a peer was added")

    def drop_peer(self, peer: Peer) -> None:
        _, copier = self._opened()
        with self._lock:
            if isinstance(peer, LocalPeer) and peer in self._peers:
                self._peers.remove(peer)
                copier.drop(peer)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        _, copier = self._opened()
        mine = self._mine(peer)
        pinned = self.check_submit(op, mine, local, remote, notification)
        copy = library.ScatterCopy(op, mine.pid, local, remote)
        handle = LocalHandle(op, mine, copy.nbytes, pinned)
        copier.submit(Job(handle, mine, copy, bytes(notification)))
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._opened()
        mine = self._mine(peer)
        self.check_notification(mine, payload)
        mine.channel.send(bytes(payload))

    def poll(self) -> Poll:
        self.check_process()
        if not (self._hub and self._copier):
            raise TransportError("transport 'local' is not open; call open() first")
        return Poll(_drain(self._copier.finished), _drain(self._hub.notifications))

    def abandon(self, handle: Handle) -> None:
        self._opened()
        if not isinstance(handle, LocalHandle):
            raise TransportError("the handle was made by another transport")
        handle.given_up = "abandoned"

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        with self._lock:
            first, self._closed = not self._closed, True
        if not (self._hub and self._copier):
            return ()
        deadline = time.monotonic() + timeout_s
        if first:
            for peer in self._peers:
                self._copier.drop(peer)
            self._peers.clear()
        quiet = self._copier.stop(timeout_s)
        self._hub.stop(max(deadline - time.monotonic(), 0.0))
        return () if quiet else self.memory.busy

    def _opened(self) -> tuple[Hub, Copier]:
        self.check_process()
        if not (self._hub and self._copier):
            raise TransportError("transport 'local' is not open; call open() first")
        if self._closed:
            raise TransportError("transport 'local' is closed; open a new one")
        return self._hub, self._copier

    def _mine(self, peer: Peer) -> LocalPeer:
        if not isinstance(peer, LocalPeer):
            raise TransportError(f"peer {peer.agent} was made by another transport")
        if peer not in self._peers:
            raise PeerLostError(f"peer {peer.agent} was dropped, or belongs to another agent")
        peer.channel.check()
        return peer


def _drain(items: deque[_Item]) -> tuple[_Item, ...]:
    # Only this thread takes, so what is counted is there; what comes meanwhile waits.
    return tuple(items.popleft() for _ in range(len(items)))
