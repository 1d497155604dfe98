"""What is between the agents: bytes that land in portions, notices, and all that befalls them."""

from collections.abc import Callable
from ctypes import memmove, string_at
from functools import partial
from typing import TYPE_CHECKING

from kvbridge.handshake.messages import decode_note
from kvbridge.testing.simulation.ledger import Ledger
from kvbridge.testing.simulation.operations import Operation
from kvbridge.testing.simulation.scenario import Scenario
from kvbridge.testing.simulation.world import World
from kvbridge.transport import Capabilities

if TYPE_CHECKING:
    from kvbridge.testing.simulation.transport import SimulatedAgent

AN_HOUR_S = 3600.0
LATE_S = 0.5
"""So long may bytes arrive of a writer that has died; drivers say no more."""


class Fabric:
    """What is between the agents.

    Attributes:
        capabilities: What every agent can do.
        agents: Every agent that there has been, by its name.
        pending: Operations that are not quiet, by number.
        ledger: What agents have said to each other, and what follows from it.
        moves: Is told of each operation that begins.
    """

    def __init__(self, world: World, scenario: Scenario) -> None:
        """Start with nobody."""
        self.world, self.faults = world, scenario.faults
        self.slow_s = 2.5 * scenario.timeout_s
        self.capabilities = Capabilities(
            read=scenario.reads,
            write=scenario.writes,
            notify=True,
            notify_max_bytes=scenario.notify_max_bytes,
            memory_kinds=frozenset({"dram"}),
            descriptors_max=scenario.descriptors_max,
            peer_loss="on_use",
            owner_passive=True,
            peers_in_process=True,
            preferred_direction="write" if scenario.prefers_to_write else "either",
        )
        self.agents: dict[str, SimulatedAgent] = {}
        self.pending: dict[int, Operation] = {}
        self.ledger = Ledger(world)
        self.moves: Callable[[Operation], None] = lambda _: None

    def launch(self, op: Operation) -> None:
        """Let an operation begin."""
        world, faults = self.world, self.faults
        self.pending[op.number] = op
        self.ledger.begins(op)
        self.moves(op)
        duration_s = min(world.rng.expovariate(150.0), 0.1)
        if world.chance(faults.move_slow):
            duration_s = world.rng.uniform(0.0, self.slow_s)
        if world.chance(faults.move_fails):
            op.fails_after = world.rng.randint(0, len(op.pieces))
        elif world.chance(faults.move_hangs):
            op.hangs_after = world.rng.randint(0, len(op.pieces))
            if world.rng.random() < 0.95:  # so that not all blocks are gone in the end
                delay_s = world.rng.uniform(1.0, 4.0) * self.slow_s
                world.after(delay_s, lambda: op.owner.give_up(op, "the simulated wire gave up"))
        pause_s = duration_s / (len(op.pieces) + 1)
        world.after(pause_s, lambda: self._go_on(op, pause_s))

    def _go_on(self, op: Operation, pause_s: float) -> None:
        if op.over or op.remote.dead or op.hangs_after == op.done:
            return
        if op.fails_after == op.done:
            op.owner.end(op, "the simulated wire failed")
        elif op.done == len(op.pieces):
            op.owner.end(op, "the peer was dropped" if op.dropped else "")
        elif not self._may_touch(op):
            op.owner.end(op, "remote access error: that memory is not registered")
        else:
            for source, target, nbytes in op.pieces[op.done]:
                memmove(target, source, nbytes)
            op.done += 1
            self.world.after(pause_s, lambda: self._go_on(op, pause_s))

    def _may_touch(self, op: Operation) -> bool:
        """Whether the next portion's memory there is registered, or can be read all the same."""
        source, target, _ = op.pieces[op.done][0]
        if op.is_read:
            return op.remote.has(source) or self.world.chance(self.faults.zombie)
        return op.remote.has(target)

    def outlive(self, op: Operation) -> None:
        """Stop a write whose writer has died; what it has sent may still arrive."""
        world = self.world
        if world.rng.random() < 0.5:
            for portion in op.pieces[op.done :]:
                sent = [(target, string_at(source, nbytes)) for source, target, nbytes in portion]
                world.after(world.rng.uniform(0.0, LATE_S), partial(_arrive, op, sent))
        world.after(LATE_S, lambda: op.owner.forget(op))

    def send(self, sender: "SimulatedAgent", remote: "SimulatedAgent", payload: bytes) -> None:
        """Carry a notification, or not, or more than once."""
        world, faults = self.world, self.faults
        self.ledger.says(sender, remote, decode_note(payload))
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

    def end_all(self) -> None:
        """Make everything quiet that was not."""
        for op in list(self.pending.values()):
            op.owner.give_up(op, "the simulated wire gave up")


def _arrive(op: Operation, sent: list[tuple[int, bytes]]) -> None:
    """Let a portion land whose writer has died."""
    for target, content in sent:
        if not op.remote.dead and op.remote.has(target):
            memmove(target, content, len(content))


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
