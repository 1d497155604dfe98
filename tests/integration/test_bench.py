"""``kvbridge bench``: real transfers between real processes, small ones."""

import json
import os
import re
import signal
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kvbridge.bench import BenchError, Case, Pair, measure
from kvbridge.bench import pair as pair_module
from kvbridge.cli import main
from kvbridge.errors import ConfigError
from kvbridge.processes import start_uninterrupted
from kvbridge.transport import Descriptors, Op, Transport

pytestmark = pytest.mark.multi_process

SMALL = ("--total", "256KiB", "--block", "4KiB", "--block", "64k", "--runs", "2")


@pytest.mark.parametrize("name", ["local", "nixl", "ucx"])
def test_every_case_is_measured(
    name: str,
    usable_transport: Callable[[str], type[Transport]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    usable_transport(name)
    assert main(["bench", name, *SMALL, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert [(m["op"], m["layout"], m["block_nbytes"]) for m in measured] == [
        (op, layout, block)
        for op in ("read", "write")
        for layout in ("contiguous", "scattered")
        for block in (4096, 65536)
    ]
    for entry in measured:
        assert entry["transport"] == name
        assert entry["nbytes"] == 256 << 10
        assert len(entry["seconds"]) == 2
        low, median, high = entry["gbps"].values()
        assert 0 < low <= median <= high


@pytest.mark.parametrize("name", ["bench.png", "BENCH.PNG"])
def test_a_table_and_a_picture(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / name
    assert main(["bench", "local", *SMALL, "--op", "read", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "scattered" in out
    assert "64 KiB" in out
    assert "write" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "locall"], "did you mean 'local'"),
        (["bench", "local", "--block", "many"], "'many' is no number of bytes"),
        (["bench", "local", "--block", "0"], "0 bytes"),
        (["bench", "local", "--total", "5TiB"], "'5TiB' is no number of bytes"),
        (["bench", "local", "--total", "8GiB"], "8589934592 bytes"),
        (["bench", "local", "nixl", "--option", "a=1"], "--option is for one transport, 2"),
        (["bench", "--option", "a=1"], "--option is for one transport; name it"),
        (["bench", "local", "--option", "nonsense=1"], "nonsense"),
        (["bench", "local", "--plot", "x.gif"], ".png"),
        (["bench", "local", "--plot", "/nowhere/x.png"], "no folder /nowhere"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not captured.out


def test_neighbours_are_blocks_of_their_own_and_scattered_ones_never_touch() -> None:
    contiguous = Case("read", 4096, "contiguous", 1 << 20).pieces(1 << 20, 1)
    assert len(contiguous) == 256
    scattered = Case("read", 4096, "scattered", 1 << 20)
    starts = sorted(scattered.pieces(1 << 20, 1).address.tolist())
    assert {b - a for a, b in pairwise(starts)} == {8192}
    assert starts[-1] + 4096 <= (1 << 20) + scattered.arena_nbytes


def test_a_block_larger_than_the_transfer_is_one_block() -> None:
    assert Case("read", 8192, "scattered", 100).nbytes == 8192
    with pytest.raises(ConfigError, match="-1 bytes"):
        Case("read", -1, "scattered")


def test_wrong_bytes_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Pair.transfer

    def reversed_there(pair: Pair, op: Op, local: Descriptors, remote: Descriptors) -> float:
        return transfer(pair, op, local, Descriptors(remote.address[::-1], remote.nbytes))

    monkeypatch.setattr(Pair, "transfer", reversed_there)
    with pytest.raises(BenchError, match="moved other bytes"):
        measure({"transport": "local"}, [Case("read", 4096, "scattered", 1 << 16)], runs=1)


def test_the_death_of_the_other_process_is_told() -> None:
    with Pair({"transport": "local"}, 1 << 20) as pair:
        pair._process.kill()
        pair._process.join()
        with pytest.raises(BenchError, match="ended by itself"):
            pair.fill(1, 2)


def test_a_process_that_is_stopped_while_it_starts_is_told_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_and_stop(process: BaseProcess) -> None:
        start_uninterrupted(process)
        assert process.pid
        os.kill(process.pid, signal.SIGSTOP)

    assert pair_module.START_S <= 15
    monkeypatch.setattr(pair_module, "START_S", 1.0)
    monkeypatch.setattr(pair_module, "start_uninterrupted", start_and_stop)
    with pytest.raises(BenchError, match="did not answer within 1 s") as raised:
        Pair({"transport": "local"}, 1 << 20)
    found = re.search(r"process (\d+), which owns the memory", str(raised.value))
    assert found
    assert not Path("/proc", found[1]).exists()


def test_no_process_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(_children())
    assert main(["bench", "local", *SMALL, "--op", "read"]) == 0
    assert set(_children()) <= before


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
