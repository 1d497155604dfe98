"""A transport from outside: the example, and what ``kvbridge new-transport`` writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbridge.cli import main
from kvbridge.cli.new_transport import render
from kvbridge.testing.rules import GROUPS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom_transport"
OWN_TO_THE_EXAMPLE = {"README.md", "kvbridge_sockets/config.py", "kvbridge_sockets/link.py"}


def install(project: Path, target: Path) -> None:
    """Install a project as its users would, but without a network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*command, *options, str(project)], check=True, timeout=60)


def run(
    site: Path, folder: Path, *words: str, timeout_s: float = 50
) -> subprocess.CompletedProcess[str]:
    """Run a module with what was installed, outside the checkout."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed, and nothing of it in this process."""
    target = tmp_path_factory.mktemp("site")
    install(EXAMPLE, target)
    return target


def test_the_example_is_what_the_template_makes_and_its_body() -> None:
    for path, text in render("sockets").items():
        if path not in OWN_TO_THE_EXAMPLE:
            assert (EXAMPLE / path).read_text() == text, f"{path} differs from the template"


def test_the_example_is_found_by_its_name(site: Path, tmp_path: Path) -> None:
    listed = run(site, tmp_path, "kvbridge.cli", "transports", "--json")
    [entry] = [e for e in json.loads(listed.stdout) if e["name"] == "sockets"]
    assert entry["ok"]
    assert entry["capabilities"]["owner_checks_bounds"]


@pytest.mark.multi_process
def test_the_example_moves_a_cache(site: Path, tmp_path: Path) -> None:
    words = ("--transport", "sockets", "--prefill", "tp=2", "--decode", "tp=1", "--json")
    result = run(site, tmp_path, "kvbridge.cli", "demo", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["equal"]


def run_rules(site: Path, project: Path, folder: Path, rules: str) -> tuple[int, dict[str, Any]]:
    """Run some rules of a project's own tests; return their exit status and the report."""
    found = folder / "found.json"
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "not full", "-k", rules]
    result = run(site, folder, *words, str(project / "tests"), f"--conformance-json={found}")
    assert found.exists(), result.stdout + result.stderr
    [report] = json.loads(found.read_text())["reports"]
    return result.returncode, report


def ids(report: dict[str, Any], status: str) -> set[str]:
    return {rule["rule"] for rule in report["rules"] if rule["status"] == status}


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "rules",
    [
        "LIFE-06 or PEER-03 or READ-02 or WRITE-08 or NOTIFY-04 or FAIL-11",
        *(pytest.param(f"{group}-", marks=pytest.mark.full) for group in GROUPS),
    ],
)
def test_the_example_conforms(site: Path, tmp_path: Path, rules: str) -> None:
    status, report = run_rules(site, EXAMPLE, tmp_path, rules)
    assert status == 0, report
    assert report["class"] == "kvbridge_sockets.driver:SocketsTransport"
    assert ids(report, "passed")
    assert not ids(report, "failed")


@pytest.mark.multi_process
def test_a_new_project_says_what_is_missing(tmp_path: Path) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    assert main(["new-transport", "my_fabric", "--dir", str(project)]) == 0
    install(project, site)
    status, report = run_rules(site, project, tmp_path, "LIFE-01 or LIFE-03 or READ-04")
    assert status == 1
    assert ids(report, "passed") == {"LIFE-01", "LIFE-03"}
    assert ids(report, "failed") == {"READ-04"}
    missing = "not written yet: connect in kvbridge_my_fabric/link.py has to reach a peer"
    assert all(missing in rule["detail"] for rule in report["rules"] if rule["detail"])


def test_a_new_project_passes_its_own_checks(tmp_path: Path) -> None:
    project = tmp_path / "project"
    assert main(["new-transport", "my_fabric", "--dir", str(project)]) == 0
    for path, text in render("my_fabric").items():
        assert "{{" not in path + text, f"a placeholder is left in {path}"
    ruff = str(Path(sys.executable).with_name("ruff"))
    shared = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), str(project)]
    for words in (["check", "--ignore", "ARG,D,I,S"], ["format", "--check"]):
        subprocess.run([ruff, *words, *shared], check=True, timeout=30, cwd=project)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("local", "'local' is installed already"),
        ("nixl", "'nixl' is installed already"),
        ("My-Fabric", "is no name for a transport"),
        ("9lives", "is no name for a transport"),
        ("a__b", "is no name for a transport"),
        ("../up", "is no name for a transport"),
        ("class", "'class' is a word of Python"),
        ("import", "'import' is a word of Python"),
        ("match", "'match' is a word of Python"),
        ("kvbridge", "'kvbridge' is a module"),
        ("numpy", "'numpy' is a module"),
        ("json", "'json' is a module"),
    ],
)
def test_names_that_cannot_be(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-transport", name, "--dir", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-transport", "my_fabric", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["new-transport", "my_fabric", "--dir", str(tmp_path / "file" / "x")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
