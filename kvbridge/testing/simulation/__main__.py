"""``python -m kvbridge.testing.simulation``: many seeds, or one of them again."""

import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

import click

from kvbridge.testing.simulation.run import REQUESTS, Result, simulate

VIOLATIONS_SHOWN = 3


class _Seeds(click.ParamType[range]):
    name = "A..B"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> range:
        if isinstance(value, range):
            return value
        first, dots, last = str(value).partition("..")
        if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
            self.fail(f"{value!r} is no range of seeds such as 0..99", param, ctx)
        return range(int(first), int(last) + 1)


@click.command(help="Run the life cycle of requests in virtual time, under faults.")
@click.option("--seeds", type=_Seeds(), default="0..99", show_default=True, help="From A to B.")
@click.option("--requests", default=REQUESTS, show_default=True, help="Requests of each seed.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--replay", type=int, help="Run this seed alone.")
def main(seeds: range, requests: int, jobs: int, replay: int | None) -> None:
    """Run seeds, print what came of them, and exit with 1 if a promise was broken."""
    if replay is not None:
        result = simulate(replay, requests)
        print(result)
        print(_outcomes(result.outcomes))
        sys.exit(result.violation is not None)
    started_s = time.monotonic()
    outcomes: Counter[str] = Counter()
    broken: list[Result] = []
    for done, result in enumerate(_results(seeds, requests, jobs), 1):
        outcomes += result.outcomes
        if result.violation is not None:
            broken.append(result)
            if len(broken) <= VIOLATIONS_SHOWN:
                print(f"\n{result}\n")
        rate = outcomes.total() / (time.monotonic() - started_s)
        end = "\r" if sys.stdout.isatty() and done < len(seeds) else "\n"
        if end == "\r" or done % 50 == 0 or done == len(seeds):
            said = f"{done}/{len(seeds)} seeds, {outcomes.total()} requests, {rate:.0f}/s"
            print(f"{said}, {len(broken)} with violations", end=end, flush=True)
    print(_outcomes(outcomes))
    if broken:
        print(f"broken in seeds {[result.seed for result in broken]}")
        sys.exit(1)


def _results(seeds: range, requests: int, jobs: int) -> Iterator[Result]:
    tasks = ((seed, requests) for seed in seeds)
    if jobs == 1:
        yield from map(_run, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, tasks)


def _run(task: tuple[int, int]) -> Result:
    return simulate(*task)


def _outcomes(outcomes: Counter[str]) -> str:
    total = max(outcomes.total(), 1)
    return "\n".join(
        f"  {count:>9}  {100 * count / total:5.1f} %  {outcome}"
        for outcome, count in outcomes.most_common()
    )


if __name__ == "__main__":
    main()
