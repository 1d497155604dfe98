"""The suite as a product: its rules, waivers, reports, and what a stranger writes and reads."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbridge.cli import main
from kvbridge.errors import ConfigError, TransportError
from kvbridge.testing import (
    ConformanceSuite,
    Outcome,
    Report,
    RuleViolationError,
    Status,
    TransportHarness,
    Waiver,
    all_rules,
    run_suite,
)
from kvbridge.testing import harness as harness_module
from kvbridge.testing.bench import Bench, Laboratory
from kvbridge.testing.first_step import FirstStep
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.process import AgentProcess
from kvbridge.testing.remote import parts_within
from kvbridge.testing.rules import GROUPS, Rule, rule
from kvbridge.testing.runner import run_rule
from kvbridge.testing.violations import NotApplicable, expect_bytes, expect_equal, expect_raises
from kvbridge.transport import Availability, Capabilities, Peer, Region, Transport, TransportConfig
from kvbridge.transport.local import LocalTransport


class Misnamed(LocalTransport):
    """Breaks LIFE-01 and nothing else, and needs no process to show it."""

    name = "Mis Named"


class Absent(LocalTransport):
    name = "absent"

    @classmethod
    def probe(cls) -> Availability:
        return Availability(False, "it is not there", "pip install it")


class Unwritten(LocalTransport):
    """As a new project is."""

    name = "unwritten"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        raise TransportError("not written yet")


class Choosy(LocalTransport):
    name = "choosy"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        raise ConfigError("set option risk=true")


def waiver(kind: Any = "unsupported", of: str = "LIFE-01") -> Waiver:
    return Waiver(of, kind, "the library likes blanks", "https://example.org/1")


# ------------------------------------------------------------------------------- the rules


def test_each_rule_is_a_method_of_the_one_public_class() -> None:
    rules = all_rules()
    assert len(rules) >= 90
    for one in rules.values():
        assert getattr(ConformanceSuite, one.method) is one.function
        assert one.sentence.endswith(".")
    methods = {name for name in dir(ConformanceSuite) if name.startswith("test_")}
    assert methods == {one.method for one in rules.values()}
    assert {one.group for one in rules.values()} == set(GROUPS)


def test_a_rule_is_entered_once_and_in_a_known_group() -> None:
    def test_read_sizes(self: object, bench: Bench) -> None:
        raise NotImplementedError

    with pytest.raises(ValueError, match="READ-01 exists already"):
        rule("READ-01", "Another sentence.")
    with pytest.raises(ValueError, match="none of the groups"):
        rule("SING-01", "It sings.")
    with pytest.raises(ValueError, match="has a method test_read_sizes"):
        rule("READ-99", "The same name.")(test_read_sizes)
    assert "READ-99" not in all_rules()


def test_what_is_not_declared_does_not_apply_and_is_mirrored() -> None:
    can = Capabilities(read=True, memory_kinds=frozenset({"dram"}))
    rules = all_rules()
    assert rules["READ-01"].why_not(can) == ""
    assert rules["WRITE-01"].why_not(can) == "write not declared"
    assert rules["REFUSE-02"].why_not(can) == ""
    assert rules["REFUSE-01"].why_not(can) == "read declared"
    assert rules["FAIL-01"].why_not(can) == "peer_loss not declared"
    assert rules["REG-01"].why_not(Capabilities()) == "dram not declared"


@pytest.mark.parametrize(
    ("can", "counts"),
    [
        (Capabilities(), [3]),
        (Capabilities(descriptors_max=2), [2, 1]),
        (Capabilities(transfer_max_bytes=6), [2, 1, 1]),
        (Capabilities(transfer_max_bytes=10, descriptors_max=1), [1, 1, 1]),
    ],
)
def test_lists_are_cut_to_what_a_transport_takes(can: Capabilities, counts: list[int]) -> None:
    local, remote = [(0, 5), (10, 0), (20, 7)], [(100, 5), (200, 0), (300, 7)]
    parts = parts_within(local, remote, can)
    assert [len(here) for here, _ in parts] == counts
    moved = {
        (at + k, to + k)
        for here, there in parts
        for (at, n), (to, _) in zip(here, there, strict=True)
        for k in range(n)
    }
    assert moved == {(k, 100 + k) for k in range(5)} | {(20 + k, 300 + k) for k in range(7)}


# --------------------------------------------------------------------------- the judgements


def test_a_broken_rule_says_what_disagrees() -> None:
    report = run_suite(TransportHarness(Misnamed), rules=["LIFE-01"])
    (outcome,) = report.outcomes
    assert outcome.status is Status.FAILED
    assert str(outcome).startswith("LIFE-01: A transport has a name")
    assert "is 'Mis Named', must be small letters" in str(outcome)
    assert not report.ok
    assert report.verdict == "does not conform: 1 failed"


def test_waivers_are_strict() -> None:
    broken = run_suite(TransportHarness(Misnamed, waivers=[waiver()]), rules=["LIFE-01"])
    assert [o.status for o in broken.outcomes] == [Status.WAIVED]
    assert broken.ok
    held = run_suite(TransportHarness(LocalTransport, waivers=[waiver()]), rules=["LIFE-01"])
    assert [o.status for o in held.outcomes] == [Status.STALE_WAIVER]
    assert not held.ok
    assert "remove the waiver" in held.outcomes[0].detail


def test_waivers_say_why() -> None:
    with pytest.raises(ConfigError, match="reason and a link"):
        Waiver("LIFE-01", "bug", " ", "x")
    with pytest.raises(ConfigError, match="kind is 'tired'"):
        waiver("tired")
    with pytest.raises(ConfigError, match="two waivers"):
        TransportHarness(LocalTransport, waivers=[waiver(), waiver("bug")])
    with pytest.raises(ConfigError, match=r"no rule 'LIFE-1'; did you mean 'LIFE-0?1"):
        run_suite(TransportHarness(LocalTransport, waivers=[waiver(of="LIFE-1")]), rules=[])


def whole_report(status: dict[str, Status], *waivers: Waiver) -> Report:
    report = Report(TransportHarness(LocalTransport, waivers=waivers), "it")
    for one in all_rules().values():
        report.add(Outcome(one, status.get(one.id, Status.PASSED), "why"))
    return report


@pytest.mark.parametrize(
    ("status", "waivers", "verdict"),
    [
        ({}, [], "conforms to suite 1 (quick rules)"),
        ({"READ-01": Status.NOT_APPLICABLE}, [], "conforms to suite 1 (quick rules)"),
        ({"READ-01": Status.PENDING}, [], "conforms to suite 1 (quick rules)"),
        ({"LIFE-01": Status.WAIVED}, [waiver()], "conforms to suite 1 (quick rules)"),
        ({"LIFE-01": Status.WAIVED}, [waiver("bug")], "does not conform yet: 1 bug waived"),
        (
            {"READ-01": Status.NOT_RUN},
            [],
            f"not decided: 1 of {len(all_rules())} rules were not run",
        ),
        ({"READ-01": Status.OVERRIDDEN}, [], "does not conform: 1 overridden"),
        (
            {"READ-01": Status.FAILED, "READ-02": Status.STALE_WAIVER},
            [],
            "does not conform: 1 failed, 1 passed although waived",
        ),
    ],
)
def test_the_verdict(status: dict[str, Status], waivers: list[Waiver], verdict: str) -> None:
    report = whole_report(status, *waivers)
    assert report.verdict == verdict
    assert report.conforms is verdict.startswith("conforms")


def test_a_rule_fails_if_one_of_its_runs_does() -> None:
    report, one = whole_report({}), all_rules()["READ-01"]
    report.add(Outcome(one, Status.FAILED, "in threads", placement="threads"))
    report.add(Outcome(one, Status.NOT_APPLICABLE))
    assert report.by_rule()["READ-01"].detail == "in threads"
    assert "!!  READ-01" in report.table()
    assert json.dumps(report.to_dict())


def test_newer_rules_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_module, "SUITE_VERSION", 2)
    newer = dataclasses.replace(all_rules()["LIFE-01"], since=2)
    for version, kind, status in (
        (1, Misnamed, Status.PENDING),
        (1, LocalTransport, Status.PENDING),
        (2, Misnamed, Status.FAILED),
    ):
        outcome = judge(newer, TransportHarness(kind, suite_version=version))
        assert outcome.status is status
    with pytest.raises(ConfigError, match="has 1 to 2"):
        TransportHarness(LocalTransport, suite_version=3)


def judge(one: Rule, harness: TransportHarness, function: Any = None) -> Outcome:
    laboratory = Laboratory(harness)
    try:
        return run_rule(one, Bench(laboratory), function or getattr(ConformanceSuite(), one.method))
    finally:
        laboratory.close()


def test_whatever_happens_in_a_rule_becomes_an_outcome() -> None:
    def broken(bench: Bench) -> None:
        raise ZeroDivisionError

    def not_here(bench: Bench) -> None:
        raise NotApplicable("never")

    one, harness = all_rules()["LIFE-01"], TransportHarness(LocalTransport)
    assert "ZeroDivisionError" in judge(one, harness, broken).detail
    assert judge(one, harness, not_here).status is Status.NOT_APPLICABLE


def test_an_agent_that_dies_is_no_mystery() -> None:
    def kills_an_agent(bench: Bench) -> None:
        process = bench.agent().process
        process.signal(signal.SIGSEGV)
        while process.exit_code is None:
            time.sleep(0.01)

    def looks_at_a_dead_agent(bench: Bench) -> None:
        agent = bench.agent()
        agent.process.signal(signal.SIGABRT)
        while True:
            agent.agent_info()

    one, harness = all_rules()["LIFE-03"], TransportHarness(LocalTransport)
    assert "died, by SIGABRT" in judge(one, harness, looks_at_a_dead_agent).detail
    assert "died by itself, by SIGSEGV" in judge(one, harness, kills_an_agent).detail


def test_what_is_not_written_yet_is_not_tried_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[AgentProcess] = []
    start = Laboratory._start

    def counted(laboratory: Laboratory) -> AgentProcess:
        started.append(start(laboratory))
        return started[-1]

    monkeypatch.setattr(Laboratory, "_start", counted)
    rules = [f"READ-{number:02}" for number in range(1, 11)]
    report = run_suite(TransportHarness(Unwritten), rules=rules)
    assert {outcome.status for outcome in report.outcomes} == {Status.FAILED}
    assert {outcome.detail for outcome in report.outcomes} == {
        "two agents cannot meet: TransportError: not written yet"
    }
    assert len(report.outcomes) > len(rules)  # some run in one process, too
    assert len(started) <= 5  # twice a pair, and one in advance


def test_only_what_never_worked_and_failed_twice_alike_is_hopeless() -> None:
    def attempt(step: FirstStep, *errors: str) -> None:
        for error in errors:
            with pytest.raises(RuleViolationError, match=error), step.attempt():
                raise TransportError(error)

    changing, worked, hopeless = (FirstStep("it fails") for _ in range(3))
    attempt(changing, "one", "other", "one")
    with worked.attempt():
        pass
    attempt(worked, "same", "same", "same")
    attempt(hopeless, "same", "same")
    for step in (changing, worked):
        step.check()
    with pytest.raises(RuleViolationError, match="it fails: TransportError: same"):
        hopeless.check()


def test_options_that_do_not_open_are_no_verdict() -> None:
    with pytest.raises(ConfigError, match=r"^set option risk=true$"):
        run_suite(TransportHarness(Choosy), rules=["LIFE-01"])


@pytest.mark.parametrize(
    ("transport", "more", "said"),
    [
        (object, {}, "transport is <class 'object'>; give a subclass"),
        (LocalTransport, {"path": "warp"}, "path is 'warp'; it must be None or one of memory, "),
        (LocalTransport, {"patience_s": -1}, "patience_s -1 must be above 0"),
        (LocalTransport, {"patience_s": float("nan")}, "patience_s nan must be above 0"),
    ],
)
def test_a_harness_refuses_what_cannot_be(transport: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        TransportHarness(transport, **more)


# ---------------------------------------------------------------------- messages and memory


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (lambda: expect_equal("the path", "tcp", "cma"), "the path: is 'tcp', must be 'cma'"),
        (
            lambda: expect_bytes("it", b"abcd", b"abxd"),
            "1 of 4 bytes differ, the first at offset 2",
        ),
        (lambda: expect_bytes("it", b"abcd", b"ab"), "it: has 4 bytes, must have 2"),
    ],
)
def test_messages_name_both_values(check: Callable[[], None], says: str) -> None:
    with pytest.raises(RuleViolationError, match=says):
        check()


def test_the_right_error_is_asked_for() -> None:
    with (
        pytest.raises(RuleViolationError, match="raised nothing, must raise ConfigError"),
        expect_raises("it", ConfigError),
    ):
        pass
    with pytest.raises(ZeroDivisionError), expect_raises("it", ConfigError):
        raise ZeroDivisionError


def test_guards_notice_a_single_byte() -> None:
    memory = SharedMemory.make()
    try:
        extent, other = memory.take(5000), memory.take(100)
        assert memory.guards_intact(extent)
        for offset in (extent.offset - 1, extent.offset + 5000):
            was = memory.bytes[offset]
            memory.bytes[offset] ^= 1
            assert not memory.guards_intact(extent)
            memory.bytes[offset] = was
        memory.view(other)[:] = 1
        assert memory.guards_intact(extent)
        assert memory.guards_intact(other)
    finally:
        memory.close()


# ------------------------------------------------------------------------------- strangers

PLUGIN = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full"]


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


STRANGER = """
from kvbridge.testing import ConformanceSuite, TransportHarness, Waiver
from kvbridge.transport import Availability
from kvbridge.transport.local import LocalTransport


