"""What must hold of a request, whenever something of it begins or ends."""

from ctypes import c_uint64
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.connector import Loaded
from kvbridge.model import Rank
from kvbridge.session.leases import WORD_NBYTES
from kvbridge.testing.simulation.jobs import Leg, Offer
from kvbridge.testing.simulation.leftovers import arranged, packed, written_of
from kvbridge.testing.simulation.memory import POISON, bits
from kvbridge.testing.simulation.operations import Operation
from kvbridge.testing.simulation.rules import (
    FAIR,
    OWN,
    POLICY,
    PROMISED,
    QUIET,
    READERS,
    REVOKED,
    TOLD,
)

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine
    from kvbridge.testing.simulation.plant import Plant

TOLD_S = 0.3
"""How long it may take to say that blocks are not needed."""


def check_bytes(leg: Leg, start: int, end: int, what: str) -> None:
    """Check that tokens of a request are its own, on every rank."""
    engine = leg.engine
    if leg.generation != engine.generation:
        return  # with the cache went its content
    for rank, seat in engine.seats.items():
        keys = seat.arena.keys(leg.blocks, start, end)
        if not (keys == np.uint64(leg.job.key)).all():
            layer, token, head, pair = (int(i) for i in np.argwhere(keys != leg.job.key)[0])
            found = int(keys[layer, token, head, pair])
            own = int(seat.arena.own[layer, start + token, head, pair])
            whose = engine.plant.whose(found, found ^ own == POISON)
            engine.world.violate(
                OWN,
                f"{what}: rank {rank}, layer {layer} of the stage, token {start + token} of {end}, "
                f"head {head} of the rank, {'KV'[pair]} is {whose}",
                leg.job.number,
                *engine.relatives(leg),
            )
            return


def check_quiet(leg: Leg, when: str) -> None:
    """Check that nothing can touch a request's blocks any more."""
    engine, mine = leg.engine, bits(leg.blocks)
    _check_beside(leg, when)
    for seat in engine.seats.values():
        for agent in seat.agents.values():
            for op in agent.landing.values():
                if op.lands & mine and op.target is seat.arena:
                    _touched(leg, f"{when}, while {op}", op.giver.where)
            for op in agent.own.values():
                if op.is_read or op.disowned or not op.takes & mine or op.source is not seat.arena:
                    continue
                if _is_unfinished(leg, written_of(seat.connector, op.handle)):
                    op.disowned = True  # what has not finished may lose its blocks: it goes again
                else:
                    _touched(leg, f"{when}, while {op}", op.reader.where)
            for ask in agent.asks.values():
                if ask.lands & mine and ask.target is seat.arena and not ask.giver.dead:
                    text = f"{when}, while {agent.where} waits for {ask.giver.where} to write"
                    _touched(leg, f"{text} (want {ask.number})", ask.giver.where)


def _is_unfinished(leg: Leg, name: str) -> bool:
    """Whether a request is written ahead that has no offer: this one, or one that had its blocks.

    The workers learn at their next step that it has lost them, so they may begin a write until
    then. It is written once more, or its reader is told that it will not come.

    Args:
        leg: Whose blocks they are.
        name: That of the request; empty if it is unknown.
    """
    if leg.job.goes_ahead and not leg.offers:
        return True
    offers = (leg, *leg.engine.held.values())
    held = {offer.transfer_id for each in offers for offer in each.offers.values()}
    return bool(name) and name not in held


def _check_beside(leg: Leg, when: str) -> None:
    """Check that no cells are about to be put into a request's blocks, or to be packed from it."""
    mine, offers = bits(leg.blocks), {offer.transfer_id for offer in leg.offers.values()}
    for seat in leg.engine.seats.values():
        if not offers.isdisjoint(packed(seat.connector)):
            _touched(leg, f"{when}, while they are being packed", leg.engine.name)
        for targets in arranged(seat.connector):
            if seat.arena.blocks_of(targets) & mine:
                _touched(leg, f"{when}, while cells are put in their places", leg.engine.name)


def _touched(leg: Leg, text: str, where: str) -> None:
    leg.engine.world.violate(
        QUIET,
        f"{text}; its blocks are {leg.blocks}",
        leg.job.number,
        leg.engine.name,
        where.partition("/")[0],
    )


def check_given_back(leg: Leg) -> None:
    """Check that held blocks may be given to others."""
    engine, mine = leg.engine, bits(leg.blocks)
    for rank, seat in engine.seats.items():
        for child, offer in leg.offers.items():
            if promised(engine, rank, child, offer):
                engine.world.violate(
                    REVOKED,
                    f"blocks {leg.blocks} are given back, and rank {rank} still promises them "
                    f"over connector {child!r}",
                    leg.job.number,
                    engine.name,
                )
            if not leg.expired and offer.transfer_id not in seat.agents[child].let_go:
                told = seat.agents[child].told.get(offer.transfer_id)
                engine.world.violate(
                    READERS,
                    f"blocks {leg.blocks} are reported as sent; rank {rank} over connector "
                    f"{child!r} was told so by {told or 'nobody'}",
                    leg.job.number,
                    engine.name,
                )
        for agent in () if leg.expired else seat.agents.values():
            for op in agent.taking.values():
                given_up = op.handle.abandoned or op.dropped or op.reader.dead
                reads = op.is_read and op.takes & mine and op.source is seat.arena and not given_up
                if reads and serves(op, leg) and said_done(op, leg):
                    engine.world.violate(
                        READERS,
                        f"{op.reader.where} has said that it is done with blocks {leg.blocks}, and "
                        f"still reads them from rank {rank} (operation {op.number})",
                        leg.job.number,
                        engine.name,
                        op.reader.where.split("/")[0],
                    )


