"""What there is of the transport ``nixl`` while it is open."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from kvbridge.errors import PeerLostError, TransportUnavailableError
from kvbridge.transport import (
    Agent,
    Capabilities,
    Descriptors,
    Events,
    Handle,
    LocalMemory,
    Region,
    RegionTable,
    ServedReads,
    seal_notification,
)
from kvbridge_nixl import library
from kvbridge_nixl.card import AgentCard, Landing, check_reachable, whereabouts
from kvbridge_nixl.config import NixlConfig
from kvbridge_nixl.job import MEMORY_TYPES, Job
from kvbridge_nixl.peering import NixlPeer, meet
from kvbridge_nixl.serving import NixlCarrier
from kvbridge_nixl.translate import translate, vendor_errors
from kvbridge_nixl.worker import SETTLE_S, Worker

CAPABILITIES = Capabilities(
    read=True,
    write=True,
    notify=True,
    notify_with_transfer=True,
    notify_max_bytes=64 << 10,
    memory_kinds=frozenset(MEMORY_TYPES),
    failure_is_clean=False,
    peer_loss="on_use",
    owner_passive=True,
    peers_in_process=True,
    merge_helps_below=64 << 10,
    preferred_direction="either",
)

# Over TCP the owner's own thread moves the bytes, and its native reads are slower than writes, and
# a reader that is killed can take the owner with it. "unknown" is treated as TCP.
CAPABILITIES_OVER_TCP = replace(CAPABILITIES, owner_passive=False, preferred_direction="write")


class NixlAgent(Agent[NixlPeer]):
    """One agent of NIXL, and the thread that uses it.

    NIXL cannot stop bytes that are on their way, so an abandoned operation runs to its end.

    Attributes:
        worker: The thread.
    """

    # NIXL wakes nobody when a notification comes, and the thread looks less often while it is idle.
    look_every_s = 200e-6

    def __init__(self, options: NixlConfig, events: Events, memory: LocalMemory) -> None:
        """Load NIXL and start.

        Raises:
            ConfigError: This host has no such device.
            TransportUnavailableError: NIXL is missing or refuses to start.
        """
        device = options.chosen_device()
        nixl = library.load()
        errors = vendor_errors(nixl.bindings)
        name = f"nixl-{uuid.uuid4().hex}"
        landing = Landing()
        try:
            agent = nixl.make_agent(name, device, options.num_threads)
            library.register(agent, landing.region)
        except errors as error:
            raise TransportUnavailableError(
                f"NIXL {nixl.version} cannot start UCX on device {device!r}: {error}.",
                "Set option 'device' to a network device that is up.",
            ) from error
        self._read_mode = options.read_mode
        self._events = events
        self._registered: dict[Region, object] = {}
        self._card = AgentCard(name, b"", landing.region.address, device, *whereabouts())
        self._publish(agent)
        self.worker = Worker(agent, errors, events)
        self.worker.kept.append(landing)
        carrier = NixlCarrier(self.worker, self._card, lambda: (self._sealed, memory.regions))
        kinds = CAPABILITIES.memory_kinds
        self.worker.start(ServedReads(name, carrier, memory, kinds, settle_s=SETTLE_S))

    @property
    def crash(self) -> str:
        return self.worker.crash

    def info(self) -> bytes:
        return self._info

    def register(self, regions: Sequence[Region]) -> None:
        done: dict[Region, object] = {}
        try:
            with self.worker.library() as agent:
                for region in regions:
                    kind = MEMORY_TYPES[region.memory_kind]
                    done[region] = library.register(agent, region, kind)
                self._publish(agent)
        except self.worker.errors as error:
            self._deregister(done)
            raise translate(error, f"registering {len(regions)} regions") from error
        self._registered.update(done)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._deregister({region: self._registered.pop(region) for region in regions})

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> NixlPeer:
        worker, card = self.worker, AgentCard.decode(info)
        check_reachable(self._card, card)
        try:
            with worker.library() as agent:
                connection = worker.connections.join(agent, card.agent, card.metadata)
        except worker.errors as error:  # the metadata is as NIXL made it: only the peer is left
            raise PeerLostError(
                f"{translate(error, f'adding agent {card.agent}')}; is it alive, and does device "
                f"{card.device!r} there lead here?"
            ) from error
        try:
            path = meet(worker, connection, self._card, card, deadline_s)
        except PeerLostError:
            worker.connections.leave(connection)
            raise
        alone = path in ("cma", "rdma")  # the owner's process has no part in it
        served = self._read_mode == "served" or (self._read_mode == "auto" and not alone)
        can = CAPABILITIES if alone and not served else CAPABILITIES_OVER_TCP
        return NixlPeer(card.agent, table, path, can, connection, served)

    def drop(self, peer: NixlPeer) -> None:
        self.worker.connections.leave(peer.connection)

    def lost(self, peer: NixlPeer) -> str:
        return peer.connection.lost

    def submit(
        self,
        handle: Handle,
        peer: NixlPeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        served = handle.op == "read" and peer.reads_are_served and handle.nbytes > 0
        if notification and not served:
            notification = seal_notification(notification)
        then = partial(self._events.ended, handle)
        self.worker.enqueue(
            Job(handle.op, peer.connection, local, remote, notification, served, then)
        )

    def notify(self, peer: NixlPeer, payload: bytes) -> None:
        self.worker.send(peer.connection, seal_notification(payload))

    def poll(self) -> None:
        self.worker.collect()

    def stop(self, timeout_s: float) -> bool:
        if not self.worker.stop(timeout_s):
            return False
        self.worker.let_go(self._registered.values())
        self._registered.clear()
        return True

    def _publish(self, agent: library.Agent) -> None:
        """Renew the agent info, after what is registered has changed."""
        card = msgspec.structs.replace(self._card, metadata=agent.get_agent_metadata())
        self._info, self._sealed = card.encode(), card.seal("nixl")

    def _deregister(self, registered: Mapping[Region, object]) -> None:
        try:
            with self.worker.library() as agent:
                for handle in registered.values():
                    agent.deregister_memory(handle)
                self._publish(agent)
        except self.worker.errors as error:
            raise translate(error, f"unregistering {len(registered)} regions") from error
