"""The ranks of a simulated engine: connectors, caches, and the calls of their hooks."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kvbridge.connector import Connector
from kvbridge.errors import MemoryBusyError
from kvbridge.handshake import gather_handshake_metadata, hand_over
from kvbridge.model import Rank
from kvbridge.testing.simulation import rules
from kvbridge.testing.simulation.jobs import Leg
from kvbridge.testing.simulation.memory import Arena
from kvbridge.testing.simulation.scenario import Shape
from kvbridge.testing.simulation.transport import SimulatedAgent

if TYPE_CHECKING:
    from kvbridge.testing.simulation.plant import Plant

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Seat:
    """One rank.

    Attributes:
        connector: Its worker half.
        agents: Its ends of the transports, by connector.
        arena: Its cache.
        leases: Where its words of leases are, by connector.
    """

    connector: Connector
    agents: dict[str, SimulatedAgent]
    arena: Arena
    leases: dict[str, int] = field(default_factory=dict)


class Ranks:
    """What an engine is made of.

    Attributes:
        name: Its id.
        index: Its number.
        incarnation: Which start of it.
        shape: How many ranks there are, and what they hold.
        alive: Whether its processes run.
        scheduler: The connector's scheduler half.
        seats: The ranks.
    """

    def __init__(self, plant: "Plant", index: int, shape: Shape, start: int) -> None:
        """Start, register and publish."""
        self.plant, self.world, self.scenario = plant, plant.world, plant.scenario
        self.name, self.index, self.shape = f"engine{index}", index, shape
        self.incarnation = f"{self.name}.{start}"
        self.alive = True
        self.scheduler = plant.build.scheduler(self)
        self.seats: dict[Rank, Seat] = {}
        for rank in [(p, t) for p in range(shape.pp) for t in range(shape.tp)]:
            connector, agents = plant.build.worker(self, rank)
            self.seats[rank] = Seat(connector, agents, self.new_arena(rank))
        for rank, seat in self.seats.items():
            self.register(rank, seat, seat.arena)
        self.publish()

    def hook(self, name: str, hook: Callable[..., T], *args: Any) -> T | None:
        """Call a hook, out of which no exception may come."""
        try:
            return hook(*args)
        except Exception as error:  # whatever it is, it must not be
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.world.violate(
                rules.ESCAPE,
                f"{name} of {self.name} raised {type(error).__name__}: {error} "
                f"({where.filename.rpartition('/')[2]}:{where.lineno})",
                0,
                self.name,
            )
            return None

    def new_arena(self, rank: Rank) -> Arena:
        """Return another cache for a rank."""
        arena = Arena(self.name, rank, self.shape, self.scenario.heads)
        self.plant.arenas.append(arena)  # others may still read it
        return arena

    def register(self, rank: Rank, seat: Seat, arena: Arena) -> bool:
        """Hand a cache to a rank's connector; False if the one before is still in use."""
        try:
            seat.connector.register_kv_caches(arena.cache)
        except MemoryBusyError:
            return False
        except Exception as error:  # whatever it is, it must not be
            self.world.violate(rules.ESCAPE, f"register_kv_caches raised {error!r}", 0, self.name)
        for agent in seat.agents.values():
            agent.arena = arena
        return True

    def unregister(self, seat: Seat) -> bool:
        """Take a rank's cache back; False if it is still in use."""
        try:
            seat.connector.unregister_kv_caches()
        except MemoryBusyError:
            return False
        except Exception as error:  # whatever it is, it must not be
            self.world.violate(rules.ESCAPE, f"unregister_kv_caches raised {error!r}", 0, self.name)
        return True

    def publish(self) -> None:
        """Gather what the ranks publish, and hand it to the scheduler half."""
        found = []
        for rank, seat in self.seats.items():
            metadata = self.hook("get_handshake_metadata", seat.connector.get_handshake_metadata)
            if metadata is not None:
                found.append({rank: metadata})
                seat.leases = self.plant.build.lease_tables(metadata)
        self.hook("hand_over", hand_over, self.scheduler, gather_handshake_metadata(found))

    def shutdown(self) -> None:
        """End in order."""
        self.alive = False
        self.hook("shutdown", self.scheduler.shutdown)
        for seat in self.seats.values():
            self.hook("shutdown", seat.connector.shutdown)

    def die(self) -> None:
        """End without a word."""
        self.alive = False
        for seat in self.seats.values():
            for agent in seat.agents.values():
                agent.die()
            seat.arena.poison()

    def write(self, leg: Leg, start: int, end: int) -> None:
        """Compute some tokens of a request, on every rank."""
        if start < end:
            for seat in self.seats.values():
                seat.arena.write(leg.blocks, start, end, leg.job.key)