def check_told(leg: Leg) -> None:
    """Check that a lease was not over because nobody told."""
    engine, traffic = leg.engine, leg.engine.plant.traffic
    if not engine.scenario.faults.calm or engine.world.rest_s:
        return
    for reader in traffic.readers(leg):
        if reader.state == "over" and reader.over_s + TOLD_S < engine.world.now_s:
            engine.world.violate(
                TOLD,
                f"{reader.engine.name} was done with it at {reader.over_s:.3f} and has not said so",
                leg.job.number,
                engine.name,
                reader.engine.name,
            )


def check_promise(leg: Leg) -> None:
    """Check that blocks were kept for as long as their readers have been told."""
    engine = leg.engine
    until_s = min(leg.until_s.values())
    keeps = leg.generation == engine.generation and not engine.sleeps
    if engine.world.now_s < until_s and keeps:
        engine.world.violate(
            PROMISED, f"it was to be kept until {until_s:.3f}", leg.job.number, engine.name
        )


def check_move(plant: "Plant", op: Operation) -> None:
    """Check that nobody begins to read what he has said that he is done with."""
    if not op.is_read or not op.lands:
        return
    name = op.owner.where.partition("/")[0]
    reader = next(engine for engine in plant.engines if engine.name == name)
    for leg in reader.loading.values():
        giver = plant.giver_of(leg) if op.lands & bits(leg.blocks) else None
        for offer in giver.offers.values() if giver is not None else ():
            told = op.remote.told.get(offer.transfer_id, {}).get(op.owner.engine, {})
            if told.get(op.owner.seat, -1.0) >= leg.told_s:
                plant.world.violate(
                    READERS,
                    f"{op}, after it has said that it is done",
                    leg.job.number,
                    name,
                    op.remote.where.partition("/")[0],
                )


def serves(op: Operation, giver: Leg) -> bool:
    """Return whether a read is made for a load of what a leg gives."""
    plant, name = giver.engine.plant, op.reader.where.partition("/")[0]
    reader = next(engine for engine in plant.engines if engine.name == name)
    return any(
        op.lands & bits(leg.blocks) and plant.giver_of(leg) is giver
        for leg in reader.loading.values()
    )


def said_done(op: Operation, giver: Leg) -> bool:
    """Return whether a reader has told the rank that it reads from that it is done."""
    offers = {offer.transfer_id for offer in giver.offers.values()}
    return any(
        op.reader.seat in ranks
        for transfer_id in offers & op.remote.told.keys()
        for engine, ranks in op.remote.told[transfer_id].items()
        if engine == op.reader.engine
    )


def promised(engine: "Engine", rank: Rank, child: str, offer: Offer) -> bool:
    """Return whether a rank promises to keep the blocks of an offer."""
    address = engine.seats[rank].leases[child] + offer.slot * WORD_NBYTES
    return c_uint64.from_address(address).value == offer.epoch


def check_renewed(leg: Leg) -> None:
    """Check that no lease has ended of a load that waited, without faults, for too long."""
    engine, giver = leg.engine, leg.engine.plant.giver_of(leg)
    scenario = engine.scenario
    if giver is None or not giver.expired or not scenario.faults.calm or engine.world.rest_s:
        return
    if leg.waits:  # it knows of no lease that it could have renewed
        return
    in_time = leg.asked_s < giver.ended_s + scenario.lease_s / 4
    if in_time and giver.over_s < giver.ended_s + scenario.lease_longest_s:
        engine.world.violate(
            FAIR,
            f"its lease ended at {giver.over_s:.3f}, though it waits since {leg.asked_s:.3f}",
            leg.job.number,
            engine.name,
            giver.engine.name,
        )


def check_policy(leg: Leg, loaded: Loaded) -> None:
    """Check that an engine is told what to do with a request that was not loaded."""
    engine, on_failure = leg.engine, leg.engine.scenario.on_failure
    if not leg.aborted and loaded.recompute != (on_failure == "recompute"):
        text = f"on_failure is {on_failure!r}, recompute is {loaded.recompute}: {loaded.error}"
        engine.world.violate(POLICY, text, leg.job.number, engine.name)


def check_cause(leg: Leg) -> None:
    """Check that a load failed for something that has happened."""
    engine, giver = leg.engine, leg.engine.plant.giver_of(leg)
    if "aborted" in leg.error:
        if not leg.aborted:
            engine.world.violate(FAIR, "nobody has aborted it", leg.job.number, engine.name)
        return
    if not any(words in leg.error for words in ("its lease", "kept no longer")):
        is_early = leg.waits and any(
            words in leg.error for words in ("may not have ended", "not ready in time")
        )
        if engine.scenario.faults.calm and not is_early:
            engine.world.violate(
                FAIR, f"nothing went wrong: {leg.error}", leg.job.number, engine.name
            )
        return
    if giver is None or giver.state != "held":
        return
    there, now_s = giver.engine, engine.world.now_s
    if not there.alive or giver.generation != there.generation:
        return
    if there.sleeps:  # it has let go of everything, on some ranks
        return
    if "had not begun" in leg.error or now_s >= min(giver.until_s.values()):
        return
    reader = {(engine.name, engine.incarnation)}  # it lets go because it has failed
    if not any(
        seat.agents[child].let_go.get(offer.transfer_id, reader) - reader
        for seat in there.seats.values()
        for child, offer in giver.offers.items()
    ):
        engine.world.violate(
            FAIR,
            f"{there.name} holds its blocks, and nobody has let go of them: {leg.error}",
            leg.job.number,
            engine.name,
            there.name,
        )
