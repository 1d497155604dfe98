"""The pytest plugin: runs the rules of every :class:`ConformanceSuite` and sums them up.

Loaded by every pytest run of an environment that has KVBridge, so it imports nothing before it
meets such a class.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from kvbridge.testing.bench import Bench, Laboratory
    from kvbridge.testing.report import Report
    from kvbridge.testing.suite import ConformanceSuite

RULE_ATTRIBUTE = "__kvbridge_rule__"  # as in kvbridge.testing.rules, which is not imported here
_reports = pytest.StashKey[dict[type, "Report"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    group = parser.getgroup("kvbridge", "KVBridge conformance suite")
    group.addoption(
        "--conformance-json", metavar="PATH", type=Path, help="write what the suite found to PATH"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "full: a rule that is not part of the quick tier")
    config.addinivalue_line("markers", "multi_process: starts processes of its own")
    config.stash[_reports] = {}
    if path := config.option.conformance_json:
        from kvbridge.config import check_writable
        from kvbridge.errors import ConfigError

        try:
            check_writable(path, "--conformance-json")
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each rule in every placement and tier that it is made for."""
    rule = getattr(metafunc.function, RULE_ATTRIBUTE, None)
    if rule is None or "bench" not in metafunc.fixturenames:
        return
    metafunc.parametrize(
        "bench",
        [
            pytest.param(
                (placement, tier),
                id="-".join(
                    [rule.id]
                    + (["threads"] if placement == "threads" else [])
                    + (["full"] if tier == "full" else [])
                ),
                marks=[pytest.mark.full] if tier == "full" else [],
            )
            for tier in rule.tiers
            for placement in rule.placements
        ],
        indirect=True,
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the rules, before anything is selected by marks."""
    if _rule_of(item) is None:
        return
    item.add_marker(pytest.mark.multi_process)
    if item.config.pluginmanager.hasplugin("timeout"):
        item.add_marker(pytest.mark.timeout(RULE_TIMEOUT_S))


RULE_TIMEOUT_S = 300
"""Each wait within a rule has a limit of its own; this one is for what went wrong with those."""


@pytest.fixture(scope="class")
def laboratory(request: pytest.FixtureRequest) -> "Iterator[Laboratory]":
    """What the rules of one class share."""
    from kvbridge.errors import ConfigError
    from kvbridge.testing.bench import Laboratory
    from kvbridge.testing.harness import required_transports

    harness = request.cls.harness
    available = harness.availability()
    if not available.ok:
        reason = (
            f"{request.cls.__name__}: transport {harness.name!r}: "
            f"{available.reason} ({available.hint})"
        )
        if harness.name in required_transports():
            pytest.fail(f"{reason}, although KVBRIDGE_REQUIRE_TRANSPORTS lists it", pytrace=False)
        pytest.skip(reason)
    made = Laboratory(harness)
    mistake = ""
    try:
        made.check_options()
    except ConfigError as error:
        mistake = f"{request.cls.__name__}: {error}"
    if mistake:
        made.close()
        pytest.fail(mistake, pytrace=False)
    yield made
    _report(request.config, request.cls).path = made.path
    made.close()


@pytest.fixture
def bench(request: pytest.FixtureRequest, laboratory: "Laboratory") -> "Iterator[Bench]":
    """What one rule works with."""
    from kvbridge.testing.bench import Bench

    made = Bench(laboratory, *getattr(request, "param", ()))
    yield made
    made.close(broken=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a rule, and turn its outcome into one of pytest's."""
    rule = _rule_of(pyfuncitem)
    if rule is None or pyfuncitem.cls is None:
        return None
    from kvbridge.testing.report import Status
    from kvbridge.testing.runner import run_rule

    outcome = run_rule(rule, cast("Bench", pyfuncitem.funcargs["bench"]), pyfuncitem.obj)
    _report(pyfuncitem.config, pyfuncitem.cls).add(outcome)
    match outcome.status:
        case Status.PASSED:
            return True
        case Status.NOT_APPLICABLE:
            # The summary folds skips of different classes, and names none of them.
            pytest.skip(f"{pyfuncitem.cls.__name__}: {rule.id} does not apply: {outcome.detail}")
        case Status.WAIVED | Status.PENDING:
            pytest.xfail(f"{rule.id} {outcome.status}: {outcome.detail}")
        case _:
            pytest.fail(str(outcome), pytrace=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check every class once: a transport and waived rules that exist, and no rule replaced."""
    classes = {
        item.cls for item in session.items if isinstance(item, pytest.Function) and _rule_of(item)
    }
    if not classes:
        return
    from kvbridge.errors import ConfigError, UnknownTransportError
    from kvbridge.testing.harness import TransportHarness
    from kvbridge.testing.rules import all_rules
    from kvbridge.testing.runner import check_rule_ids

    for cls in classes:
        if cls is None:
            continue
        if not isinstance(getattr(cls, "harness", None), TransportHarness):
            raise pytest.UsageError(
                f"{cls.__name__} has no harness; write: harness = TransportHarness(MyTransport)"
            )
        try:
            check_rule_ids(waiver.rule for waiver in cls.harness.waivers)
            cls.harness.availability()
        except (ConfigError, UnknownTransportError) as error:
            raise pytest.UsageError(f"{cls.__name__}: {error}") from error
        replaced = [
            rule
            for rule in all_rules().values()
            if getattr(cls, rule.method, None) is not rule.function
        ]
        _report(session.config, cls).override(replaced)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A replaced rule fails the run, as no test of its own would say so."""
    reports = session.config.stash[_reports].values()
    if any(not report.ok for report in reports) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the tables, and write the file."""
    reports = [report for report in config.stash[_reports].values() if report.outcomes]
    if not reports:
        return
    from kvbridge.testing.report import to_json

    terminalreporter.section("KVBridge conformance")
    for report in reports:
        terminalreporter.line(
            report.table() if config.option.verbose >= 0 else f"{report.label}: {report.verdict}"
        )
    if path := config.option.conformance_json:
        path.write_text(to_json(reports))
        terminalreporter.line(f"written to {path}")


def _rule_of(item: pytest.Item) -> Any:
    return getattr(getattr(item, "function", None), RULE_ATTRIBUTE, None)


def _report(config: pytest.Config, cls: type) -> "Report":
    from kvbridge.testing.report import Report

    reports = config.stash[_reports]
    if cls not in reports:
        reports[cls] = Report(cast("type[ConformanceSuite]", cls).harness, cls.__name__)
    return reports[cls]
