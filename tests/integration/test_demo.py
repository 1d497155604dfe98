"""The demo as a user runs it: every pair of shapes, every mistake, and ranks that die."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvbridge.cli import main
from kvbridge.transport import Transport

SMALL = ["--layers", "2", "--tokens", "4"]
STARTED_S = 60
GONE_S = 20

PAIRS = {
    "tp2 to tp4": ["--prefill", "tp=2", "--decode", "tp=4"],
    "tp4 to tp2": ["--prefill", "tp=4", "--decode", "tp=2"],
    "tp2 pp2 to tp1": ["--prefill", "tp=2,pp=2", "--decode", "tp=1"],
    "tp3 to tp2 with 6 heads": ["--prefill", "tp=3", "--decode", "tp=2", "--heads", "6"],
    "tp8 to tp2 with 4 heads": ["--prefill", "tp=8", "--decode", "tp=2", "--heads", "4"],
    "nhd to hnd": ["--prefill", "layout=nhd", "--decode", "layout=hnd"],
    "tp1 to pp2": ["--prefill", "tp=1", "--decode", "pp=2", "--layers", "3"],
    "apart to together": ["--prefill", "kv=apart,page=8", "--decode", "kv=together,page=12"],
}
QUICK_PAIRS = {"tp3 to tp2 with 6 heads", "tp1 to pp2"}


@pytest.mark.parametrize(
    "pair", [name if name in QUICK_PAIRS else pytest.param(name, marks=pytest.mark.full)
             for name in PAIRS]
)  # fmt: skip
@pytest.mark.timeout(240)
def test_every_pair_of_shapes_is_equal(
    pair: str, transport_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status = main(["demo", "--transport", transport_name, *SMALL, *PAIRS[pair], "--json"])
    report = json.loads(capfd.readouterr().out)
    assert status == 0, report
    assert report["equal"] is True
    assert report["tokens"] == report["reference"]
    assert len(report["tokens"]) == 4
    assert report["transport"] == transport_name
    for rank in report["ranks"]:
        assert rank["seconds"] > 0
        assert sum(read["nbytes"] for read in rank["reads"]) > 0
        for read in rank["reads"]:
            assert 1 <= read["merged"] <= read["copies"]


def test_prefill_writes_where_it_is_told_to(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, *PAIRS["tp1 to pp2"], "--direction", "push", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["equal"] is True
    assert main(["demo", "--direction", "push", "--break", "local"]) == 2
    assert "leave one of the two out" in capfd.readouterr().err


def test_a_prompt_of_one_byte_moves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_bytes(b"?")
    assert main(["demo", *SMALL, "--prefill", "tp=1", "--decode", "tp=1",
                 "--prompt-file", str(prompt), "--json"]) == 0  # fmt: skip
    report = json.loads(capfd.readouterr().out)
    assert (report["equal"], report["ranks"][0]["reads"]) == (True, [])


def test_people_get_a_table_and_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--prefill", "tp=1", "--decode", "tp=1", "--explain"]) == 0
    shown = capfd.readouterr().out
    for words in ("decode rank", "merged", "GB/s", "pp 0 tp 0", "reads from 1 ranks", "equal"):
        assert words in shown


def test_what_the_first_transport_cannot_move_the_second_one_does(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["demo", *SMALL, "--transport", "nixl,local", "--break", "nixl", "--decode", "tp=2"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert "nixl failed on 2 ranks (as asked: it was broken on purpose); local went on" in shown
    assert main([*words, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["equal"], report["transport"]) == (True, "nixl,local")
    for rank in report["ranks"]:
        assert (rank["via"], rank["failovers"]) == ("local", [["nixl", "local"]])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_listens_to_everybody_needs_no_option_in_the_network_of_the_demo(
    usable_transport: Callable[[str], type[Transport]], network_namespaces: None
) -> None:
    for name in ("nixl", "mooncake"):
        usable_transport(name)
    ended = subprocess.run(
        [sys.executable, "-m", "kvbridge.cli", "demo",
         "--transport", "nixl,mooncake", "--break", "nixl"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "nixl failed on 4 ranks (as asked: it was broken on purpose); mooncake went on" in (
        ended.stdout.splitlines()
    )
    assert ended.stdout.splitlines()[-1] == "equal: every token, and every byte that moved"


def test_if_every_transport_fails_the_reasons_are_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", *SMALL, "--break", "local", "--decode", "tp=1"]) == 2
    complaint = capfd.readouterr().err
    assert complaint.startswith("kvbridge: error: decode rank (0, 0): request 'request-0' failed: ")
    assert "a fault that was asked for" in complaint
    assert complaint.count("\n") == 1


# --- the network -------------------------------------------------------------------------------

SMALLEST = ["demo", *SMALL, "--prefill", "tp=1", "--decode", "tp=1", "--json"]


@pytest.mark.parametrize(
    ("words", "network"),
    [
        ([], "own"),
        (["--share-network"], "shared"),
        (["--option", "slice_bytes=65536"], "shared"),
        (["--option", "slice_bytes=65536", "--isolate-network"], "own"),
    ],
)
def test_the_ranks_have_a_network_of_their_own_unless_the_hosts_may_be_meant(
    words: list[str], network: str, network_namespaces: None
) -> None:
    command = [sys.executable, "-m", "kvbridge.cli", *SMALLEST, *words]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(said)["network"] == network


def test_who_calls_the_demo_stays_in_his_own_network(capfd: pytest.CaptureFixture[str]) -> None:
    before = network_of(os.getpid())
    assert main(SMALLEST) == 0
    assert network_of(os.getpid()) == before


def test_no_rank_is_in_the_network_of_the_host(
    network_namespaces: None, starting: "Running"
) -> None:
    starting.wait_for_ranks(5, threads=1)
    assert network_of(os.getpid()) not in {network_of(rank.pid) for rank in starting.ranks}


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115


def test_a_port_is_one_of_this_host(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main([*SMALLEST, "--port", str(port)]) == 0
    assert json.loads(capfd.readouterr().out)["network"] == "shared"


def in_user_namespace(*setup: str) -> list[str]:
    """Return the words that run a command as somebody to whom the kernel grants less."""
    prefix = ["unshare", "--user", *setup]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace can be made here")
    return prefix


def test_without_root_the_demo_has_a_network_of_its_own_too() -> None:
    prefix = in_user_namespace("--map-user=1000", "--map-group=1000")
    command = [*prefix, sys.executable, "-m", "kvbridge.cli", *SMALLEST]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (report["equal"], report["network"]) == (True, "own")


def test_where_no_network_can_be_made_the_demo_does_without_and_opens_no_ports(
    shared_network: None, usable_transport: Callable[[str], type[Transport]]
) -> None:
    usable_transport("mooncake")
    allow_none = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    prefix = in_user_namespace("--map-root-user", "sh", "-c", allow_none, "sh")

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        command = [*prefix, sys.executable, "-m", "kvbridge.cli", *SMALLEST, *words]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        return ended.returncode, json.loads(ended.stdout)

    status, report = run()
    assert (status, report["equal"], report["network"]) == (0, True, "shared")
    status, error = run("--transport", "mooncake")
    assert (status, error["error"]) == (2, "ConfigError")
    assert "every interface, without authentication" in error["message"]
    status, error = run("--isolate-network")
    assert (status, error["error"]) == (2, "TransportUnavailableError")
    assert "no network namespace of its own can be made here" in error["message"]


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--transport", "nixi"], "did you mean 'nixl'? found: faulty, local"),
        (["--option", "slice=1"], "unknown option 'slice'"),
        (["--option", "nonsense"], "KEY=VALUE"),
        (["--break", "nixl"], "to break nixl: not among the transports local"),
        (["--transport", "local,nixl", "--option", "a=1"], "write local.a=..."),
        (["--transport", "local,nixl", "--option", "ucx.a=1"], "options for ucx: not among"),
        (["--transport", "local,local"], "two connectors are called 'local'"),
        (["--heads", "0"], "kv_heads is 0; it must be >= 1"),
        (["--heads", "two"], "'two' is not a valid integer"),
        (["--layers", "2", "--prefill", "pp=3"], "pp=3 is not possible: the model has only 2"),
        (["--layers", "0"], "layers is 0"),
        (["--layers", "1000000"], "1000000 layers of the model are not possible"),
        (["--heads", "1000000"], "1000000 KV heads of the model are not possible"),
        (["--prefill", "tp=1000000"], "1000000 ranks of an engine, each a process, are not"),
        (["--decode", "page=1000000000000"], "1000000000000 tokens of a page are not possible"),
        (["--tokens", "100000000000"], "100000000000 tokens to write are not possible"),
        (["--prefill", "tp=0"], "tp=0 is not possible"),
        (["--prefill", "tp=2,colour=red"], "unknown key 'colour'"),
        (["--decode", "page=-1"], "page=-1 is not possible"),
        (["--decode", "layout=dnh"], "allowed: nhd or hnd"),
        (["--tokens", "0"], "0 tokens to write are not possible here; choose 1 to"),
        (["--prompt-file", "/dev/zero"], "the prompt has 4097 bytes"),
        (["--timeout", "inf"], "timeout inf must be"),
        (["--timeout", "nan"], "timeout nan must be"),
        (["--option", "slice_bytes=many"], "option 'slice_bytes' is 'many': expected int"),
        (["--prompt-file", "/nowhere/at/all"], "No such file"),
        (["--prompt-file", "/dev/null"], "the prompt has 0 bytes"),
        (["--port", "70000"], "option 'port' is 70000"),
        (["--timeout", "-1"], "timeout -1"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.startswith("kvbridge: error: ")
    assert said.err.count("\n") == 1

    assert main(["demo", *words, "--json"]) == 2
    error = json.loads(capfd.readouterr().out)
    assert set(error) == {"error", "message"}
    assert message in error["message"]


def test_a_port_in_use_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["demo", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["transports"], ["demo", "--help"], ["--version"]])
def test_a_full_disk_is_one_line_and_status_2(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvbridge.cli", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr == "kvbridge: error: No space left on device\n"


def test_a_reader_that_went_away_is_no_error_of_ours() -> None:
    command = f"{sys.executable} -m kvbridge.cli demo --help | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode in (0, 128 + signal.SIGPIPE)
    assert result.stderr == ""


def test_too_few_open_files_are_one_line_and_status_2() -> None:
    command = f"ulimit -n 40; exec {sys.executable} -m kvbridge.cli demo --prefill tp=8"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Too many open files" in result.stderr


def test_an_unknown_command_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["dmeo"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


# --- what goes wrong while it runs -------------------------------------------------------------


class Running:
    """A demo in a process of its own, that goes on until something ends it."""

    def __init__(self, tmp_path: Path) -> None:
        prompt = tmp_path / "prompt"
        prompt.write_bytes(b"to be continued " * 60)
        command = [sys.executable, "-m", "kvbridge.cli", "demo", "--prefill", "tp=2",
                   "--decode", "tp=2", "--tokens", "100000", "--prompt-file", str(prompt),
                   "--timeout", "15"]  # fmt: skip
        self.files_before = set(shared_files())
        # A process group of its own, as a terminal gives it, so that Ctrl-C can reach all of it.
        self.process = psutil.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.ranks: list[psutil.Process] = []

    def wait_for_ranks(self, count: int, threads: int = 2) -> None:
        """Wait until so many ranks run so many threads each: with two they are up."""
        self.ranks = self._wait_for_ranks(count, threads)

    def _wait_for_ranks(self, count: int, threads: int) -> list[psutil.Process]:
        deadline_s = time.monotonic() + STARTED_S
        while time.monotonic() < deadline_s:
            ranks = [child for child in self.process.children() if _is_rank(child)]
            if len(ranks) >= count and all(child.num_threads() >= threads for child in ranks):
                return sorted(ranks, key=lambda rank: rank.pid)  # prefill first
            time.sleep(0.1)
        raise AssertionError(f"{count} ranks did not come up: {self.process.children()}")

    def end(self) -> tuple[int, str]:
        """Wait until the demo has ended by itself; return its status and what it complained of."""
        _, complaint = self.process.communicate(timeout=120)
        return self.process.returncode, complaint

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(self.ranks, timeout=GONE_S)
        assert alive == []
        assert set(shared_files()) <= self.files_before


def _is_rank(child: psutil.Process) -> bool:
    try:
        return any("spawn_main" in word for word in child.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # what a rank asked, and it has ended
        return False


def shared_files() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if "kvbridge" in path.name]


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Running]:
    demo = Running(tmp_path)
    yield demo
    for process in [demo.process, *demo.ranks]:
        if process.is_running():
            process.kill()
    demo.process.communicate()


@pytest.fixture
def running(starting: Running) -> Running:
    starting.wait_for_ranks(5)
    return starting


@pytest.mark.timeout(180)
def test_a_rank_that_is_killed_ends_the_demo_in_one_line(running: Running) -> None:
    running.ranks[0].kill()
    status, complaint = running.end()
    assert status == 2
    assert "Traceback" not in complaint
    assert "kvbridge: error: " in complaint
    running.assert_nothing_left()


@pytest.mark.timeout(180)
def test_a_rank_that_never_answers_ends_the_demo_in_one_line(running: Running) -> None:
    running.ranks[0].suspend()
    status, complaint = running.end()
    assert status == 2
    assert "Traceback" not in complaint
    assert "kvbridge: error: " in complaint
    running.assert_nothing_left()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(running: Running, sent: signal.Signals) -> None:
    running.process.send_signal(sent)
    status, complaint = running.end()
    assert status not in (0, 1)
    assert "Traceback" not in complaint
    running.assert_nothing_left()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("threads", [1, 2], ids=["while ranks start", "once they run"])
def test_ctrl_c_in_a_terminal_is_one_line(starting: Running, threads: int) -> None:
    """It reaches the ranks too, but what it means is decided in one place."""
    starting.wait_for_ranks(2 if threads == 1 else 5, threads)
    os.killpg(starting.process.pid, signal.SIGINT)
    status, complaint = starting.end()
    assert (status, complaint) == (130, "kvbridge: interrupted\n")
    starting.assert_nothing_left()


@pytest.mark.timeout(180)
def test_a_killed_demo_leaves_nothing_not_even_a_rank_that_was_stopped(running: Running) -> None:
    running.ranks[0].suspend()
    running.process.kill()
    running.end()
    running.assert_nothing_left()


# --- what is there -----------------------------------------------------------------------------


def test_transports_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["transports", "--json"]) == 0
    entries: dict[str, Any] = {e["name"]: e for e in json.loads(capfd.readouterr().out)}
    assert {"local", "nixl"} <= set(entries)
    local = entries["local"]
    assert set(local) == {"name", "ok", "reason", "hint", "capabilities", "options"}
    assert local["ok"] is True
    assert local["capabilities"]["read"] is True
    assert main(["transports"]) == 0
    assert "local" in capfd.readouterr().out
