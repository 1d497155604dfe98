"""One word in the configuration decides what becomes of a request that could not be loaded."""

from typing import Any

import pytest

from kvbridge.connector import ConnectorConfig, Request, connector_configs
from kvbridge.errors import ConfigError
from tests.integration.tiny_engine import Make, run

LOCAL = {"transport": "local", "timeout_s": 5}
POLICIES = pytest.mark.parametrize("on_failure", ["recompute", "fail"])


def faulty(what: str, name: str = "a", **more: Any) -> dict[str, Any]:
    """Return a connector whose operations all go wrong."""
    faults = [{"what": what, "share": 1.0, **more}]
    options = {"inner": {"transport": "local"}, "operations": faults}
    return {"name": name, "transport": "faulty", "options": options}


def flat(params: Any) -> Any:
    """Return what a proxy passes on that knows no connectors: whatever their names."""
    return {key: value for key, value in params.items() if key != "kvbridge"}


@POLICIES
@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({**faulty("fail"), "timeout_s": 20.0}, "transport"),
        ({**faulty("delay", delay_s=1.0), "timeout_s": 0.5}, "deadline"),
    ],
    ids=["transport", "deadline"],
)
def test_a_load_that_failed_says_what_is_to_become_of_its_request(
    engine: Make, config: dict[str, Any], cause: str, on_failure: str
) -> None:
    p = engine("p", LOCAL)
    d = engine("d", {**config, "on_failure": on_failure}, tp=2)
    d.load("r", [2], 4, flat(p.prefill("r", [3], 4)))
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == cause
    assert d.loaded["r"].recompute == (on_failure == "recompute")


@POLICIES
def test_so_does_one_that_met_nobody(engine: Make, on_failure: str) -> None:
    p = engine("p", LOCAL)
    config = {**LOCAL, "on_failure": on_failure, "handshake": {"timeout_s": 0.3}}
    d, params = engine("d", config), p.prefill("r", [3], 4)
    p.close()
    d.load("r", [2], 4, params)
    run([d], lambda: "r" in d.loaded)
    assert d.loaded["r"].cause == "handshake"
    assert d.loaded["r"].recompute == (on_failure == "recompute")


@POLICIES
def test_what_two_connectors_could_not_load_follows_the_one_word_for_both(
    engine: Make, on_failure: str
) -> None:
    both = [{"name": "a", "transport": "local"}, {"name": "b", "transport": "local"}]
    broken = [faulty("fail", name) for name in "ab"]
    p = engine("p", {"connectors": both, "timeout_s": 5})
    d = engine("d", {"connectors": broken, "timeout_s": 5, "on_failure": on_failure})
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded)
    assert (d.loaded["r"].error.count("a fault that was asked for"), d.loaded["r"].via) == (2, "b")
    assert d.loaded["r"].recompute == (on_failure == "recompute")


def test_one_that_was_aborted_is_neither_computed_nor_to_fail(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    d.scheduler.request_finished(Request("r", 4, aborted=True), ((2,),))
    run([p, d], lambda: "r" in d.loaded)
    assert (d.loaded["r"].cause, d.loaded["r"].recompute) == ("aborted", False)


def test_what_was_loaded_is_not_computed(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded)
    assert (d.loaded["r"].ok, d.loaded["r"].recompute) == (True, False)


def test_connectors_of_one_engine_cannot_differ() -> None:
    children: list[Any] = [{"name": "a", "on_failure": "fail"}, {"name": "b"}]
    with pytest.raises(
        ConfigError, match="on_failure differs: 'a' has 'fail', 'b' has 'recompute'"
    ):
        connector_configs(children)
    configs = connector_configs(
        {"connectors": [{"name": "a"}, {"name": "b"}], "on_failure": "fail"}
    )
    assert {each.on_failure for each in configs.values()} == {"fail"}
    assert ConnectorConfig().on_failure == "recompute"
