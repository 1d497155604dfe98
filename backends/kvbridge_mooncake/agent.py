"""What there is of the transport ``mooncake`` while it is open.

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
from collections.abc import Iterable, Sequence

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
    State,
)
from kvbridge_mooncake import library
from kvbridge_mooncake.config import MooncakeConfig
from kvbridge_mooncake.hub import Hub
from kvbridge_mooncake.job import Job, make_job
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


class MooncakeAgent(Agent[MooncakePeer]):
    """One engine of Mooncake, the thread that uses it, and the one for our connections.

    Mooncake cannot stop bytes that are on their way, so an abandoned operation runs to its end.

    Attributes:
        engine: Mooncake's; it ends with the last reference to it.
        worker: The thread that copies.
        hub: The thread of our connections.
        card: What peers are told.
        names: What Mooncake calls the engines of peers.
    """

    def __init__(self, options: MooncakeConfig, events: Events, memory: LocalMemory) -> None:
        """Load Mooncake and start.

        Raises:
            ConfigError: ``host`` is no address, or the open data port was not allowed.
            TransportUnavailableError: Mooncake is missing, or cannot use the address.
        """
        address = options.address()
        mooncake = library.load()
        agent, token = f"mooncake-{uuid.uuid4().hex}", secrets.token_bytes(TOKEN_BYTES)
        self._memory, self._events = memory, events
        self.names = EngineNames()
        try:
            self.hub = Hub(agent, token, address, events)
        except OSError as error:
            raise TransportUnavailableError(
                f"transport 'mooncake' cannot listen on {address}: {error}.",
                "Set option 'host' to an address of this host.",
            ) from error
        beacon = Beacon(agent)
        with _opening:  # the ports that are new must be those of this engine
            before = listening_ports()
            engine = mooncake.make_engine(address)
            self.hub.data_ports = listening_ports() - before
        if engine is None or engine.register_memory(beacon.address, BEACON_BYTES):
            self.hub.stop(0)
            raise TransportUnavailableError(
                f"Mooncake {mooncake.version} does not start on {address}.",
                "Set the environment variable MC_LOG_LEVEL=INFO to be told why.",
            )
        self.engine = engine
        self.card = AgentCard(
            PROTOCOL_VERSION,
            agent,
            token,
            address,
            self.hub.port,
            engine.get_rpc_port(),
            beacon.address,
        )
        self.worker = Worker(engine, mooncake.lanes, events)
        self.worker.kept.append(beacon)

    @property
    def crash(self) -> str:
        return self.worker.crash

    def info(self) -> bytes:
        return self.card.encode()

    def register(self, regions: Sequence[Region]) -> None:
        done: list[Region] = []
        for region in regions:
            code = self.engine.register_memory(region.address, region.nbytes)
            if code:
                self.unregister(done)
                raise translate(code, f"registering {region.address:#x}+{region.nbytes}")
            done.append(region)

    def unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            code = self.engine.unregister_memory(region.address)
            if code:
                raise translate(code, f"unregistering {region.address:#x}+{region.nbytes}")

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> MooncakePeer:
        card = AgentCard.decode(info)
        check_not_self(self.card.agent, card)
        name = self.names.name(card)
        connection = meet(self.hub, self.worker, self.engine, name, card, deadline_s)
        return MooncakePeer(card.agent, table, "tcp", CAPABILITIES, connection)

    def drop(self, peer: MooncakePeer) -> None:
        self.worker.drop(peer.connection)

    def lost(self, peer: MooncakePeer) -> str:
        return peer.connection.channel.lost

    def submit(
        self,
        handle: Handle,
        peer: MooncakePeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        job = make_job(handle.op, peer.connection, local, remote, notification, handle)
        self.worker.enqueue(job)

    def notify(self, peer: MooncakePeer, payload: bytes) -> None:
        peer.connection.channel.notify(payload)

    def stop(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        left = self.worker.stop(timeout_s)
        if left is not None:
            # The engine ends with the last reference, and with it all that it does here. Peers
            # must not see our connections end before that: to them it means that all is quiet.
            alive = weakref.ref(self.engine)
            self.worker.let_go()
            del self.engine
            if alive() is None:
                self._give_up(left)
        self.hub.stop(max(deadline - time.monotonic(), 0))
        return left is not None

    def _give_up(self, jobs: Iterable[Job]) -> None:
        """Free the local memory of what the engine has left, and report what never began."""
        for job in jobs:
            if job.handle is not None and job.posted:
                self._memory.unpin(job.handle.pinned)
            elif job.handle is not None:
                reason = "the transport was closed before it began"
                self._events.ended(job.handle, State.FAILED, reason)
