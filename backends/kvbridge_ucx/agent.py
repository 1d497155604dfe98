"""What there is of the transport ``ucx`` while it is open."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvbridge.errors import TransportUnavailableError
from kvbridge.transport import (
    Agent,
    Capabilities,
    Descriptors,
    Events,
    Handle,
    LocalMemory,
    Region,
    RegionTable,
    seal_notification,
)
from kvbridge_ucx import library, meeting, peering
from kvbridge_ucx.config import UcxConfig
from kvbridge_ucx.connections import Route
from kvbridge_ucx.context import Context
from kvbridge_ucx.job import Job
from kvbridge_ucx.peering import NATIVE_PATHS, AgentCard, UcxPeer
from kvbridge_ucx.translate import UcxError, translate
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


class UcxAgent(Agent[UcxPeer]):
    """One context of UCX, and the thread that uses it.

    UCX cannot stop bytes that are on their way, so an abandoned operation runs to its end.

    Attributes:
        worker: The thread.
    """

    def __init__(self, options: UcxConfig, events: Events, memory: LocalMemory) -> None:
        """Load UCX and start.

        Raises:
            ConfigError: This host has no such device.
            TransportUnavailableError: UCX is missing or refuses to start.
        """
        device = options.chosen_device()
        ucp = library.load(options.library, device)
        card = AgentCard(f"ucx-{uuid.uuid4().hex}", b"", device, peering.network())
        make_context = partial(Context, ucp, library.settings(device, options.tls))
        kinds = CAPABILITIES.memory_kinds
        try:
            self.worker = Worker(make_context, card, events, memory, kinds)
        except UcxError as error:
            raise TransportUnavailableError(
                f"UCX {ucp.version[0]}.{ucp.version[1]} ({ucp.path}) cannot start on device "
                f"{device!r}: {error}.",
                "Set option 'device' to a network device that is up, and 'tls' to transports that "
                "this UCX has.",
            ) from error
        self._read_mode = options.read_mode
        self._events = events

    @property
    def crash(self) -> str:
        return self.worker.crash

    def info(self) -> bytes:
        return self.worker.memory.info

    def register(self, regions: Sequence[Region]) -> None:
        try:
            self.worker.call(partial(self.worker.memory.add, regions))
        except UcxError as error:
            raise translate(error, f"registering {len(regions)} regions") from error

    def unregister(self, regions: Sequence[Region]) -> None:
        self.worker.call(partial(self.worker.unregister, regions))

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> UcxPeer:
        worker, card = self.worker, AgentCard.decode(info)
        peering.check_reachable(worker.memory.card, card)
        rkeys = peering.chosen_keys(card, table.regions)
        route = meeting.meet(worker, card, rkeys, deadline_s)
        path = route.connection.path
        native = self._reads_natively(route)
        if path in NATIVE_PATHS:
            meeting.try_lane(worker, route, deadline_s)
        can = CAPABILITIES if path in NATIVE_PATHS and native else CAPABILITIES_OVER_TCP
        return UcxPeer(card.agent, table, path, can, route)

    def lost(self, peer: UcxPeer) -> str:
        return peer.route.connection.lost

    def submit(
        self,
        handle: Handle,
        peer: UcxPeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        served = handle.op == "read" and not self._reads_natively(peer.route)
        if notification and not served:
            notification = seal_notification(notification)
        ended = partial(self._events.ended, handle)
        self.worker.start(Job(handle.op, peer.route, local, remote, notification, ended, served))

    def notify(self, peer: UcxPeer, payload: bytes) -> None:
        worker = self.worker
        worker.tell(partial(worker.notify, peer.route, seal_notification(payload)))

    def stop(self, timeout_s: float) -> bool:
        return self.worker.stop(timeout_s)

    def _reads_natively(self, route: Route) -> bool:
        if self._read_mode == "auto":
            return route.connection.path in NATIVE_PATHS
        return self._read_mode == "native"
