"""Every example runs, and the README quotes one of them to the letter."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbridge.connector import Request
from tests.integration.test_interrupts import end, wait_for_child

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "examples/embedded_engine.py"
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {EMBEDDED})


@pytest.mark.multi_process
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, transport_name: str) -> None:
    subprocess.run([sys.executable, example, transport_name], check=True, timeout=30)


def start_embedded(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, EMBEDDED, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal would make it
    )


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("transport", "cache"), [("local", "numpy"), ("local", "torch"), ("nixl", "numpy")]
)
def test_embedded_engine(
    transport: str, cache: str, usable_transport: Callable[[str], Any]
) -> None:
    usable_transport(transport)
    process = start_embedded("--transport", transport, "--cache", cache)
    said, complaint = process.communicate(timeout=50)
    assert process.returncode == 0, complaint
    assert "decode: 50 tokens loaded, 1 computed, and all of them are right" in said
    assert "prefill: the blocks of r are free" in said


@pytest.mark.multi_process
def test_embedded_engine_computes_what_a_killed_one_held() -> None:
    process = start_embedded("--kill")
    said, complaint = process.communicate(timeout=50)
    assert process.returncode == 0, complaint
    assert "decode: nothing was loaded, so it is computed: no answer from 127.0.0.1:" in said
    assert "decode: 0 tokens loaded, 51 computed, and all of them are right" in said


@pytest.mark.multi_process
def test_embedded_engine_fails_a_request_where_that_is_configured() -> None:
    process = start_embedded("--kill", "--on-failure", "fail")
    said, complaint = process.communicate(timeout=50)
    assert process.returncode == 0, complaint
    assert "decode: nothing was loaded, so the request fails: no answer from 127.0.0.1:" in said
    assert "computed, and all of them are right" not in said


def test_embedded_engine_sleeps_while_a_request_is_loaded_and_wakes_up() -> None:
    """Both engines in one process, and nobody steps the other one."""
    spec = importlib.util.spec_from_file_location("embedded_engine", EMBEDDED)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    config = {"transport": "local"}
    with (
        contextlib.closing(example.Engine("p", config, "numpy")) as p,
        contextlib.closing(example.Engine("d", config, "numpy")) as d,
    ):
        for request_id in ("r", "s"):
            params = example.prefill(p, Request(request_id, 50, params={"do_remote_decode": True}))
            p.step()
            request = Request(request_id, 50, params=params)
            assert d.scheduler.get_num_new_matched_tokens(request, 0) == (50, True)
            blocks = d.allocate(request_id, 51)
            d.scheduler.update_state_after_alloc(request, (blocks,), 50)
            d.given_up.add(request_id)  # its blocks are free once it has been loaded
            d.step()
            d.sleep()
            assert request_id not in d.blocks
            p.sleep()
            d.wake()
            p.wake()


@pytest.mark.multi_process
def test_embedded_engine_is_interrupted() -> None:
    process = start_embedded()
    wait_for_child(process, "spawn_main")
    os.killpg(process.pid, signal.SIGINT)
    assert end(process) == (130, "")


def test_embedded_engine_refuses_a_wrong_transport() -> None:
    status, complaint = end(start_embedded("--transport", "nix"))
    assert status == 1
    assert complaint.startswith("embedded_engine: no transport named 'nix'; did you mean 'nixl'?")
    assert complaint.count("\n") == 1


def test_readme_quotes_an_example() -> None:
    _, block = (ROOT / "README.md").read_text().split("```python\n")
    quoted = block.split("```")[0]
    assert any(quoted in example.read_text() for example in EXAMPLES)
