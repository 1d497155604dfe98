"""The conformance suite notices what is wrong: each wrong transport is killed by its rule."""

from functools import cache

import pytest

from kvbridge.testing import Status, TransportHarness, all_rules, run_suite
from kvbridge.transport.local import LocalTransport
from tests.mutants import crowds, ends, lists, moves, notifications, peers, promises, refusals
from tests.mutants.base import CapabilityMutant, Mutant

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(85)]

MUTANTS: list[type[Mutant]] = [
    kind
    for module in (lists, moves, ends, notifications, peers, crowds, promises, refusals)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Mutant) and "killed_by" in vars(kind)
    if kind.__module__ == module.__name__
]

QUICK: tuple[type[Mutant], ...] = (
    moves.LosesTheLastByte,
    notifications.NotifiesBeforeTheBytes,
    peers.UsesDroppedPeers,
    promises.UnregistersWhatIsBusy,
    refusals.ReadsUndeclared,
)
"""Those that the quick tier tries; all others take minutes."""


@cache
def status_of(kind: type[LocalTransport], rule: str) -> Status:
    """Return what a rule says of a transport that should be sound."""
    return run_suite(TransportHarness(kind), rules=[rule]).by_rule()[rule].status


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            id=f"{kind.__name__}-{kind.killed_by}",
            marks=[] if kind in QUICK else [pytest.mark.full],
        )
        for kind in MUTANTS
    ],
)
def test_the_rule_kills_the_mutant(kind: type[Mutant]) -> None:
    rule = kind.killed_by
    # Where the declaration itself is the lie, the rule does not apply to who does not tell it.
    lie = issubclass(kind, CapabilityMutant) and kind.declares_a_lie
    assert status_of(kind.sound, rule) in {Status.PASSED, Status.NOT_APPLICABLE if lie else ""}
    outcomes = run_suite(TransportHarness(kind, patience_s=3.0), rules=[rule]).outcomes
    failed = [outcome for outcome in outcomes if outcome.status is Status.FAILED]
    assert failed, [str(outcome) for outcome in outcomes]
    assert kind.says in failed[0].detail


def test_every_rule_has_a_mutant() -> None:
    assert all(kind.__doc__ for kind in MUTANTS)
    killers = {kind.killed_by for kind in MUTANTS}
    assert killers == set(all_rules())
