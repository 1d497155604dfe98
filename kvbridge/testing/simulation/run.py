"""Seeds, from their numbers to what came of them."""

import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from kvbridge.testing.simulation.build import Build
from kvbridge.testing.simulation.plant import Plant
from kvbridge.testing.simulation.scenario import Scenario
from kvbridge.testing.simulation.world import Note, Violation

REQUESTS = 1000
SHOWN = 40


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a seed.

    Attributes:
        seed: The seed.
        requests: How many requests were sent.
        outcomes: How they ended.
        virtual_s: How long it took, in virtual time.
        seconds: How long it kept a processor busy.
        digest: Equal for runs in which the same happened.
        violation: The promise that was broken, if one was.
        trace: What happened before that.
    """

    seed: int
    requests: int
    outcomes: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    seconds: float = 0.0
    digest: str = ""
    violation: Violation | None = None
    trace: tuple[Note, ...] = ()

    @property
    def command(self) -> str:
        """What runs exactly this again."""
        return (
            f"python -m kvbridge.testing.simulation --replay {self.seed} --requests {self.requests}"
        )

    def __str__(self) -> str:
        """Explain a violation to a person."""
        if self.violation is None:
            return f"seed {self.seed}: {self.requests} requests, every promise was kept"
        at = self.violation
        lines = [f"seed {self.seed}, at {at.at_s:.4f} s: broken: {at.rule}", f"  {at.text}", ""]
        lines += [f"  {note}" for note in self.trace]
        return "\n".join([*lines, "", f"  {self.command}"])


def simulate(seed: int, requests: int = REQUESTS, build: type[Build] = Build) -> Result:
    """Run a seed.

    Args:
        seed: Decides everything.
        requests: How many requests there are; a part of what is decided.
        build: Makes the code under test.
    """
    started_s = time.process_time()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each fault is a warning
    try:
        plant = Plant(Scenario.of(seed, requests), build)
        plant.run()
    finally:
        logging.disable(before)
    world = plant.world
    return Result(
        seed=seed,
        requests=requests,
        outcomes=plant.traffic.outcomes,
        virtual_s=world.now_s,
        seconds=time.process_time() - started_s,
        digest=world.digest(),
        violation=world.violation,
        trace=_trace(world.notes, world.violation) if world.violation else (),
    )


def simulate_all(seeds: Iterable[int], requests: int, jobs: int) -> Iterator[Result]:
    """Run seeds, in some order.

    Args:
        seeds: What to run.
        requests: How many requests each has.
        jobs: Processes that share the work; with one, it is done here.

    Raises:
        BrokenProcessPool: One of them died.
    """
    if jobs == 1:
        for seed in seeds:
            yield simulate(seed, requests)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(simulate, seed, requests) for seed in seeds]
        for done in as_completed(running):
            yield done.result()


def _trace(notes: list[Note], at: Violation) -> tuple[Note, ...]:
    """Return what a person needs: all of that request, and the last of those engines."""
    mine = [note for note in notes if at.job and note.job == at.job]
    theirs = [note for note in notes if note.where.partition("/")[0] in at.engines or not note.job]
    shown = {id(note) for note in (*mine[-SHOWN:], *theirs[-SHOWN // 2 :])}
    return tuple(note for note in notes if id(note) in shown)
