"""Faults that others have met in transports, and the rules that make each impossible.

Every transport's own test file runs these rules too; here the ids are kept together with them.
"""

import os
import subprocess
import sys

import pytest

from kvbridge.testing import Status, TransportHarness, run_suite
from kvbridge.transport.local import LocalTransport

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(85)]


@pytest.mark.parametrize(
    "rules",
    [
        # Data and notice: none lost, none twice, none early, and a full queue loses nothing.
        pytest.param(("NOTIFY-01", "NOTIFY-04", "NOTIFY-07", "READ-09"), id="B40"),
        # Giving up does not free memory that is still written to.
        pytest.param(("REG-04", "ABANDON-02", "ABANDON-03"), id="B43"),
        # Peers are added in one thread while another submits and polls.
        pytest.param(("CONC-04",), id="B54"),
        # What is announced is registered to its last byte.
        pytest.param(("READ-03", "READ-05", "WRITE-05"), id="B59"),
        # A forked child gets a clear error, and its parent goes on.
        pytest.param(("LIFE-08",), id="B62"),
    ],
)
def test_a_report_is_a_rule(rules: tuple[str, ...]) -> None:
    report = run_suite(TransportHarness(LocalTransport), rules=list(rules))
    for rule in rules:
        assert report.by_rule()[rule].status is Status.PASSED, report.by_rule()[rule].detail


FORK = """
import os, sys
import numpy as np
from kvbridge.errors import TransportError
from kvbridge.model import memory_region
from kvbridge.transport import Descriptors, State, open_transport

def move(transport, memory):
    region = memory_region(memory)
    transport.register([region])
    peer = transport.add_peer(transport.agent_info(), [region], timeout_s=5)
    here, there = (Descriptors([region.address + at], [4]) for at in (0, 4))
    transport.submit("read", peer, here, there)
    while not (finished := transport.poll().finished):
        pass
    return finished[0].state is State.DONE and bool((memory[:4] == 7).all())

parent, memory = open_transport({"transport": "local"}), np.full(8, 7, np.uint8)
memory[:4] = 0
child = os.fork()
if not child:
    try:
        parent.agent_info()
    except TransportError as error:
        refused = "forked child" in str(error)
    else:
        refused = False
    anew = np.full(8, 7, np.uint8)
    anew[:4] = 0
    os._exit(0 if refused and move(open_transport({"transport": "local"}), anew) else 1)
status = os.waitpid(child, 0)[1]
sys.exit(status or not move(parent, memory))
"""


def test_b62_a_forked_child_sets_up_anew() -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    result = subprocess.run(
        [sys.executable, "-c", FORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
