"""What a run found: one outcome per rule, and what that amounts to."""

import dataclasses
import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from typing import Any

from kvbridge.testing.harness import SUITE_VERSION, TransportHarness
from kvbridge.testing.rules import GROUPS, Placement, Rule, Tier, all_rules


class Status(StrEnum):
    """What became of a rule. In the order of how much it matters when runs are summed up."""

    FAILED = "failed"
    STALE_WAIVER = "passed although waived"
    OVERRIDDEN = "overridden"
    WAIVED = "waived"
    PENDING = "pending"
    PASSED = "passed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


BAD = (Status.FAILED, Status.STALE_WAIVER, Status.OVERRIDDEN)
_ORDER = list(Status)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one rule.

    Attributes:
        rule: The rule.
        status: What became of it.
        detail: The two values that disagree, or the reason of what did not run.
        seconds: How long it took.
        placement: Where the two agents lived.
        tier: How hard it was tried.
    """

    rule: Rule
    status: Status
    detail: str = ""
    seconds: float = 0.0
    placement: Placement = "processes"
    tier: Tier = "quick"

    def __str__(self) -> str:
        """Rule, sentence and detail: what a person reads first."""
        return f"{self.rule.id}: {self.rule.sentence}\n{self.status}: {self.detail}".rstrip(": ")


@dataclass(slots=True)
class Report:
    """All that one harness has shown.

    Attributes:
        harness: The transport, and how it was run.
        label: What the run is called: the class of the test, or the transport's name.
        outcomes: Every run of every rule, in order.
        path: What carried the bytes, once two agents met.
    """

    harness: TransportHarness
    label: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    path: str = ""

    def add(self, outcome: Outcome) -> None:
        """Note one more run."""
        self.outcomes.append(outcome)

    def override(self, rules: Iterable[Rule]) -> None:
        """Note that a test class replaced these rules by something of its own."""
        for rule in rules:
            self.add(Outcome(rule, Status.OVERRIDDEN, "the test class replaces this method"))

    def by_rule(self) -> dict[str, Outcome]:
        """Return the outcome that matters most for every rule of the suite, by id."""
        found: dict[str, Outcome] = {}
        for outcome in self.outcomes:
            best = found.get(outcome.rule.id)
            if best is None or _ORDER.index(outcome.status) < _ORDER.index(best.status):
                found[outcome.rule.id] = outcome
        return {
            rule.id: found.get(rule.id) or Outcome(rule, Status.NOT_RUN)
            for rule in all_rules().values()
        }

    def failures(self) -> list[Outcome]:
        """Return all that must not be: failed rules, stale waivers, overridden tests."""
        return [outcome for outcome in self.outcomes if outcome.status in BAD]

    @property
    def ok(self) -> bool:
        """Nothing that was run broke a rule."""
        return not self.failures()

    @property
    def verdict(self) -> str:
        """What may be said of the transport, in a line."""
        rules = self.by_rule().values()
        counts = Counter(outcome.status for outcome in rules)
        if not self.ok:
            words = ", ".join(f"{counts[status]} {status}" for status in BAD if counts[status])
            return f"does not conform: {words}"
        if counts[Status.NOT_RUN]:
            return f"not decided: {counts[Status.NOT_RUN]} of {len(rules)} rules were not run"
        kinds = Counter(w.kind for w in self._waived())
        if kinds["planned"] or kinds["bug"]:
            words = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            return f"does not conform yet: {words} waived"
        tiers = {outcome.tier for outcome in self.outcomes}
        tier = "full" if "full" in tiers else "quick"
        return f"conforms to suite {self.harness.suite_version} ({tier} rules)"

    @property
    def conforms(self) -> bool:
        """Every rule was run, none is broken, and what is waived the library cannot do."""
        return self.verdict.startswith("conforms")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        kind = self.harness.kind
        return {
            "label": self.label,
            "transport": kind.name,
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "api_version": kind.api_version,
            "options": dict(self.harness.options),
            "environment": dict(self.harness.environment),
            "path": self.path,
            "suite_version": self.harness.suite_version,
            "verdict": self.verdict,
            "conforms": self.conforms,
            "counts": dict(Counter(str(o.status) for o in self.by_rule().values())),
            "waivers": [dataclasses.asdict(waiver) for waiver in self.harness.waivers],
            "rules": [_entry(outcome) for outcome in self.by_rule().values()],
            "runs": [_entry(outcome) for outcome in self.outcomes],
        }

    def table(self) -> str:
        """Return a table of all rules for people."""
        lines = [f"{self.label}: {self.verdict}"]
        for prefix, title in GROUPS.items():
            group = [
                outcome
                for outcome in self.by_rule().values()
                if outcome.rule.group == prefix and outcome.status is not Status.NOT_RUN
            ]
            if group:
                lines.append(f"  {title}")
            lines += [_row(outcome) for outcome in group]
        return "\n".join(lines)

    def _waived(self) -> list[Any]:
        waived = {o.rule.id for o in self.outcomes if o.status is Status.WAIVED}
        return [waiver for waiver in self.harness.waivers if waiver.rule in waived]


def to_json(reports: Sequence[Report]) -> str:
    """Return what ``conformance.json`` holds."""
    return json.dumps(
        {
            "kvbridge": version("kvbridge"),
            "suite_version": SUITE_VERSION,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "reports": [report.to_dict() for report in reports],
        },
        indent=2,
    )


def _entry(outcome: Outcome) -> dict[str, Any]:
    return {
        "rule": outcome.rule.id,
        "sentence": outcome.rule.sentence,
        "status": str(outcome.status),
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
        "placement": outcome.placement,
        "tier": outcome.tier,
    }


def _row(outcome: Outcome) -> str:
    lines = outcome.detail.splitlines() or [""]
    # Of a traceback the last line says what went wrong.
    why = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    said = f"{outcome.status}: {why}" if why and outcome.status is not Status.PASSED else ""
    mark = "ok" if outcome.status is Status.PASSED else "--"
    mark = "!!" if outcome.status in BAD else mark
    tail = f"\n{'':>17}{said or outcome.status}" if mark != "ok" else ""
    return f"    {mark}  {outcome.rule.id:<11}{outcome.rule.sentence}{tail}"
