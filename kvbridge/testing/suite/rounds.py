"""What rules about leaks have in common."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbridge.testing.process import AgentProcess
from kvbridge.testing.violations import expect

SLACK = {"descriptors": 3, "threads": 2, "private_kib": 8 << 10}
"""What may come and go on its own, whatever the number of rounds."""

WARM_UP_ROUNDS, WARM_UP_ROUNDS_MAX = 8, 50
"""A process that was forked a moment ago has touched little: each round's threads take another of
the allocator's arenas, until all are used (measured: 6 MiB in 50 rounds, 4 in the next 200)."""
SETTLE_S = 5.0

ENOUGH_ROUNDS, ENOUGH_S = 20, 30.0
"""A round of a library that closes slowly takes a second: fewer tell as much, where each leaks."""
SHARED_FILES = Path("/dev/shm")  # noqa: S108  (looked at, not written to)


def check_rounds(
    one_round: Callable[[], None], processes: Sequence[AgentProcess], count: int
) -> None:
    """Break the rule where processes hold more after many rounds than after a few.

    Args:
        one_round: What is repeated.
        processes: Who may not grow.
        count: How often, or less often where that takes long.
    """
    for _ in range(min(max(WARM_UP_ROUNDS, count // 4), WARM_UP_ROUNDS_MAX)):
        one_round()
    time.sleep(0.2)
    before = [process.resources() for process in processes]
    files = _files()
    start, done = time.monotonic(), 0
    while done < count and (done < ENOUGH_ROUNDS or time.monotonic() < start + ENOUGH_S):
        one_round()
        done += 1
    deadline = time.monotonic() + SETTLE_S
    while True:
        grown = [
            word
            for process, was in zip(processes, before, strict=True)
            for word in process.resources().grown_since(was, SLACK)
        ]
        new = _files() - files
        if len(new) >= done:  # others may have made a few meanwhile
            grown.append(f"shared memory was left behind, such as {min(new)}")
        if not grown or time.monotonic() > deadline:
            break
        time.sleep(0.1)  # what is let go may take a moment to end
    expect(not grown, f"after {done} more rounds: {', '.join(grown)}")


def _files() -> set[str]:
    return {file.name for file in SHARED_FILES.iterdir()} if SHARED_FILES.is_dir() else set()
