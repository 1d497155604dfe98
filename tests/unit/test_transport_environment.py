"""The environment is as UCX needs it while it is needed, and as before afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbridge.transport import UCX_VARIABLES, ucx_environment

DOCUMENTED = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        monkeypatch.delenv(name)


def test_variables_are_set_meanwhile_only() -> None:
    before = dict(os.environ)
    with ucx_environment(UCX_LOG_LEVEL="info"):
        meanwhile = dict(os.environ)
    assert meanwhile == {**before, **UCX_VARIABLES, "UCX_LOG_LEVEL": "info"}
    assert dict(os.environ) == before


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", "8192")
    monkeypatch.setenv("UCX_LOG_LEVEL", "debug")
    with pytest.raises(ZeroDivisionError), ucx_environment(UCX_LOG_LEVEL="info"):
        assert os.environ["UCX_RNDV_THRESH"] == "8192"
        assert os.environ["UCX_LOG_LEVEL"] == "debug"
        raise ZeroDivisionError
    assert os.environ["UCX_RNDV_THRESH"] == "8192"
    assert "UCX_MODULES" not in os.environ


@pytest.mark.parametrize(("given", "seen"), [({}, "inf"), ({"UCX_RNDV_THRESH": "8192"}, "8192")])
def test_what_ucxx_has_set_counts_as_unset_unless_the_user_gave_it(
    given: dict[str, str], seen: str
) -> None:
    code = """
import os, sys, types
from kvbridge.transport import ucx_environment
sys.modules["ucxx"] = types.ModuleType("ucxx")
os.environ.setdefault("UCX_RNDV_THRESH", "8192")
os.environ["UCX_MEMTYPE_CACHE"] = "n"
with ucx_environment():
    print(os.environ["UCX_RNDV_THRESH"], "UCX_MEMTYPE_CACHE" in os.environ)
print(os.environ["UCX_RNDV_THRESH"], os.environ["UCX_MEMTYPE_CACHE"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{seen} False", "8192 n"]


def test_every_variable_is_documented() -> None:
    text = DOCUMENTED.read_text()
    for name, value in UCX_VARIABLES.items():
        assert f"`{name}`" in text
        assert f"`{value}`" in text
