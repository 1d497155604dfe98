"""What there is of the transport ``local`` while it is open."""

import ctypes
import os
import secrets
import select
import threading
import time
import uuid

from kvbridge.errors import PeerLostError, TransportUnavailableError
from kvbridge.transport import Agent, Capabilities, Descriptors, Events, Handle, RegionTable
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
from kvbridge.transport.local.worker import Copier, Job, LocalPeer

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


class LocalAgent(Agent[LocalPeer]):
    """Two threads: one copies, one receives notifications.

    The owner of the memory does nothing for a copy, so it may as well be stopped.

    Attributes:
        card: What peers are told.
        hub: The thread that receives.
        copier: The thread that copies.
    """

    def __init__(self, config: LocalConfig, events: Events) -> None:
        """Start both threads.

        Raises:
            TransportUnavailableError: The socket cannot be made.
        """
        self._config = config
        if config.permit_same_user:
            library.permit_same_user()
        # Peers look for these bytes at this address, so the buffer lives as long as the agent.
        self._token = ctypes.create_string_buffer(secrets.token_bytes(TOKEN_BYTES), TOKEN_BYTES)
        self.card = AgentInfo(
            version=PROTOCOL_VERSION,
            agent=uuid.uuid4().hex,
            token=self._token.raw,
            token_address=ctypes.addressof(self._token),
        )
        try:
            self.hub = Hub(self.card, events)
        except OSError as error:
            raise TransportUnavailableError(
                f"transport 'local' cannot listen: {reason(error)}."
            ) from error
        self.copier = Copier(self.hub, events, config.slice_bytes)
        self._lock = threading.Lock()
        self._peers: set[LocalPeer] = set()

    def info(self) -> bytes:
        return self.card.encode()

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> LocalPeer:
        card = AgentInfo.decode(info)
        sock, pid = connect(card, self.card.agent, deadline_s)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            sock.close()
            raise PeerLostError(f"peer {card.agent} is gone: {reason(error)}") from error
        life = select.poll()
        life.register(pidfd, select.POLLIN)
        life.register(sock, select.POLLIN)
        peer = LocalPeer(
            agent=card.agent,
            table=table,
            path="memory" if pid == os.getpid() else "cma",
            capabilities=CAPABILITIES,
            pid=pid,
            pidfd=pidfd,
            channel=Channel(sock, card.agent, self._config.send_timeout_s, self.hub.when_writable),
            life=life,
        )
        with self._lock:
            self._peers.add(peer)
        self.hub.adopt(peer.channel)
        return peer

    def drop(self, peer: LocalPeer) -> None:
        with self._lock:
            mine = peer in self._peers
            self._peers.discard(peer)
        if mine:
            self.copier.drop(peer)

    def lost(self, peer: LocalPeer) -> str:
        return peer.channel.lost

    def submit(
        self,
        handle: Handle,
        peer: LocalPeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        copy = library.ScatterCopy(handle.op, peer.pid, local, remote)
        self.copier.submit(Job(handle, peer, copy, notification))

    def notify(self, peer: LocalPeer, payload: bytes) -> None:
        peer.channel.send(payload)

    def stop(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for peer in list(self._peers):
            self.drop(peer)
        ended = self.copier.stop(timeout_s)
        self.hub.stop(max(deadline - time.monotonic(), 0.0))
        return ended
