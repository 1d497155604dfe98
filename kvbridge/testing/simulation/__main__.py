"""``python -m kvbridge.testing.simulation``: many seeds, or one of them again."""

import sys
import time
from collections import Counter

import click

from kvbridge.testing.simulation.run import REQUESTS, Result, simulate, simulate_all

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
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
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
    for done, result in enumerate(simulate_all(seeds, requests, jobs), 1):
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


def _outcomes(outcomes: Counter[str]) -> str:
    total = max(outcomes.total(), 1)
    return "\n".join(
        f"  {count:>9}  {100 * count / total:5.1f} %  {outcome}"
        for outcome, count in outcomes.most_common()
    )


if __name__ == "__main__":
    main()
