"""The transport ``mooncake``: Mooncake's transfer engine over TCP.

Mooncake copies; what it lacks is done by a connection of our own from each agent to each of its
peers. That tells who answers, with a deadline, before Mooncake's first call, which has none. It
carries the notifications: Mooncake's own are text, say nothing when they are lost, and are lost
from 1 MiB on; ours are sent once Mooncake has acknowledged the last byte, so they are ordered
after it. Its end tells at once that a peer has ended. And it asks a peer that lives whether a
failed operation is quiet there, which Mooncake does not know.

Closing takes up to a second, in which no other thread of the process runs Python: Mooncake ends
its threads while it holds the interpreter.
"""

import secrets
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
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
)
from kvbridge_mooncake import library
from kvbridge_mooncake.config import MooncakeConfig
from kvbridge_mooncake.hub import Hub
from kvbridge_mooncake.job import Connection, Job, make_job
from kvbridge_mooncake.peering import (
    BEACON_BYTES,
    Beacon,
    EngineNames,
    MooncakePeer,
    check_not_self,
    meet,
)
from kvbridge_mooncake.sockets import listening_ports
from kvbridge_mooncake.translate import translate
from kvbridge_mooncake.wire import NOTIFY_MAX_BYTES, PROTOCOL_VERSION, TOKEN_BYTES, AgentCard
from kvbridge_mooncake.worker import Worker

CAPABILITIES = Capabilities(
    read=True,
    write=True,
    notify=True,
    notify_with_transfer=True,
    notify_max_bytes=NOTIFY_MAX_BYTES,
    memory_kinds=frozenset({"dram"}),
    failure_is_clean=False,
    peer_loss="event",
    owner_passive=False,
    owner_checks_bounds=True,
    peers_in_process=True,
    merge_helps_below=64 << 10,
    preferred_direction="either",
)

_opening = threading.Lock()


