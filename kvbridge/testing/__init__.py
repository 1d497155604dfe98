"""The conformance suite: proves that a transport keeps its promises.

A transport author writes one class in a test file::

    from kvbridge.testing import ConformanceSuite, TransportHarness


    class TestMine(ConformanceSuite):
        harness = TransportHarness(MyTransport, options={"device": "lo"})

or runs ``kvbridge conformance NAME``. The names load when they are first used, so that the pytest
plugin costs a test run nothing that has no such class.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbridge.testing.bench import Bench
    from kvbridge.testing.harness import SUITE_VERSION, TransportHarness, Waiver
    from kvbridge.testing.report import Outcome, Report, Status, to_json
    from kvbridge.testing.rules import Rule, all_rules
    from kvbridge.testing.runner import run_suite
    from kvbridge.testing.suite import ConformanceSuite
    from kvbridge.testing.violations import RuleViolationError

__all__ = [
    "SUITE_VERSION",
    "Bench",
    "ConformanceSuite",
    "Outcome",
    "Report",
    "Rule",
    "RuleViolationError",
    "Status",
    "TransportHarness",
    "Waiver",
    "all_rules",
    "run_suite",
    "to_json",
]

_NEEDS = ("pytest", "hypothesis", "psutil")
_MODULES = {
    "SUITE_VERSION": "harness",
    "Bench": "bench",
    "ConformanceSuite": "suite",
    "Outcome": "report",
    "Report": "report",
    "Rule": "rules",
    "RuleViolationError": "violations",
    "Status": "report",
    "TransportHarness": "harness",
    "Waiver": "harness",
    "all_rules": "rules",
    "run_suite": "runner",
    "to_json": "report",
}


def _missing() -> list[str]:
    return [name for name in _NEEDS if find_spec(name) is None]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if missing := _missing():
        raise ImportError(
            f"kvbridge.testing needs {', '.join(missing)}: pip install 'kvbridge[testing]'"
        )
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