class Mine(LocalTransport):
    name = "mine"


class TestMine(ConformanceSuite):
    harness = TransportHarness(Mine, options={"slice_bytes": 4096})
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_stranger_writes_a_class_in_a_file(tmp_path: Path, mode: str) -> None:
    (tmp_path / "test_mine.py").write_text(STRANGER)
    words = ["-k", "READ-05 or LIFE-01", f"--import-mode={mode}", "--conformance-json=c.json"]
    ended = run(*PLUGIN, *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout
    (report,) = json.loads((tmp_path / "c.json").read_text())["reports"]
    assert (report["transport"], report["options"]) == ("mine", {"slice_bytes": 4096})
    statuses = {entry["rule"]: entry["status"] for entry in report["rules"]}
    assert (statuses["READ-05"], statuses["READ-06"]) == ("passed", "not run")
    assert report["path"] == "cma"
    assert not report["conforms"]


def test_a_replaced_rule_voids_the_claim(tmp_path: Path) -> None:
    replaced = "\n    def test_read_edges(self):\n        pass\n"
    (tmp_path / "test_mine.py").write_text(STRANGER + replaced)
    ended = run(*PLUGIN, "-k", "LIFE-01 or edges", cwd=tmp_path)
    assert "1 overridden" in ended.stdout
    assert ended.returncode == 1


def test_a_broken_rule_fails_the_run_and_a_waived_one_does_not(tmp_path: Path) -> None:
    text = STRANGER.replace('name = "mine"', 'name = "Mine"')
    (tmp_path / "test_mine.py").write_text(text)
    ended = run(*PLUGIN, "-k", "LIFE-01", cwd=tmp_path)
    assert ended.returncode == 1
    assert "LIFE-01: A transport has a name" in ended.stdout
    assert "is 'Mine', must be" in ended.stdout
    assert "Traceback" not in ended.stdout
    waived = 'waivers=[Waiver("LIFE-01", "bug", "why", "where")], options='
    (tmp_path / "test_mine.py").write_text(text.replace("options=", waived))
    assert "1 xfailed" in run(*PLUGIN, "-k", "LIFE-01", cwd=tmp_path).stdout
    unknown = text.replace("options=", waived.replace("LIFE-01", "LIFE-00"))
    (tmp_path / "test_mine.py").write_text(unknown)
    assert "no rule 'LIFE-00'" in run(*PLUGIN, "-k", "LIFE-01", cwd=tmp_path).stderr


def test_a_transport_that_cannot_run_is_skipped_unless_it_must(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        STRANGER.replace(
            'name = "mine"',
            'name = "mine"\n\n    @classmethod\n    def probe(cls):\n'
            '        return Availability(False, "gone fishing", "wait")',
        )
    )
    ended = run(*PLUGIN, "-k", "LIFE-01", cwd=tmp_path)
    assert (ended.returncode, "gone fishing" in ended.stdout) == (0, False)
    assert "1 skipped" in ended.stdout
    ended = run(*PLUGIN, "-k", "LIFE-01", cwd=tmp_path, KVBRIDGE_REQUIRE_TRANSPORTS="mine")
    assert ended.returncode == 1
    assert "gone fishing" in ended.stdout
    with pytest.raises(Exception, match=r"cannot run here: it is not there\. pip install it"):
        run_suite(TransportHarness(Absent), rules=["LIFE-01"])


@pytest.mark.multi_process
def test_the_command(tmp_path: Path) -> None:
    words = ["-m", "kvbridge.cli", "conformance"]
    ended = run(*words, "local", "--rule", "READ-05", "--rule", "LIFE-01", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "ok  READ-05" in ended.stdout
    assert json.loads((tmp_path / "conformance.json").read_text())["reports"][0]["label"] == "local"
    ended = run(*words, "--list", cwd=tmp_path)
    assert len(ended.stdout.splitlines()) == len(all_rules())
    for mistake in (["lokal"], [], ["local", "--rule", "X"], ["local", "--option", "x"]):
        ended = run(*words, *mistake, cwd=tmp_path)
        assert ended.returncode == 2
        assert ended.stderr.startswith("kvbridge: error: ")
        assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("missing", ["pytest", "hypothesis", "psutil"])
def test_without_its_tools_it_says_what_to_install(tmp_path: Path, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    ended = run("-c", f"{code}from kvbridge.testing import ConformanceSuite", cwd=tmp_path)
    assert ended.stderr.splitlines()[-1] == (
        f"ImportError: kvbridge.testing needs {missing}: pip install 'kvbridge[testing]'"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["local", "--option", "nope=1"], "unknown option 'nope'"),
        (["local", "--env", "FOO"], "--env 'FOO' must be KEY=VALUE"),
        (["local", "--report", "/nowhere/x.json"], "--report /nowhere/x.json cannot be written"),
        (["nosuch"], "no transport named 'nosuch'"),
        (["local", "--rule", "READ-99"], "READ-99"),
    ],
)
def test_a_mistake_is_no_verdict(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_transport_that_needs_an_option_is_no_verdict(
    usable_transport: Callable[[str], type[Transport]],
    shared_network: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usable_transport("mooncake")
    path = tmp_path / "found.json"
    assert main(["conformance", "mooncake", "--report", str(path)]) == 2
    captured = capsys.readouterr()
    assert "set option allow_open_data_port=true" in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not path.exists()


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in entries] == list(all_rules())
    assert entries[0]["sentence"] == all_rules()["LIFE-01"].sentence


TWO = """
class TestOne(TestMine):
    pass


class TestTwo(TestMine):
    pass


del TestMine
"""


def test_two_classes_of_a_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(STRANGER + TWO)
    said = run(*PLUGIN, "-k", "REFUSE-01 or LIFE-03", "-rs", cwd=tmp_path).stdout
    for name in ("TestOne", "TestTwo"):
        assert f"{name}: REFUSE-01 does not apply: read declared" in said
        assert f"{name}: not decided" in said


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("Mine, options", "'lokal', options", 4, "TestMine: no transport named 'lokal'"),
        ("Mine, options", "object, options", 2, "transport is <class 'object'>; give"),
        ("options=", "path='warp', options=", 2, "path is 'warp'; it must be None or one of"),
        ("4096", "'many'", 1, "TestMine: options of transport"),
    ],
)
def test_a_mistake_in_a_harness_is_said_in_a_line(
    tmp_path: Path, old: str, new: str, status: int, said: str
) -> None:
    (tmp_path / "test_mine.py").write_text(STRANGER.replace(old, new))
    ended = run(*PLUGIN, "-k", "READ-05", cwd=tmp_path)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "kvbridge/testing" not in ended.stdout + ended.stderr


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(STRANGER)
    ended = run(*PLUGIN, "-k", "LIFE-01", "--conformance-json=/no/such/x.json", cwd=tmp_path)
    assert ended.returncode == 4
    assert ended.stderr.strip() == (
        "ERROR: --conformance-json /no/such/x.json cannot be written: there is no folder /no/such; "
        "name a file in a folder of yours"
    )
    assert not ended.stdout.strip()


def test_a_class_without_a_harness_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text(
        "from kvbridge.testing import ConformanceSuite\nclass TestNone(ConformanceSuite): pass\n"
    )
    result = run(*PLUGIN, cwd=tmp_path)
    assert result.returncode == 4
    assert "TestNone has no harness" in result.stderr + result.stdout


def test_the_plugin_costs_other_test_runs_nothing(tmp_path: Path) -> None:
    code = "import sys, kvbridge.testing.plugin; print(*sys.modules)"
    loaded = set(run("-c", code, cwd=tmp_path).stdout.split())
    assert "kvbridge.testing.plugin" in loaded
    assert not {"numpy", "hypothesis", "msgspec", "psutil"} & loaded