class MooncakeTransport(Transport):
    """Moves bytes with Mooncake over TCP; notifies over connections of its own."""

    name: ClassVar[str] = "mooncake"
    config_type: ClassVar[type[TransportConfig]] = MooncakeConfig

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self._beacon = Beacon()
        self._names = EngineNames()
        self._peers: set[MooncakePeer] = set()
        self._rest: tuple[Finished, ...] = ()  # what ended while the transport was closed
        self._parts: tuple[library.Engine, Worker, Hub, AgentCard] | None = None

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._opened:
            raise TransportError("transport 'mooncake' was opened before; make a new one")
        options = parse_config(MooncakeConfig, config, where="options of transport 'mooncake'")
        address = options.address()
        mooncake = library.load()
        agent, token = f"mooncake-{uuid.uuid4().hex}", secrets.token_bytes(TOKEN_BYTES)
        try:
            hub = Hub(agent, token, address)
        except OSError as error:
            raise TransportUnavailableError(
                f"transport 'mooncake' cannot listen on {address}: {error}.",
                "Set option 'host' to an address of this host.",
            ) from error
        self._beacon = Beacon(agent)
        with _opening:  # the ports that are new must be those of this engine
            before = listening_ports()
            engine = mooncake.make_engine(address)
            hub.data_ports = listening_ports() - before
        if engine is None or engine.register_memory(self._beacon.address, BEACON_BYTES):
            hub.stop(0)
            raise TransportUnavailableError(
                f"Mooncake {mooncake.version} does not start on {address}.",
                "Set the environment variable MC_LOG_LEVEL=INFO to be told why.",
            )
        card = AgentCard(
            PROTOCOL_VERSION,
            agent,
            token,
            address,
            hub.port,
            engine.get_rpc_port(),
            self._beacon.address,
        )
        worker = Worker(engine, mooncake.lanes)
        worker.kept.append(self._beacon)
        self._opened = True
        self._parts = engine, worker, hub, card

    def register(self, regions: Sequence[Region]) -> None:
        engine, *_ = self._ready()
        self.check_regions(regions)
        self.memory.add(regions)
        done: list[Region] = []
        for region in regions:
            code = engine.register_memory(region.address, region.nbytes)
            if code:
                self.memory.remove(regions)
                self._unregister(engine, done)
                raise translate(code, f"registering {region.address:#x}+{region.nbytes}")
            done.append(region)

    def unregister(self, regions: Sequence[Region]) -> None:
        engine, *_ = self._ready()
        self.memory.remove(regions)
        self._unregister(engine, dict.fromkeys(regions))

    def agent_info(self) -> bytes:
        _, _, _, card = self._ready()
        return card.seal(self.name)

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        deadline = time.monotonic() + timeout_s
        engine, worker, hub, ours = self._ready()
        card = AgentCard.unseal(self.name, agent_info)
        table = RegionTable(regions)
        check_not_self(ours.agent, card)
        connection = meet(hub, worker, engine, self._names.name(card), card, deadline)
        peer = MooncakePeer(card.agent, table, "tcp", CAPABILITIES, connection)
        self._peers.add(peer)
        return peer

    def drop_peer(self, peer: Peer) -> None:
        _, worker, *_ = self._ready()
        if isinstance(peer, MooncakePeer) and peer in self._peers:
            self._peers.discard(peer)
            worker.drop(peer.connection)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        _, worker, *_ = self._ready()
        connection = self._usable(peer)
        pinned = self.check_submit(op, peer, local, remote, notification)
        handle = Handle(op, peer, local.total_nbytes, pinned)
        worker.enqueue(make_job(op, connection, local, remote, bytes(notification), handle))
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._ready()
        connection = self._usable(peer)
        self.check_notification(peer, payload)
        connection.channel.notify(bytes(payload))

    def poll(self) -> Poll:
        self.check_process()
        rest, self._rest = self._rest, ()
        if self._parts is None:
            return Poll(rest)
        _, worker, hub, _ = self._ready()
        # Only this thread takes, so what is counted is there; what comes meanwhile waits.
        came = tuple(hub.notifications.popleft() for _ in range(len(hub.notifications)))
        return Poll(self._report(worker.take()), came)

    def abandon(self, handle: Handle) -> None:
        self.check_process()  # and nothing more: Mooncake cannot stop bytes that are on their way

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        parts, self._parts = self._parts, None
        if parts is None:
            return self.memory.busy
        deadline = time.monotonic() + timeout_s
        engine, worker, hub, _ = parts
        left = worker.stop(timeout_s)
        self._rest = self._report(worker.take())
        if left is not None:
            # The engine ends with the last reference, and with it all that it does here. Peers
            # must not see our connections end before that: to them it means that all is quiet.
            alive = weakref.ref(engine)
            worker.let_go()
            del engine, parts
            if alive() is None:
                self._rest += self._give_up(left)
        hub.stop(max(deadline - time.monotonic(), 0))
        self._peers.clear()
        return self.memory.busy

    def _ready(self) -> tuple[library.Engine, Worker, Hub, AgentCard]:
        self.check_process()
        if self._parts is None:
            is_so = "closed; make a new one" if self._opened else "not open; call open() first"
            raise TransportError(f"transport 'mooncake' is {is_so}")
        if self._parts[1].crash:
            raise TransportError(f"transport 'mooncake' is broken: {self._parts[1].crash}")
        return self._parts

    def _usable(self, peer: Peer) -> Connection:
        if not isinstance(peer, MooncakePeer) or peer not in self._peers:
            raise PeerLostError(f"peer {peer.agent} was dropped, or belongs to another transport")
        peer.connection.channel.check()
        return peer.connection

    def _report(self, jobs: Iterable[Job]) -> tuple[Finished, ...]:
        report = []
        for job in jobs:
            if job.handle is not None:
                self.memory.unpin(job.handle.pinned)
                report.append(Finished(job.handle, job.state, job.failure))
        return tuple(report)

    def _give_up(self, jobs: Iterable[Job]) -> tuple[Finished, ...]:
        """Free the local memory of what the engine has left, and report what never began."""
        report = []
        for job in jobs:
            if job.handle is not None:
                self.memory.unpin(job.handle.pinned)
                if not job.posted:
                    reason = "the transport was closed before it began"
                    report.append(Finished(job.handle, State.FAILED, reason))
        return tuple(report)

    def _unregister(self, engine: library.Engine, regions: Iterable[Region]) -> None:
        for region in regions:
            code = engine.unregister_memory(region.address)
            if code:
                raise translate(code, f"unregistering {region.address:#x}+{region.nbytes}")
