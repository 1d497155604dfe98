"""Forked as they are, the processes of agents are what new interpreters would be."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbridge.namespaces import NetworkNamespace, private_network
from kvbridge.testing import TransportHarness
from kvbridge.testing.forkserver import ForkServer, fork_server
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.process import AgentProcess
from kvbridge.testing.serve import PROCESS
from kvbridge.transport import Availability
from kvbridge.transport.local import LocalTransport

pytestmark = pytest.mark.multi_process


def network() -> str:
    return str(Path("/proc/thread-self/ns/net").readlink())


class Telltale(LocalTransport):
    """Tells of its process when it is asked whether it can run."""

    name = "telltale"

    @classmethod
    def probe(cls) -> Availability:
        sys.stdout.write("out loud\n")
        sys.stdout.flush()
        sys.stderr.write("in error\n")
        facts = {
            "environment": dict(os.environ),
            "home": str(Path.cwd()),
            "path": sys.path,
            "input": str(Path("/proc/self/fd/0").readlink()),
            "descriptors": len(list(Path("/proc/self/fd").iterdir()))
            - 1,  # without that of the list
            "network": network(),
            "hash": hash("kvbridge"),
            "parent": os.getppid(),
        }
        return Availability(True, json.dumps(facts), "")


@contextmanager
def process_of(
    memory: SharedMemory,
    environment: Mapping[str, str] = {},
    namespace: NetworkNamespace | None = None,
) -> Iterator[AgentProcess]:
    process = AgentProcess(TransportHarness(Telltale, environment=environment), memory, namespace)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.make()
    yield made
    made.close()


def facts_of(process: AgentProcess) -> dict[str, Any]:
    _, facts, _ = process.start(process.new_agent(), "probe").result(20)
    found: dict[str, Any] = json.loads(facts)
    return found


def test_it_begins_like_a_new_interpreter(
    memory: SharedMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with process_of(memory):
        pass  # there is a server that has seen nothing of what follows
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("UCX_ONE", "1")
    monkeypatch.delenv("HOME", raising=False)
    with process_of(memory, {"UCX_TWO": "2"}) as process:
        facts = facts_of(process)
    assert facts["environment"] == {**os.environ, "UCX_TWO": "2"}
    assert facts["home"] == str(tmp_path)
    assert facts["path"] == sys.path
    assert facts["input"] == "/dev/null"
    assert facts["descriptors"] == 6  # the standard ones, its pipe, and its memory, mapped
    assert capfd.readouterr() == ("out loud\n", "in error\n")


def test_what_only_a_start_heeds_is_there_at_the_start(memory: SharedMemory) -> None:
    given = {"LD_LIBRARY_PATH": "/nowhere", "PYTHONHASHSEED": "7"}
    with process_of(memory, given) as process, process_of(memory) as other:
        first, second = facts_of(process), facts_of(other)
        start = Path(f"/proc/{first['parent']}/environ").read_text().split("\0")
    assert {f"{name}={value}" for name, value in given.items()} <= set(start)
    assert first["parent"] != second["parent"]
    seeded = [sys.executable, "-c", "print(hash('kvbridge'))"]
    said = subprocess.check_output(seeded, env={**os.environ, **given}, text=True)
    assert first["hash"] == int(said)


def test_neighbours_have_little_in_common(memory: SharedMemory) -> None:
    with process_of(memory) as one, process_of(memory) as two, process_of(memory) as three:
        assert len({process.base for process in (one, two, three)}) == 3
        hashes = [facts_of(process)["hash"] for process in (one, two)]
    assert hashes[0] != hashes[1]


@pytest.mark.usefixtures("network_namespaces")
def test_it_is_in_the_network_that_it_is_given_or_else_in_ours(memory: SharedMemory) -> None:
    namespace = NetworkNamespace()
    with process_of(memory, namespace=namespace) as given, process_of(memory) as ours:
        given_network, our_network = (facts_of(process)["network"] for process in (given, ours))
        inode = os.fstat(namespace.descriptors[-1]).st_ino
    namespace.close()
    assert given_network == f"net:[{inode}]"
    assert our_network == network()
    if os.geteuid() == 0:
        with private_network(), process_of(memory) as process:
            assert facts_of(process)["network"] == network()


def test_the_server_has_one_thread_and_no_transport(memory: SharedMemory) -> None:
    server = fork_server(os.environ)
    with process_of(memory) as process:
        loaded = process.start(PROCESS, "loaded_modules").result(20)
        assert psutil.Process(server.pid).num_threads() == 1
    assert {"numpy", "kvbridge.transport"} <= set(loaded)
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert not [word for word in ("libuc", "nixl", "mooncake") if word in mapped]


def test_several_threads_start_processes(memory: SharedMemory) -> None:
    hashes: list[int] = []

    def start() -> None:
        for _ in range(5):
            with process_of(memory) as process:
                hashes.append(facts_of(process)["hash"])

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert len(hashes) == 20
    assert len(set(hashes)) == 2  # from two servers in turn


def test_a_server_that_has_ended_is_replaced(memory: SharedMemory) -> None:
    ended: list[ForkServer] = [fork_server(os.environ) for _ in range(2)]
    with process_of(memory) as process:
        _ = process.base
        for server in ended:
            psutil.Process(server.pid).kill()
            while not server.has_ended:
                time.sleep(0.01)
        with pytest.raises(ChildProcessError, match=r"server that forks .* has ended"):
            _ = process.exit_code
        with process_of(memory) as other:
            assert facts_of(other)["hash"]
        orphan = process.pid
        process._pipe.close()
        process._process._exit_code = 0
    with suppress(psutil.NoSuchProcess):
        psutil.Process(orphan).wait(10)


SUITE = """
import os, sys, time
from kvbridge.testing import TransportHarness
from kvbridge.testing.bench import Laboratory
laboratory = Laboratory(TransportHarness("local"))
laboratory.pair("processes")
print("ready", flush=True)
time.sleep(60)
"""


def test_a_suite_that_is_killed_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", SUITE], stdout=subprocess.PIPE) as suite:
        assert suite.stdout is not None
        assert suite.stdout.readline() == b"ready\n"
        processes = psutil.Process(suite.pid).children(recursive=True)
        suite.kill()
    assert len(processes) == 5  # two servers, a pair, and one in advance
    assert not psutil.wait_procs(processes, 10)[1]
