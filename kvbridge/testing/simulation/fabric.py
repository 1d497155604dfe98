"""What is between the agents: reads that land in portions, notices, and all that befalls them."""

from ctypes import memmove
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbridge.handshake import Release
from kvbridge.handshake.messages import decode_note
from kvbridge.testing.simulation.memory import Arena
from kvbridge.testing.simulation.scenario import Scenario
from kvbridge.testing.simulation.world import World
from kvbridge.transport import Capabilities, Handle

if TYPE_CHECKING:
    from kvbridge.testing.simulation.transport import SimulatedAgent

AN_HOUR_S = 3600.0


@dataclass(slots=True, eq=False)
class Operation:
    """A read on its way.

    Attributes:
        number: Number of the operation.
        handle: What the reader has of it.
        reader: Who reads.
        remote: Whose memory it is.
        pieces: Source, destination and length of each piece, in the portions in which they land.
        lands: Blocks of the reader that it may still write to, as bits.
        takes: Blocks of the other engine that it reads, as bits.
        source: The cache that they are in.
        target: The cache that it writes to.
        fails_after: Portions after which it fails.
        hangs_after: Portions after which nothing happens any more.
        dropped: Whether its peer was dropped meanwhile.
        over: Whether it has ended.
    """

    number: int
    handle: Handle
    reader: "SimulatedAgent"
    remote: "SimulatedAgent"
    pieces: list[list[tuple[int, int, int]]]
    lands: int
    takes: int
    source: Arena
    target: Arena
    fails_after: int | None = None
    hangs_after: int | None = None
    dropped: bool = False
    over: bool = False


class Fabric:
    """What is between the agents.

    Attributes:
        capabilities: What every agent can do.
        agents: Every agent that there has been, by its name.
        pending: Operations that are not quiet, by number.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        """Start with nobody."""
        self.world, self.faults = world, scenario.faults
        self.slow_s = 2.5 * scenario.timeout_s
        self.capabilities = Capabilities(
            read=True,
            notify=True,
            notify_max_bytes=1 << 16,
            memory_kinds=frozenset({"dram"}),
            descriptors_max=scenario.descriptors_max,
            peer_loss="on_use",
            owner_passive=True,
            peers_in_process=True,
        )
        self.agents: dict[str, SimulatedAgent] = {}
        self.pending: dict[int, Operation] = {}

    def launch(self, op: Operation) -> None:
        """Let an operation begin."""
        world, faults = self.world, self.faults
        self.pending[op.number] = op
        duration_s = min(world.rng.expovariate(150.0), 0.1)
        if world.chance(faults.read_slow):
            duration_s = world.rng.uniform(0.0, self.slow_s)
        if world.chance(faults.read_fails):
            op.fails_after = world.rng.randint(0, len(op.pieces))
        elif world.chance(faults.read_hangs):
            op.hangs_after = world.rng.randint(0, len(op.pieces))
            if world.rng.random() < 0.95:  # so that not all blocks are gone in the end
                delay_s = world.rng.uniform(1.0, 4.0) * self.slow_s
                world.after(delay_s, lambda: op.reader.give_up(op, "the simulated wire gave up"))
        pause_s = duration_s / (len(op.pieces) + 1)
        world.after(pause_s, lambda: self._go_on(op, 0, pause_s))

    def _go_on(self, op: Operation, done: int, pause_s: float) -> None:
        if op.over or op.remote.dead or op.hangs_after == done:
            return
        if op.fails_after == done:
            op.reader.end(op, "the simulated wire failed")
        elif done == len(op.pieces):
            op.reader.end(op, "the peer was dropped" if op.dropped else "")
        elif not op.remote.has(op.pieces[done]) and not self.world.chance(self.faults.zombie):
            op.reader.end(op, "remote access error: that memory is not registered")
        else:
            for source, target, nbytes in op.pieces[done]:
                memmove(target, source, nbytes)
            self.world.after(pause_s, lambda: self._go_on(op, done + 1, pause_s))

    def send(self, sender: "SimulatedAgent", remote: "SimulatedAgent", payload: bytes) -> None:
        """Carry a notification, or not, or more than once."""
        world, faults = self.world, self.faults
        note = decode_note(payload)
        if isinstance(note, Release):
            self._tell(remote, note)
        if world.chance(faults.notice_garbled):
            payload = payload[: len(payload) // 2] + b"\xff"
        delays = [] if world.chance(faults.notice_lost) else [min(world.rng.expovariate(200), 0.1)]
        if world.chance(faults.notice_twice):
            delays.append(world.rng.uniform(0, 0.5))
        if world.chance(faults.notice_late):
            delays = [world.rng.uniform(0, 2 * self.slow_s)]
        elif world.chance(faults.notice_very_late):
            delays = [AN_HOUR_S * world.rng.random()]
        for delay_s in delays:
            world.after(delay_s, lambda: remote.hears(sender, payload))

    def _tell(self, remote: "SimulatedAgent", release: Release) -> None:
        engine = (release.engine_id, release.incarnation)
        told = remote.told.setdefault(release.request_id, {}).setdefault(engine, set())
        told.add(release.rank)
        if len(told) == release.readers:
            remote.let_go.setdefault(release.request_id, set()).add(engine)

    def end_all(self) -> None:
        """Make everything quiet that was not."""
        for op in list(self.pending.values()):
            op.reader.give_up(op, "the simulated wire gave up")


def portions(pieces: list[tuple[int, int, int]], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut pieces into portions that land one after the other, but no aligned word of 8 bytes."""
    if count == 1 or (len(pieces) == 1 and pieces[0][2] == 8):
        return [pieces]
    if len(pieces) < count:
        halves = []
        for source, target, nbytes in pieces:
            half = nbytes // 16 * 8
            halves += [(source, target, half), (source + half, target + half, nbytes - half)]
        pieces = halves
    size = -(-len(pieces) // count)
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]
