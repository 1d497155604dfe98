"""Fuzz what reads others' messages, guided by coverage: ``python -m tests.fuzz [TARGET ...]``.

Each target runs in a process of its own, from real messages that are changed in their structure
and in their bytes. Exits with 1 if one raised anything but our own errors, or took too long or too
much memory for one message; that message is kept.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import seeds
from tests.fuzz.targets import TARGETS

MESSAGE_S = 60  # of the clock, and the machine may be busy
RSS_MAX_MB = 600
MESSAGE_MAX = 64 << 10


def fuzz(target: str, seconds: int, folder: Path) -> tuple[int, bool]:
    """Fuzz one target; return how many messages it got, and whether it failed."""
    corpus = folder / target
    corpus.mkdir(parents=True, exist_ok=True)
    for i, message in enumerate(seeds.messages()[target]):
        (corpus / f"seed-{i}").write_bytes(message)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.one", target, str(corpus)),
            f"-max_total_time={seconds}",
            f"-timeout={MESSAGE_S}",
            f"-rss_limit_mb={RSS_MAX_MB}",
            f"-max_len={MESSAGE_MAX}",
            f"-artifact_prefix={folder}/{target}-",
            "-print_final_stats=1",
        ],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 120,
    )
    executed = re.search(r"stat::number_of_executed_units: (\d+)", done.stderr)
    failed = done.returncode != 0 or executed is None
    if failed:
        sys.stderr.write(f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}\n")
    return int(executed[1]) if executed else 0, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--folder", type=Path, help="where to keep what was found")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kvbridge-fuzz-"))
    failures = 0
    for target in arguments.targets or TARGETS:
        executed, failed = fuzz(target, arguments.seconds, folder)
        failures += failed
        verdict = f"FAILED, see {folder}/{target}-*" if failed else "nothing found"
        sys.stdout.write(f"{target:8} {executed:9,} messages, {verdict}\n")
        sys.stdout.flush()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
