"""Ctrl-C at the worst moments: while the command, or a process of it, still loads its modules."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi_process


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbridge.cli", *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal would make it
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, complaint = process.communicate(timeout=50)
    return process.returncode, complaint


def commands_of_children(pid: int) -> Iterator[str]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield Path(f"/proc/{child}/cmdline").read_text()


def wait_for_child(process: subprocess.Popen[str], word: str) -> None:
    deadline = time.monotonic() + 40
    while not any(word in words for words in commands_of_children(process.pid)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)


def test_while_the_command_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = start("transports", PYTHONPATH=str(tmp_path))
    assert end(process) == (130, "kvbridge: interrupted\n")


def test_while_the_other_process_of_a_measurement_starts() -> None:
    process = start("bench", "local", "--total", "64KiB")
    wait_for_child(process, "spawn_main")
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "kvbridge: interrupted\n")


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.5, 1.0])
def test_while_rules_are_tried(tmp_path: Path, after_s: float) -> None:
    process = start("conformance", "local", "--json", "--report", str(tmp_path / "found.json"))
    wait_for_child(process, "kvbridge.testing.peer")
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "kvbridge: interrupted\n")
    deadline = time.monotonic() + 20
    while True:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return  # nobody of them is left
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_while_the_network_of_the_demo_is_made() -> None:
    process = start("demo")
    wait_for_child(process, "namespaces.py")
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "kvbridge: interrupted\n")
