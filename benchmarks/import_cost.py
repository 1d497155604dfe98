"""How long `import kvbridge` takes, as a multiple of `import numpy` in the same run.

Both are timed in fresh interpreters, turn by turn, so that a busy machine slows both; the figure
is the median of the ratios. What an interpreter needs to start is not counted.
"""

import statistics
import subprocess
import sys

PROGRAM = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
RUNS = 15


def seconds_to_import(module: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return float(subprocess.check_output(command, text=True))


def main() -> None:
    pairs = [(seconds_to_import("kvbridge"), seconds_to_import("numpy")) for _ in range(RUNS)]
    ratio = statistics.median(ours / numpy for ours, numpy in pairs)
    ours, numpy = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    print(f"import kvbridge {ours:.1f} ms, import numpy {numpy:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
