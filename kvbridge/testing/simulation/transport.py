"""A transport that lives in virtual time: real bytes, copied when and as far as chance says."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvbridge.errors import HandshakeError, PeerLostError, TransportError
from kvbridge.handshake.messages import decode_note
from kvbridge.model import Rank, Region
from kvbridge.testing.simulation.fabric import Fabric, portions
from kvbridge.testing.simulation.memory import Arena
from kvbridge.testing.simulation.operations import Ask, Operation
from kvbridge.transport import (
    Agent,
    Availability,
    Capabilities,
    Descriptors,
    Driver,
    Events,
    Handle,
    Peer,
    RegionTable,
    State,
    TransportConfig,
)

Start = tuple[str, str]
"""Id and incarnation of an engine."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPeer(Peer):
    """A peer with the agent that it is."""

    remote: "SimulatedAgent" = field(repr=False)


class SimulatedAgent(Agent[SimulatedPeer]):
    """One rank's end of a transport.

    Attributes:
        name: Fresh at each start.
        engine: Whose it is.
        seat: Which rank's.
        where: Both, in words.
        dead: Whether its process has ended.
        known_dead_s: When others know that.
        arena: The cache that its engine has registered last.
        told: For each request, when which ranks of which engines have said that they are done
            with it.
        let_go: For each request, the engines of which all ranks have.
        own: Operations of its own that are not quiet.
        landing: Those that may write here, whoever's they are.
        taking: Those that may read here.
        asks: What it wants written, by number, until it has heard the answer.
        answered: Numbers of what it has heard the answer to.
    """

    arena: Arena

    def __init__(self, fabric: Fabric, engine: Start, seat: Rank, events: Events) -> None:
        """Start."""
        self.fabric, self.engine, self.seat, self._events = fabric, engine, seat, events
        self.where = f"{engine[0]}/{seat[0]}.{seat[1]}"
        self.name = f"{self.where}/{fabric.world.number()}"
        self.dead = False
        self._regions: list[Region] = []
        self.known_dead_s = 0.0
        self.told: dict[str, dict[Start, dict[Rank, float]]] = {}
        self.let_go: dict[str, set[Start]] = {}
        self.own: dict[int, Operation] = {}
        self.landing: dict[int, Operation] = {}
        self.taking: dict[int, Operation] = {}
        self.asks: dict[int, Ask] = {}
        self.answered: set[int] = set()
        fabric.agents[self.name] = self

    def begin(self, transfer_id: str) -> None:
        """Take note that blocks are held: what was said of others of that name is of no use."""
        self.told.pop(transfer_id, None)
        self.let_go.pop(transfer_id, None)

    def info(self) -> bytes:
        """Return its name."""
        return self.name.encode()

    def register(self, regions: Sequence[Region]) -> None:
        """Let peers read some memory."""
        self._regions.extend(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Let them no longer."""
        for region in regions:
            self._regions.remove(region)

    def has(self, address: int) -> bool:
        """Whether an address is in memory that is registered."""
        return any(region.address <= address < region.end for region in self._regions)

    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> SimulatedPeer:
        """Reach a peer, which takes a while."""
        world, faults = self.fabric.world, self.fabric.faults
        takes_s = world.rng.uniform(0.0, 0.02)
        if world.chance(faults.join_slow):
            takes_s = world.rng.uniform(0.0, 0.5)
        world.block(takes_s)
        remote = self.fabric.agents[info.decode()]
        if remote.dead or world.chance(faults.join_fails):
            raise PeerLostError(f"agent {remote.name} does not answer")
        return SimulatedPeer(remote.name, table, "memory", self.fabric.capabilities, remote)

    def drop(self, peer: SimulatedPeer) -> None:
        """Let go of a peer; what it is doing ends as failed, but not before it is quiet."""
        for op in self.own.values():
            op.dropped |= op.handle.peer is peer

    def lost(self, peer: SimulatedPeer) -> str:
        """Return whether a peer is known to be dead."""
        known = peer.remote.dead and self.fabric.world.now_s >= peer.remote.known_dead_s
        return "its process has ended" if known else ""

    def submit(
        self,
        handle: Handle,
        peer: SimulatedPeer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        """Start a read or a write."""
        world = self.fabric.world
        if world.chance(self.fabric.faults.move_refused):
            raise PeerLostError(f"the connection with {peer.agent} is broken")
        reads = handle.op == "read"
        target, source = (
            (self.arena, peer.remote.arena) if reads else (peer.remote.arena, self.arena)
        )
        from_, to = (remote, local) if reads else (local, remote)
        pieces = list(
            zip(from_.address.tolist(), to.address.tolist(), local.nbytes.tolist(), strict=True)
        )
        if not pieces:
            self._events.ended(handle, State.DONE)
            return
        op = Operation(
            number=world.number(),
            handle=handle,
            owner=self,
            remote=peer.remote,
            pieces=portions(pieces, 1 + (world.rng.random() < 0.5) + (world.rng.random() < 0.2)),
            lands=target.blocks_of((a, n) for _, a, n in pieces),
            takes=source.blocks_of((a, n) for a, _, n in pieces),
            source=source,
            target=target,
        )
        self.own[op.number] = op.reader.landing[op.number] = op.giver.taking[op.number] = op
        self.fabric.launch(op)

    def end(self, op: Operation, error: str) -> None:
        """Tell that an operation is quiet."""
        op.over = True
        self.forget(op)
        self._events.ended(op.handle, State.FAILED if error else State.DONE, error)

    def forget(self, op: Operation) -> None:
        """Take note that an operation is quiet, without telling anybody."""
        del self.own[op.number], op.reader.landing[op.number], op.giver.taking[op.number]
        del self.fabric.pending[op.number]

    def give_up(self, op: Operation, error: str) -> None:
        """End an operation, unless it has ended."""
        if not op.over:
            self.end(op, error)

    def notify(self, peer: SimulatedPeer, payload: bytes) -> None:
        """Send a notification."""
        if self.fabric.world.chance(self.fabric.faults.notice_refused):
            self.fabric.ledger.tries(self, peer.remote, decode_note(payload))
            raise TransportError(f"the connection with {peer.agent} is broken")
        self.fabric.send(self, peer.remote, payload)

    def hears(self, sender: "SimulatedAgent", payload: bytes) -> None:
        """Take a notification."""
        if self.dead:
            return
        with suppress(HandshakeError):  # it is garbled
            self.fabric.ledger.hears(self, sender, decode_note(payload))
        self._events.heard(sender.name, payload)

    def die(self) -> None:
        """End without a word: bytes stop, and those who deal with it learn of it later."""
        world = self.fabric.world
        self.dead = True
        self.known_dead_s = world.now_s + world.rng.choice((0.01, 0.1, 1.0)) * world.rng.random()
        for op in list(self.own.values()):
            op.over = True
            if op.is_read:
                self.forget(op)
            else:
                self.fabric.outlive(op)
        for op in [*self.landing.values(), *self.taking.values()]:
            if op.owner is not self:
                gives_up = partial(op.owner.give_up, op, "the peer has died")
                world.after(self.known_dead_s - world.now_s, gives_up)

    def stop(self, timeout_s: float) -> bool:
        """End in order: what was in flight is quiet."""
        for op in list(self.own.values()):
            if not op.over:
                self.end(op, "the transport was closed")
        if not self.dead:
            self.die()
        return True


class SimulatedTransport(Driver[TransportConfig, SimulatedAgent]):
    """Reads and writes of simulated memory."""

    name = "simulated"

    def __init__(self, fabric: Fabric, engine: Start, seat: Rank) -> None:
        """Make one that is not open yet."""
        super().__init__()
        self._fabric, self._engine, self._seat = fabric, engine, seat
        self.agent: SimulatedAgent

    @classmethod
    def probe(cls) -> Availability:
        """Say that it can run anywhere."""
        return Availability(ok=True)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return self._fabric.capabilities

    def start(self, options: TransportConfig, events: Events) -> SimulatedAgent:
        """Make the agent."""
        self.agent = SimulatedAgent(self._fabric, self._engine, self._seat, events)
        return self.agent
