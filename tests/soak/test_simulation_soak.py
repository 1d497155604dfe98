"""A million requests in a thousand plants; an hour of two processors."""

import os
import subprocess
import sys

import pytest

SEEDS = os.environ.get("KVBRIDGE_SOAK_SEEDS", "0..999")
REQUESTS = os.environ.get("KVBRIDGE_SOAK_REQUESTS", "1000")


@pytest.mark.soak
@pytest.mark.multi_process
@pytest.mark.timeout(4 * 3600)
def test_every_promise_is_kept_a_million_times() -> None:
    command = [sys.executable, "-m", "kvbridge.testing.simulation", "--jobs", str(os.cpu_count())]
    done = subprocess.run([*command, "--seeds", SEEDS, "--requests", REQUESTS], check=False)
    assert done.returncode == 0, "a promise was broken; the seeds are printed above"
