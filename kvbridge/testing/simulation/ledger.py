"""What agents have said to each other: who is done with what, who is to write where.

Checks ask here, since the wire knows what neither side can know of the other.
"""

from typing import TYPE_CHECKING

import numpy as np

from kvbridge.handshake.messages import Given, Note, Release, Want, Withdrawal
from kvbridge.testing.simulation.operations import Ask, Operation, blocks_in
from kvbridge.testing.simulation.rules import GIVEN, WANTED
from kvbridge.testing.simulation.world import World

if TYPE_CHECKING:
    from kvbridge.testing.simulation.transport import SimulatedAgent


class Ledger:
    """Follows what is said."""

    def __init__(self, world: World) -> None:
        """Start with nothing said."""
        self._world = world
        self._asks_of: dict[tuple[str, str], list[Ask]] = {}  # by the agent, and its request

    def says(self, sender: "SimulatedAgent", remote: "SimulatedAgent", note: Note) -> None:
        """Take note that one agent says something to another one, whether or not it arrives."""
        match note:
            case Release():
                self._is_done(remote, note)
            case Want() if not note.is_empty:
                self._asks(sender, remote, note)
            case Given():
                self._answers(sender, remote.asks.get(note.number))

    def tries(self, sender: "SimulatedAgent", remote: "SimulatedAgent", note: Note) -> None:
        """Take note of what could not be sent, as far as its sender can know."""
        if isinstance(note, Want) and not note.is_empty:
            self._asks(sender, remote, note)

    def hears(self, agent: "SimulatedAgent", sender: "SimulatedAgent", note: Note) -> None:
        """Take note that something has arrived."""
        match note:
            case Given():
                ask = agent.asks.get(note.number)
                if ask is not None and ask.giver is sender:
                    del agent.asks[note.number]
                    agent.answered.add(note.number)
            case Withdrawal():
                ask = sender.asks.get(note.number)
                if ask is not None and ask.giver is agent:
                    ask.withdrawn = True

    def begins(self, op: Operation) -> None:
        """Check that somebody has asked for a write."""
        if op.is_read:
            return
        targets = op.targets
        for other in op.owner.own.values():
            is_beside = other is not op and not other.is_read and other.target is op.target
            if is_beside and not targets.isdisjoint(other.targets):
                self._violate(WANTED, f"{op}, into what is still on its way as {other}", op)
        for ask in op.remote.asks.values():
            if ask.giver is op.owner and not ask.answered and ask.may_land(op):
                if ask.withdrawn:
                    self._violate(WANTED, f"{op}, though it knows that nobody waits", op)
                if ask.lost and ask.begun & targets:
                    ask.begun, ask.lost = set(), False
                if ask.begun & targets:
                    self._violate(WANTED, f"{op}, into what it was writing already", op)
                ask.begun |= targets
                return
        self._violate(WANTED, f"{op}, which nobody waits for", op)

    def loses(self, giver: "SimulatedAgent", request_id: str) -> None:
        """Take note that blocks were taken away from a request, so that all is written again."""
        for ask in self._asks_of.get((giver.name, request_id), ()):
            ask.lost = True

    def _asks(self, sender: "SimulatedAgent", remote: "SimulatedAgent", want: Want) -> None:
        if want.number in sender.asks or want.number in sender.answered:
            return  # said again
        size = sender.arena.shape.block_tokens
        ids = np.frombuffer(want.blocks[0].ids, "<u4").tolist()
        lands, into, part = 0, range(0), want.packed
        if part is None:
            lands = blocks_in(ids, want.start_token, want.end_token, size)
        else:
            into = range(part.address, part.address + part.nbytes)
        ask = Ask(want.number, sender, remote, lands, sender.arena, into)
        sender.asks[want.number] = ask
        self._asks_of.setdefault((remote.name, want.request_id), []).append(ask)

    def _answers(self, giver: "SimulatedAgent", ask: Ask | None) -> None:
        if ask is None or ask.giver is not giver:
            return
        ask.answered = True
        for op in giver.own.values():
            if not op.is_read and ask.meets(op):
                self._violate(GIVEN, f"{giver.where} says that it has, while {op}", op)

    def _is_done(self, remote: "SimulatedAgent", release: Release) -> None:
        engine = (release.engine_id, release.incarnation)
        told = remote.told.setdefault(release.request_id, {}).setdefault(engine, {})
        told[release.rank] = self._world.now_s
        if len(told) == release.readers:
            remote.let_go.setdefault(release.request_id, set()).add(engine)

    def _violate(self, rule: str, text: str, op: Operation) -> None:
        names = (agent.where.partition("/")[0] for agent in (op.owner, op.remote))
        self._world.violate(rule, text, 0, *names)
