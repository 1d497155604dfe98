"""Running rules: one, or all of a suite, without pytest."""

import difflib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

from kvbridge.errors import ConfigError, TransportUnavailableError
from kvbridge.testing.bench import Bench, Laboratory
from kvbridge.testing.harness import TransportHarness
from kvbridge.testing.report import Outcome, Report, Status
from kvbridge.testing.rules import Rule, Tier, all_rules
from kvbridge.testing.violations import NotApplicable, RuleViolationError


def run_suite(
    harness: TransportHarness,
    *,
    rules: Iterable[str] | None = None,
    tier: Tier = "quick",
    label: str = "",
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Try a transport against the rules.

    Args:
        harness: The transport, and how to run it.
        rules: Ids of the rules to try; all of them if None.
        tier: ``"quick"`` tries the rules that take seconds; ``"full"`` tries all, and harder.
        label: What to call the run in the report.
        progress: Called after each run of a rule.

    Raises:
        ConfigError: A rule, or the rule of a waiver, does not exist; or the transport cannot be
            opened with the harness's options.
        TransportUnavailableError: The transport cannot run here.
    """
    from kvbridge.testing.suite import ConformanceSuite

    available = harness.availability()
    if not available.ok:
        raise TransportUnavailableError(
            f"transport {harness.name!r} cannot run here: {available.reason}.", available.hint
        )
    check_rule_ids(waiver.rule for waiver in harness.waivers)
    known = all_rules()
    chosen = list(known) if rules is None else check_rule_ids(rules)
    report = Report(harness, label or harness.name)
    suite = ConformanceSuite()
    laboratory = Laboratory(harness)
    try:
        laboratory.check_options()
        for one in chosen:
            for bench in _benches(known[one], laboratory, tier):
                outcome = run_rule(known[one], bench, getattr(suite, known[one].method))
                report.add(outcome)
                if progress:
                    progress(outcome)
    finally:
        report.path = laboratory.path
        laboratory.close()
    return report


def check_rule_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids as a list.

    Raises:
        ConfigError: One of them does not exist.
    """
    known = all_rules()
    chosen = list(ids)
    for one in chosen:
        if one not in known:
            close = difflib.get_close_matches(one, known, n=1, cutoff=0.5)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"no rule {one!r}; {meant}'kvbridge conformance --list' lists them")
    return chosen


def run_rule(rule: Rule, bench: Bench, function: Callable[[Bench], None]) -> Outcome:
    """Try one rule once, and judge it; never raises for what the transport does."""
    start = time.monotonic()
    status, detail = _try(rule, bench, function)
    bench.close(broken=status is Status.FAILED)
    status, detail = _judge(rule, bench.harness, status, detail)
    seconds = time.monotonic() - start
    return Outcome(rule, status, detail, seconds, bench.placement, bench.tier)


def _benches(rule: Rule, laboratory: Laboratory, tier: Tier) -> Iterator[Bench]:
    # The tier that tries harder makes the other one needless.
    chosen: Tier = "full" if tier == "full" and "full" in rule.tiers else "quick"
    if chosen in rule.tiers:
        for placement in rule.placements:
            yield Bench(laboratory, placement, chosen)


def _try(rule: Rule, bench: Bench, function: Callable[[Bench], None]) -> tuple[Status, str]:
    try:
        if why_not := _why_not(rule, bench):
            return Status.NOT_APPLICABLE, why_not
        function(bench)
        bench.check_alive()
    except NotApplicable as reason:
        return Status.NOT_APPLICABLE, str(reason)
    except Exception as error:
        return Status.FAILED, _describe(error, bench)
    return Status.PASSED, ""


def _why_not(rule: Rule, bench: Bench) -> str:
    if bench.placement == "threads":
        first = Bench(bench._laboratory).can  # noqa: SLF001
        if not first.peers_in_process:
            return "peers_in_process not declared"
    return rule.why_not(bench.can) if rule.needs or rule.lacks else ""


def _describe(error: Exception, bench: Bench) -> str:
    notes = list(getattr(error, "__notes__", ()))
    if isinstance(error, RuleViolationError):
        said = str(error)
        try:
            bench.check_alive()
        except RuleViolationError as death:
            said += f"\n{death}"
    else:
        said = "".join(traceback.format_exception(error))
    return "\n".join([said, *notes])


def _judge(
    rule: Rule, harness: TransportHarness, status: Status, detail: str
) -> tuple[Status, str]:
    """Bring waivers and the suite version in."""
    tried = status in (Status.PASSED, Status.FAILED)
    waiver = harness.waiver(rule.id)
    if tried and rule.since > harness.suite_version:
        now = "holds" if status is Status.PASSED else f"is broken: {detail}"
        return Status.PENDING, f"came with suite {rule.since}, and {now}"
    if not waiver or not tried:
        return status, detail
    if status is Status.PASSED:
        return Status.STALE_WAIVER, f"waived as {waiver.kind} ({waiver.reason}); remove the waiver"
    return Status.WAIVED, f"{waiver.kind}, {waiver.reason} ({waiver.link})"
