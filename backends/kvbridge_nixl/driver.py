"""The transport ``nixl``: NIXL agents with the UCX backend."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from kvbridge.errors import (
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
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
    ServedReads,
    State,
    Transport,
    TransportConfig,
    open_agent_info,
    parse_config,
    seal_agent_info,
    seal_notification,
)
from kvbridge_nixl import library
from kvbridge_nixl.card import AgentCard, Landing, check_reachable, read_card, whereabouts
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


class NixlTransport(Transport):
    """Moves bytes with NIXL: CMA within a host, TCP or RDMA between hosts."""

    name: ClassVar[str] = "nixl"
    config_type: ClassVar[type[TransportConfig]] = NixlConfig

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._worker: Worker | None = None
        self._config = NixlConfig()
        self._card = AgentCard("", b"", 0, "", "", "")
        self._info = b""  # the card, sealed
        self._registered: dict[Region, object] = {}
        self._peers: set[NixlPeer] = set()
        self._rest: tuple[Finished, ...] = ()  # what ended while the transport was closed

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._opened:
            raise TransportError("transport 'nixl' was opened before; make a new one")
        options = parse_config(NixlConfig, config, where="options of transport 'nixl'")
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
        self._opened, self._config = True, options
        self._card = AgentCard(name, b"", landing.region.address, device, *whereabouts())
        self._publish(agent)
        worker = Worker(agent, errors)
        worker.kept.append(landing)
        carrier = NixlCarrier(worker, self._card, lambda: (self._info, self.memory.regions))
        kinds = frozenset(MEMORY_TYPES)
        worker.start(ServedReads(name, carrier, self.memory, kinds, settle_s=SETTLE_S))
        self._worker = worker

    def register(self, regions: Sequence[Region]) -> None:
        worker = self._ready()
        self.check_regions(regions)
        self.memory.add(regions)
        done: dict[Region, object] = {}
        try:
            with worker.library() as agent:
                for region in regions:
                    kind = MEMORY_TYPES[region.memory_kind]
                    done[region] = library.register(agent, region, kind)
                self._publish(agent)
        except worker.errors as error:
            self.memory.remove(regions)
            self._deregister(worker, done)
            raise translate(error, f"registering {len(regions)} regions") from error
        self._registered.update(done)

    def unregister(self, regions: Sequence[Region]) -> None:
        worker = self._ready()
        self.memory.remove(regions)
        self._deregister(worker, {r: self._registered.pop(r) for r in dict.fromkeys(regions)})

    def agent_info(self) -> bytes:
        self._ready()
        return self._info

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        deadline = time.monotonic() + timeout_s
        worker = self._ready()
        card = read_card(open_agent_info(self.name, agent_info))
        table = RegionTable(regions)
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
            path = meet(worker, connection, self._card, card, deadline)
        except PeerLostError:
            worker.connections.leave(connection)
            raise
        alone = path in ("cma", "rdma")  # the owner's process has no part in it
        mode = self._config.read_mode
        served = mode == "served" or (mode == "auto" and not alone)
        can = CAPABILITIES if alone and not served else CAPABILITIES_OVER_TCP
        peer = NixlPeer(card.agent, table, path, can, connection, served)
        self._peers.add(peer)
        return peer

    def drop_peer(self, peer: Peer) -> None:
        worker = self._ready()
        if isinstance(peer, NixlPeer) and peer in self._peers:
            self._peers.discard(peer)
            worker.connections.leave(peer.connection)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        worker = self._ready()
        mine = self._usable(peer)
        pinned = self.check_submit(op, peer, local, remote, notification)
        handle = Handle(op, peer, local.total_nbytes, pinned)
        served = op == "read" and mine.reads_are_served and handle.nbytes > 0
        message = bytes(notification)  # what is mutable is copied
        if message and not served:
            message = seal_notification(message)
        worker.enqueue(Job(op, mine.connection, local, remote, message, served, handle))
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        worker = self._ready()
        connection = self._usable(peer).connection
        self.check_notification(peer, payload)
        worker.send(connection, seal_notification(bytes(payload)))

    def poll(self) -> Poll:
        self.check_process()
        rest, self._rest = self._rest, ()
        if self._worker is None:
            return Poll(rest)
        jobs, notifications = self._ready().take()
        return Poll(self._report(jobs), notifications)

    def abandon(self, handle: Handle) -> None:
        self.check_process()  # and nothing more: NIXL cannot stop bytes that are on their way

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        worker, self._worker = self._worker, None
        if worker is not None:
            ended = worker.stop(timeout_s)
            self._rest = self._report(worker.take()[0])
            if ended:
                worker.let_go(self._registered.values())
                self._registered.clear()
            self._peers.clear()
        return self.memory.busy

    def _ready(self) -> Worker:
        self.check_process()
        if self._worker is None:
            is_so = "closed; make a new one" if self._opened else "not open; call open() first"
            raise TransportError(f"transport 'nixl' is {is_so}")
        if self._worker.crash:
            raise TransportError(f"transport 'nixl' is broken: {self._worker.crash}")
        return self._worker

    def _publish(self, agent: library.Agent) -> None:
        """Renew the agent info, after what is registered has changed."""
        card = msgspec.structs.replace(self._card, metadata=agent.get_agent_metadata())
        self._info = seal_agent_info(self.name, msgspec.msgpack.encode(card))

    def _usable(self, peer: Peer) -> NixlPeer:
        if not isinstance(peer, NixlPeer) or peer not in self._peers:
            raise PeerLostError(f"peer {peer.agent} was dropped, or belongs to another transport")
        if peer.connection.lost:
            raise PeerLostError(f"peer {peer.agent} is gone: {peer.connection.lost}")
        return peer

    def _report(self, jobs: Sequence[Job]) -> tuple[Finished, ...]:
        report = []
        for job in jobs:
            if job.handle is None:
                continue
            self.memory.unpin(job.handle.pinned)
            done = Finished(job.handle, job.state, job.reason)
            if done.state is State.DONE and job.handle.peer not in self._peers:
                done = Finished(job.handle, State.FAILED, "the peer was dropped meanwhile")
            report.append(done)
        return tuple(report)

    def _deregister(self, worker: Worker, registered: Mapping[Region, object]) -> None:
        try:
            with worker.library() as agent:
                for handle in registered.values():
                    agent.deregister_memory(handle)
                self._publish(agent)
        except worker.errors as error:
            raise translate(error, f"unregistering {len(registered)} regions") from error
