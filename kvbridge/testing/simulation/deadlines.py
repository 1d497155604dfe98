"""Whether anything is late that has no reason to be."""

from typing import TYPE_CHECKING

from kvbridge.session import wants
from kvbridge.testing.simulation.leftovers import bridges, packed
from kvbridge.testing.simulation.memory import bits
from kvbridge.testing.simulation.rules import DEADLINE
from kvbridge.testing.simulation.transport import SimulatedAgent

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine

POLLS = 2
"""Whole steps of an engine that an end may take after its deadline."""

LOST_S = wants.AGAIN_LONGEST_S + wants.AGAIN_S + wants.LOST_S
"""How long it may take to find that somebody is gone who was to write, and to be sure of it."""


def may_be_written(agent: SimulatedAgent, mask: int, now_s: float) -> bool:
    """Return whether anybody may still write to blocks, so far as that agent can know."""
    if any(op.lands & mask or not op.lands for op in agent.landing.values()):
        return True
    return any(
        (ask.lands & mask or ask.into)  # what comes packed is put into blocks that none can tell
        and (not ask.giver.dead or now_s < ask.giver.known_dead_s + LOST_S)
        for ask in agent.asks.values()
    )


def check_deadlines(engine: "Engine") -> None:
    """Check that nothing is late that has no reason to be."""
    scenario, now_s = engine.scenario, engine.world.now_s
    agents = [agent for seat in engine.seats.values() for agent in seat.agents.values()]
    settles = any(
        wanted.transfer.session.lost  # it is looked for, and asked once it is found
        for seat in engine.seats.values()
        for half in bridges(seat.connector)
        for wanted in half.worker_half.agent._wants._open.values()
    )
    for leg in engine.loading.values():
        if now_s < leg.begun_s + scenario.timeout_s:
            continue
        mine = bits(leg.blocks)
        if settles or any(may_be_written(agent, mine, now_s) for agent in agents):
            leg.polls = 0  # not quiet
            continue
        leg.polls += 1
        if leg.polls > POLLS:
            engine.world.violate(
                DEADLINE,
                f"its load began at {leg.begun_s:.3f}, may take {scenario.timeout_s:g} s, is quiet "
                f"and was not reported in {POLLS} steps since",
                leg.job.number,
                *engine.relatives(leg),
            )
    for leg in engine.held.values():
        end_s = leg.kept_s
        if engine.draining_s is not None:
            end_s = min(end_s, engine.draining_s)
        if now_s < max(end_s, leg.ended_s):
            continue
        mine = bits(leg.blocks)
        is_written = any(
            not op.is_read and op.takes & mine for a in agents for op in a.own.values()
        )
        if is_written or any(any(packed(seat.connector)) for seat in engine.seats.values()):
            leg.polls = 0  # somebody has it written
            continue
        leg.polls += 1
        if leg.polls > POLLS:
            engine.world.violate(
                DEADLINE,
                f"its blocks are held since {leg.ended_s:.3f}, may be until {end_s:.3f}, "
                f"and were not reported in {POLLS} steps since",
                leg.job.number,
                engine.name,
            )
