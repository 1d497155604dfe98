"""The transport ``ucx``: one-sided operations of UCX, without any library in between."""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from kvbridge.errors import PeerLostError, TransportError, TransportUnavailableError
from kvbridge.transport import (
    Availability,
    Capabilities,
    Descriptors,
    Finished,
    Handle,
    Op,
    Peer,
    Poll,
    Region,
    RegionTable,
    State,
    Transport,
    TransportConfig,
    parse_config,
    seal_notification,
)
from kvbridge_ucx import library, meeting, peering
from kvbridge_ucx.config import ReadMode, UcxConfig
from kvbridge_ucx.connections import Route
from kvbridge_ucx.job import Job
from kvbridge_ucx.peering import NATIVE_PATHS, AgentCard, UcxPeer
from kvbridge_ucx.translate import UcxError, translate
from kvbridge_ucx.ucp import Context
from kvbridge_ucx.worker import Worker

CAPABILITIES = Capabilities(
    read=True,
    write=True,
    notify=True,
    notify_with_transfer=True,
    notify_max_bytes=64 << 10,
    memory_kinds=frozenset({"dram"}),
    failure_is_clean=False,
    peer_loss="on_use",
    owner_passive=True,
    peers_in_process=True,
    merge_helps_below=64 << 10,
    preferred_direction="either",
)

# Over TCP the owner's own thread does its part. A served read is a write, plus a question.
CAPABILITIES_OVER_TCP = replace(CAPABILITIES, owner_passive=False, preferred_direction="write")


class UcxTransport(Transport):
    """Moves bytes with UCX: CMA within a host, TCP or RDMA between hosts."""

    name: ClassVar[str] = peering.NAME
    config_type: ClassVar[type[TransportConfig]] = UcxConfig

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._read_mode: ReadMode = "auto"
        self._worker: Worker | None = None
        self._peers: set[UcxPeer] = set()
        self._finished: deque[Finished] = deque()

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._opened:
            raise TransportError("transport 'ucx' was opened before; make a new one")
        options = parse_config(UcxConfig, config, where="options of transport 'ucx'")
        device = options.chosen_device()
        ucp = library.load(options.library, device)
        card = AgentCard(f"ucx-{uuid.uuid4().hex}", b"", device, peering.network())
        make_context = partial(Context, ucp, library.settings(device, options.tls))
        kinds = CAPABILITIES.memory_kinds
        try:
            self._worker = Worker(make_context, card, self.memory, kinds)
        except UcxError as error:
            raise TransportUnavailableError(
                f"UCX {ucp.version[0]}.{ucp.version[1]} ({ucp.path}) cannot start on device "
                f"{device!r}: {error}.",
                "Set option 'device' to a network device that is up, and 'tls' to transports that "
                "this UCX has.",
            ) from error
        self._read_mode = options.read_mode
        self._opened = True

    def register(self, regions: Sequence[Region]) -> None:
        worker = self._ready()
        self.check_regions(regions)
        self.memory.add(regions)
        try:
            worker.call(partial(worker.memory.add, tuple(regions)))
        except UcxError as error:
            self.memory.remove(regions)
            raise translate(error, f"registering {len(regions)} regions") from error

    def unregister(self, regions: Sequence[Region]) -> None:
        worker = self._ready()
        self.memory.remove(regions)
        worker.call(partial(worker.unregister, tuple(regions)))

    def agent_info(self) -> bytes:
        return self._ready().memory.agent_info

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        deadline = time.monotonic() + timeout_s
        worker = self._ready()
        self.check_regions(regions)
        card = peering.read_card(agent_info)
        table = RegionTable(regions)
        peering.check_reachable(worker.memory.card, card)
        rkeys = peering.chosen_keys(card, table.regions)
        route = meeting.meet(worker, card, rkeys, deadline)
        path = route.connection.path
        native = self._reads_natively(route)
        if path in NATIVE_PATHS:
            meeting.try_lane(worker, route, deadline)
        can = CAPABILITIES if path in NATIVE_PATHS and native else CAPABILITIES_OVER_TCP
        peer = UcxPeer(card.agent, table, path, can, route)
        self._peers.add(peer)
        return peer

    def drop_peer(self, peer: Peer) -> None:
        self._ready()
        if isinstance(peer, UcxPeer):
            self._peers.discard(peer)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        worker = self._ready()
        route = self._usable(peer)
        pinned = self.check_submit(op, peer, local, remote, notification)
        handle = Handle(op, peer, local.total_nbytes, pinned)
        served = op == "read" and not self._reads_natively(route)
        message = bytes(notification)  # a copy of what is mutable
        if message and not served:
            message = seal_notification(message)
        ended = partial(self._note_end, handle)
        worker.start(Job(op, route, local, remote, message, ended, served))
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        worker = self._ready()
        route = self._usable(peer)
        self.check_notification(peer, payload)
        worker.tell(partial(worker.notify, route, seal_notification(bytes(payload))))

    def poll(self) -> Poll:
        self.check_process()
        if self._worker is None:
            return Poll(self._report())
        worker = self._ready()
        notifications = [worker.notifications.popleft() for _ in range(len(worker.notifications))]
        return Poll(self._report(), tuple(notifications))

    def abandon(self, handle: Handle) -> None:
        self.check_process()  # and nothing more: UCX cannot stop bytes that are on their way

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(timeout_s)
        return self.memory.busy

    def _ready(self) -> Worker:
        self.check_process()
        if self._worker is None:
            is_so = "closed; make a new one" if self._opened else "not open; call open() first"
            raise TransportError(f"transport 'ucx' is {is_so}")
        if self._worker.crash:
            raise TransportError(f"transport 'ucx' is broken: {self._worker.crash}")
        return self._worker

    def _reads_natively(self, route: Route) -> bool:
        if self._read_mode == "auto":
            return route.connection.path in NATIVE_PATHS
        return self._read_mode == "native"

    def _usable(self, peer: Peer) -> Route:
        if not isinstance(peer, UcxPeer) or peer not in self._peers:
            raise PeerLostError(f"peer {peer.agent} was dropped, or belongs to another transport")
        if peer.route.lost:
            raise PeerLostError(f"peer {peer.agent} is gone: {peer.route.lost}")
        return peer.route

    def _note_end(self, handle: Handle, state: State, reason: str) -> None:
        self.memory.unpin(handle.pinned)
        self._finished.append(Finished(handle, state, reason))

    def _report(self) -> tuple[Finished, ...]:
        report = []
        while self._finished:
            done = self._finished.popleft()
            if done.state is State.DONE and done.handle.peer not in self._peers:
                done = Finished(done.handle, State.FAILED, "the peer was dropped meanwhile")
            report.append(done)
        return tuple(report)
