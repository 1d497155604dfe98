"""What must hold: after each step, whenever a request ends, and when all traffic has ended.

These look into the objects under test where nothing public says what they hold.
"""

from ctypes import c_uint64
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.connector import BridgeConnector
from kvbridge.connector.isolation import Isolation
from kvbridge.connector.multi import MultiConnector
from kvbridge.model import Rank
from kvbridge.session.leases import EPOCH_BITS, SLOTS, WORD_NBYTES, LeaseTable
from kvbridge.testing.simulation.fabric import Operation
from kvbridge.testing.simulation.jobs import Leg, Offer
from kvbridge.testing.simulation.memory import POISON, bits

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine

POLLS = 2
"""Whole steps of an engine that an end may take after its deadline."""

TOLD_S = 0.3
"""How long it may take to say that blocks are not needed."""

OWN = "a request that succeeds has its own bytes"
QUIET = "no block is freed while anything can touch it"
REVOKED = "a lease is over before its blocks are free"
READERS = "blocks are kept until every reader is done, or their lease is over"
DEADLINE = "everything ends before its deadline"
ONCE = "everything ends once"
ESCAPE = "no exception leaves a hook"
LEFT = "at the end nothing is held"
TOLD = "whoever needs blocks no more says so"
RECOVERS = "once nothing goes wrong any more, every engine can load from every other"
FAIR = "no load fails without a cause"


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
    """Check that nothing can write to a request's blocks any more."""
    engine, mine = leg.engine, bits(leg.blocks)
    for rank, seat in engine.seats.items():
        for agent in seat.agents.values():
            for op in agent.reading.values():
                if op.lands & mine and op.target is seat.arena:
                    engine.world.violate(
                        QUIET,
                        f"{when}, while rank {rank} still reads from {op.remote.where} into its "
                        f"blocks {leg.blocks} (operation {op.number})",
                        leg.job.number,
                        engine.name,
                        op.remote.where.split("/")[0],
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
            for op in agent.read_by.values():
                given_up = op.handle.abandoned or op.dropped or op.reader.dead
                reads = op.takes & mine and op.source is seat.arena and not given_up
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


def check_deadlines(engine: "Engine") -> None:
    """Check that nothing is late that has no reason to be."""
    scenario, now_s = engine.scenario, engine.world.now_s
    for leg in engine.loading.values():
        if now_s < leg.begun_s + scenario.timeout_s:
            continue
        mine = bits(leg.blocks)
        if any(
            op.lands & mine or not op.lands
            for seat in engine.seats.values()
            for agent in seat.agents.values()
            for op in agent.reading.values()
        ):
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
        if now_s < leg.begun_s + scenario.lease_s:
            continue
        leg.polls += 1
        if leg.polls > POLLS:
            engine.world.violate(
                DEADLINE,
                f"its blocks are held since {leg.begun_s:.3f}, may be for {scenario.lease_s:g} s, "
                f"and were not reported in {POLLS} steps since",
                leg.job.number,
                engine.name,
            )


def check_cause(leg: Leg) -> None:
    """Check that a load failed for something that has happened."""
    engine, giver = leg.engine, leg.engine.plant.giver_of(leg)
    if "its lease" not in leg.error:
        if engine.scenario.faults.calm:
            engine.world.violate(
                FAIR, f"nothing went wrong: {leg.error}", leg.job.number, engine.name
            )
        return
    if giver is None or giver.state != "held":
        return
    there, now_s = giver.engine, engine.world.now_s
    if not there.alive or giver.generation != there.generation:
        return
    if "had not begun" in leg.error or now_s >= giver.told_s + there.scenario.lease_s:
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


def check_nothing_left(engine: "Engine") -> None:
    """Check that an engine at rest holds nothing, and that none of its children has raised."""
    left = {"blocks": engine.shape.blocks - len(engine.pool.free)}
    for name in ("waiting", "loading", "running", "held"):
        left[f"requests {name}"] = len(getattr(engine, name))
    for half in _bridges(engine.scheduler):
        left |= {f"{half.name}: {what}": n for what, n in _decided(engine, half).items()}
    for rank, seat in engine.seats.items():
        for half in _bridges(seat.connector):
            held = _worked(half)
            left |= {f"rank {rank}, {half.name}: {what}": n for what, n in held.items()}
        if isinstance(seat.connector, MultiConnector):
            multi = seat.connector.worker_half
            left[f"rank {rank}: loads of its children"] = len(multi._running)
            left[f"rank {rank}: holds of its children"] = len(multi._saving)
    found = [f"{n} {what}" for what, n in left.items() if n]
    if found:
        engine.world.violate(LEFT, "; ".join(found), 0, engine.name)
    for connector in (engine.scheduler, *(seat.connector for seat in engine.seats.values())):
        for isolation in _isolations(connector):
            if isolation.errors:
                text = f"{isolation.name}: {isolation.last_error}"
                engine.world.violate(ESCAPE, text, 0, engine.name)


def _decided(engine: "Engine", half: BridgeConnector) -> dict[str, int]:
    """Return what a scheduler half holds."""
    scheduler = half.scheduler_half
    return {
        "lease slots": engine.scenario.slots - len(scheduler._holds._slots),
        "holds": len(scheduler._holds),
        "loads": len(scheduler._loading),
        "requests that were settled": len(scheduler._settled),
    }


def _worked(half: BridgeConnector) -> dict[str, int]:
    """Return what a worker half holds."""
    worker = half.worker_half
    agent = worker.agent
    return {
        "transfers": len(agent._live) + len(agent._transfers),
        "handles in quarantine": agent.quarantined,
        "holds": len(agent.releases.held) + len(worker._held),
        "leases": len(agent._kept) + _promises(agent._leases),
        "loads": len(worker._loads) if worker._loads is not None else 0,
    }


def _isolations(connector: object) -> list[Isolation]:
    if not isinstance(connector, MultiConnector):
        return []
    halves = (connector.scheduler_half, connector.worker_half)
    return [each for half in halves for each in half.isolation.values()]


def _promises(leases: LeaseTable) -> int:
    words = leases._words[:SLOTS]
    return int(np.count_nonzero((words > 0) & (words < 1 << EPOCH_BITS)))


def _bridges(connector: object) -> list[BridgeConnector]:
    if isinstance(connector, MultiConnector):
        return [
            child for child in connector.children.values() if isinstance(child, BridgeConnector)
        ]
    return [connector] if isinstance(connector, BridgeConnector) else []
