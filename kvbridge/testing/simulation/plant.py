"""All engines of a run, their traffic and their disasters, from the first request to the end."""

from functools import partial

from kvbridge.handshake import EngineAddress
from kvbridge.session.introductions import LONGEST_PAUSE_S
from kvbridge.testing.simulation import checks, rules
from kvbridge.testing.simulation.build import Build
from kvbridge.testing.simulation.deadlines import LOST_S
from kvbridge.testing.simulation.engine import Engine
from kvbridge.testing.simulation.fabric import AN_HOUR_S
from kvbridge.testing.simulation.jobs import Leg
from kvbridge.testing.simulation.leftovers import check_nothing_left
from kvbridge.testing.simulation.memory import Arena
from kvbridge.testing.simulation.scenario import Scenario, draw_shape
from kvbridge.testing.simulation.traffic import Traffic
from kvbridge.testing.simulation.world import World


class Plant:
    """A run.

    Attributes:
        world: Its time.
        scenario: What it stands for.
        build: Makes the code under test.
        engines: Those that run, or were killed and not started again yet.
        traffic: The requests.
        arenas: Every cache that there has been: others may read it after its engine has ended.
    """

    def __init__(self, scenario: Scenario, build: type[Build] = Build) -> None:
        """Start the engines, and the traffic."""
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.build = build(self.world, scenario)
        self.arenas: list[Arena] = []
        self._starts = 0
        self.engines = [self._start(i) for i in range(len(scenario.shapes))]
        self.traffic = Traffic(self)
        self.build.fabric.moves = partial(checks.check_move, self)
        self.build.network.renewals.kept = self._kept
        for i in range(len(self.engines)):
            self._plan(scenario.faults.kill, partial(self._kill, i))
            self._plan(scenario.faults.wake, partial(self._sleep, i))
            self._plan(scenario.faults.drain, partial(self._drain, i))
            self._plan(scenario.faults.full, partial(self._fill, i))

    def run(self) -> None:
        """Let the traffic run, and then everything end."""
        world, scenario = self.world, self.scenario
        longest_s = scenario.requests * scenario.patience_s
        while not self.traffic.is_over and world.violation is None:
            world.run(world.now_s + 1.0)
            if world.now_s > longest_s:
                stuck = next(iter(self.traffic.open), 0)
                world.violate(rules.DEADLINE, "a request does not end", stuck)
        world.calm = True
        self._rest(scenario.lease_s + 4 * scenario.timeout_s + 10 * scenario.meet_s, steps=100)
        world.note("", 0, "all traffic has ended, and all leases are over")
        self.build.fabric.end_all()
        self._rest(LOST_S + scenario.meet_s, steps=40)
        self._check_nothing_left()
        self._rest(LONGEST_PAUSE_S, steps=20)
        self._probe(must=False)  # what is lost may have to be used to be noticed
        self._probe(must=True)
        self._rest(AN_HOUR_S, steps=20)  # notices may be as late
        self._check_nothing_left()
        for engine in self.engines:
            engine.shutdown()
        if self.build.fabric.pending:
            world.violate(rules.LEFT, f"{len(self.build.fabric.pending)} operations")

    def _rest(self, seconds: float, *, steps: int) -> None:
        """Let time pass in a few long steps."""
        self.world.rest_s = seconds / steps
        self.world.run(self.world.now_s + 1.1 * seconds)
        self.world.rest_s = 0.0

    def _probe(self, *, must: bool) -> None:
        """Send a request from every engine to every other one; one by one, if all must succeed."""
        world = self.world
        pairs = [
            (giver, taker)
            for giver in self.engines
            for taker in self.engines
            if giver is not taker
            and giver.shape.role != "consumer"
            and taker.shape.role != "producer"
        ]
        # What must succeed has the staging for itself, a few pages: to wait for it is no fault.
        for some in [[pair] for pair in pairs] if must else [pairs]:
            probes = [self.traffic.probe(*pair) for pair in some]
            until_s = world.now_s + 2 * self.scenario.patience_s
            while self.traffic.open and world.now_s < until_s and world.violation is None:
                world.run(world.now_s + 0.2)
            for probe in probes:
                if must and probe.outcome != "success":
                    text = f"a request ends as {probe.outcome!r}"
                    names = (engine.name for engine in self.engines)
                    world.violate(rules.RECOVERS, text, probe.number, *names)

    def _check_nothing_left(self) -> None:
        for engine in self.engines:
            if self.world.violation is None:
                check_nothing_left(engine)

    def giver_of(self, leg: Leg) -> Leg | None:
        """Return the leg whose blocks another one loads."""
        key = (str((leg.params or {}).get("remote_engine_id")), leg.source_id)
        return self.traffic.givers.get(key)

    def whose(self, key: int, is_poison: bool) -> str:
        """Return in words whose content a cell holds."""
        if is_poison:
            return "of a block that was freed"
        return f"of {self.traffic.keys.get(key, 'nobody')}"

    def _start(self, i: int) -> Engine:
        self._starts += 1
        shape = self.scenario.shapes[i]
        if self._starts > len(self.scenario.shapes) and self.world.rng.random() < 0.3:
            shape = draw_shape(self.world.rng, shape.role)
        return Engine(self, i, shape, self._starts)

    def _plan(self, rate: float, action: partial[None]) -> None:
        """Have a disaster happen, so often in a second."""
        if rate:
            self.world.after(self.world.rng.expovariate(rate), action)

    def _kill(self, i: int) -> None:
        if self.world.calm:
            return
        engine = self.engines[i]
        if engine.alive:
            self.traffic.lost(engine.kill())
            self.world.after(self.world.rng.uniform(0.05, 1.0), partial(self._restart, i))
        self._plan(self.scenario.faults.kill, partial(self._kill, i))

    def _restart(self, i: int) -> None:
        self.engines[i] = self._start(i)

    def _drain(self, i: int) -> None:
        if self.world.calm:
            return
        self.engines[i].drain(self.world.rng.uniform(0.05, 1.5) * self.scenario.lease_s)
        self._plan(self.scenario.faults.drain, partial(self._drain, i))

    def ended(self, engine: Engine) -> None:
        """Take note that an engine is drained: end it, and start it again."""
        self.traffic.lost(engine.requests)
        engine.shutdown()
        self.world.note(engine.name, 0, f"{engine.incarnation} is drained, and ends")
        self.world.after(self.world.rng.uniform(0.05, 1.0), partial(self._restart, engine.index))

    def _fill(self, i: int) -> None:
        if self.world.calm:
            return
        engine = self.engines[i]
        engine.full_s = self.world.now_s + self.world.rng.uniform(0.5, 4.0) * self.scenario.lease_s
        self.world.note(engine.name, 0, f"has no place until {engine.full_s:.4f}")
        self._plan(self.scenario.faults.full, partial(self._fill, i))

    def _kept(self, address: EngineAddress, engine_id: str, name: str, until_s: float) -> None:
        """Take note of what an engine has said that it keeps."""
        giver = self.traffic.givers.get((engine_id, name))
        child = self.scenario.children[address.port % 10]
        if giver is not None and giver.offers[child].transfer_id == name:
            giver.until_s[child] = max(giver.until_s[child], until_s)
            longest_s = giver.ended_s + self.scenario.lease_longest_s
            giver.kept_s = min(self.world.now_s + self.scenario.lease_s, longest_s)

    def _sleep(self, i: int) -> None:
        if self.world.calm:
            return
        self.engines[i].sleep(busy=self.world.chance(self.scenario.faults.wake_busy))
        self._plan(self.scenario.faults.wake, partial(self._sleep, i))
