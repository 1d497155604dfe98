"""``kvbridge transports``, and what it says about the lanes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvbridge.bench import Case, Measurement
from kvbridge.cli.probe import LEAST_SHARE, lane_warning, speed_warning, words
from kvbridge.transport import Capabilities, Transport

pytestmark = pytest.mark.multi_process


def run(*words: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [sys.executable, "-m", "kvbridge.cli", "transports", *words],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    ).stdout


def probed(**environment: str) -> dict[str, dict[str, Any]]:
    found = json.loads(run("--probe", "--json", **environment))
    return {entry["name"]: entry["probe"] for entry in found}


def test_without_probing_nothing_is_opened() -> None:
    assert all("probe" not in entry for entry in json.loads(run("--json")))
    assert "carried by" not in run()


def test_options_are_said_of_those_that_are_named() -> None:
    said = run("local", "nixl")
    assert "  read_mode: auto, native or served" in said
    assert "  slice_bytes: whole number from 4096; 67108864 if not given\n      Bytes" in said
    assert "mooncake" not in said
    assert "read_mode" not in run()
    entries = {entry["name"]: entry for entry in json.loads(run("--json"))}
    assert {option["name"] for option in entries["ucx"]["options"]} >= {"device", "read_mode"}


def test_a_name_that_is_none_is_one_line() -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        run("nope")
    assert error.value.returncode == 2
    assert error.value.stderr.startswith("kvbridge: error: no transport named 'nope' found: ")
    assert error.value.stderr.count("\n") == 1


@pytest.mark.slow
def test_each_probe_says_what_carried_the_bytes(
    usable_transport: Callable[[str], type[Transport]],
) -> None:
    usable_transport("nixl")
    found = probed()
    assert {found["local"]["path"], found["nixl"]["path"]} == {"cma"}
    for name in ("local", "nixl"):
        for op in ("read", "write"):
            assert found[name][op]["gbps"] > 0
            assert found[name][op]["of_memcpy"] > 0
        assert not any("although both" in warning for warning in found[name]["warnings"])
    assert "wraps another" in found["recording"]["not_measured"]


@pytest.mark.slow
def test_a_lane_that_is_not_the_one_of_the_host_is_told(
    usable_transport: Callable[[str], type[Transport]],
) -> None:
    usable_transport("nixl")
    found = probed(UCX_TLS="tcp")["nixl"]
    assert found["path"] == "tcp"
    assert "the bytes took tcp, although both processes are on this host" in found["warnings"][0]


def test_a_transport_that_needs_an_option_is_not_measured(
    usable_transport: Callable[[str], type[Transport]],
    shared_network: None,
) -> None:
    usable_transport("mooncake")
    assert "option allow_open_data_port=true" in probed()["mooncake"]["not_measured"]


@pytest.mark.parametrize("path", sorted(LEAST_SHARE))
def test_slow_lanes_are_told(path: str) -> None:
    case = Case("read", 1 << 20, "contiguous", 1 << 20)

    def measured(share: float) -> Measurement:
        return Measurement("any", case, path, (1.0,), (share,))

    assert speed_warning(measured(LEAST_SHARE[path] * 1.01)) == ""
    assert f"over {path} it should be" in speed_warning(measured(LEAST_SHARE[path] * 0.99))


def test_only_a_transport_that_could_do_better_is_told_of_its_lane() -> None:
    better, tcp_alone = Capabilities(owner_passive=True), Capabilities()
    assert lane_warning(better, "cma") == lane_warning(tcp_alone, "tcp") == ""
    assert "the bytes took unknown" in lane_warning(better, "unknown")


def test_words_of_a_probe() -> None:
    lines = words(
        {"path": "tcp", "read": {"gbps": 1.234, "of_memcpy": 0.1}, "warnings": ["too slow"]}
    )
    assert lines == ["carried by tcp: reads 1.2 GB/s (0.1 of memcpy)", "warning: too slow"]
