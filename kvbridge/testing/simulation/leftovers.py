"""What is left of requests: nothing, once all traffic has ended.

This looks into the objects under test where nothing public says what they hold.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.connector import BridgeConnector
from kvbridge.connector.isolation import Isolation
from kvbridge.connector.multi import MultiConnector
from kvbridge.session.gifts import Gift
from kvbridge.session.leases import EPOCH_BITS, SLOTS, LeaseTable
from kvbridge.testing.simulation.rules import ESCAPE, LEFT
from kvbridge.transport import Handle

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine


def check_nothing_left(engine: "Engine") -> None:
    """Check that an engine at rest holds nothing, and that none of its children has raised."""
    left = {"blocks": engine.shape.blocks - len(engine.pool.free)}
    for name in ("waiting", "loading", "running", "held"):
        left[f"requests {name}"] = len(getattr(engine, name))
    for half in bridges(engine.scheduler):
        left |= {f"{half.name}: {what}": n for what, n in _decided(engine, half).items()}
    for rank, seat in engine.seats.items():
        for half in bridges(seat.connector):
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
    renewals = scheduler._renewals
    return {
        "requests to be kept elsewhere": 0 if renewals is None else len(renewals._waiting),
        "questions": 0 if renewals is None else len(renewals._questions),
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
        "transfers": len(agent._live) + len(agent._operations),
        "handles in quarantine": agent.quarantined,
        "wants": len(agent._wants) + len(agent._live._untold),
        "staged portions": len(agent._portions) + len(agent._packing),
        "bytes of staging": agent.staged_nbytes,
        "gifts": len(worker._gifts) if worker._gifts is not None else 0,
        "holds": len(agent.releases.held) + len(worker._held) + len(worker._leaving),
        "leases": len(agent._kept) + _promises(agent._leases),
        "loads": len(worker._loads) if worker._loads is not None else 0,
    }


def arranged(connector: object) -> Iterator[list[tuple[int, int]]]:
    """Yield where cells of staged loads are being put, or will be, piece by piece."""
    for half in bridges(connector):
        for begun in half.worker_half.agent._portions._begun:
            if begun.arranging is not None and not begun.arranging.done():
                scatter = begun.portion.scatter(begun.address or 0)
                yield list(
                    zip(scatter.target_address.tolist(), scatter.nbytes.tolist(), strict=True)
                )


def packed(connector: object) -> Iterator[str]:
    """Yield requests whose blocks are being packed for others, or will be, by their offers."""
    for half in bridges(connector):
        for job in half.worker_half.agent._packing._jobs.values():
            if not job.packing.done() and isinstance(job.gift, Gift):
                yield job.gift.request_id


def written_of(connector: object, handle: Handle) -> str:
    """Return the offer or name of the request that a write gives blocks of; empty if unknown."""
    for half in bridges(connector):
        moves = half.worker_half.agent._operations._owners.get(handle)
        if isinstance(moves, Gift):
            return moves.request_id
    return ""


def _isolations(connector: object) -> list[Isolation]:
    if not isinstance(connector, MultiConnector):
        return []
    halves = (connector.scheduler_half, connector.worker_half)
    return [each for half in halves for each in half.isolation.values()]


def _promises(leases: LeaseTable) -> int:
    words = leases._words[:SLOTS]
    return int(np.count_nonzero((words > 0) & (words < 1 << EPOCH_BITS)))


def bridges(connector: object) -> list[BridgeConnector]:
    """Return the connectors that move something."""
    if isinstance(connector, MultiConnector):
        return [
            child for child in connector.children.values() if isinstance(child, BridgeConnector)
        ]
    return [connector] if isinstance(connector, BridgeConnector) else []
