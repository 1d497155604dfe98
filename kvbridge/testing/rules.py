"""The numbered rules: what each promises, and to which transports it applies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from kvbridge.transport import Capabilities

Placement = Literal["processes", "threads"]
Tier = Literal["quick", "full"]

GROUPS = {
    "LIFE": "Life cycle",
    "REG": "Registration",
    "PEER": "Peering",
    "READ": "Read",
    "WRITE": "Write",
    "NOTIFY": "Notifications",
    "ABANDON": "Abandoned operations",
    "LIMIT": "Capabilities and limits",
    "REFUSE": "Refusal",
    "FAIL": "Failure",
    "CONC": "Concurrency",
    "RESTART": "Restart",
    "PLAN": "Whole plans",
}
"""Prefixes of rule ids, in the order in which the groups are run and shown."""

RuleFunction = Callable[..., None]
RULE_ATTRIBUTE = "__kvbridge_rule__"


@dataclass(frozen=True, slots=True)
class Rule:
    """One numbered promise.

    Attributes:
        id: Stable for ever; a rule that is withdrawn leaves a hole.
        sentence: What holds for every transport that the rule applies to.
        since: The suite version that brought it.
        needs: Capabilities that must be declared for the rule to apply.
        lacks: Capabilities that must *not* be declared for the rule to apply.
        placements: Whether both agents live in processes of their own, or in one process.
        tiers: When it runs; a rule with both is tried harder in the second.
        function: The method of the suite that proves it.
    """

    id: str
    sentence: str
    since: int = 1
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ("processes",)
    tiers: tuple[Tier, ...] = ("quick",)
    function: RuleFunction = field(repr=False, compare=False, default=lambda: None)

    @property
    def group(self) -> str:
        """The prefix of the id, a key of :data:`GROUPS`."""
        return self.id.partition("-")[0]

    @property
    def method(self) -> str:
        """Name of the suite's method."""
        return self.function.__name__

    def why_not(self, can: Capabilities) -> str:
        """Say why the rule does not apply to such a transport; empty if it does."""
        off = [word for word in self.needs if not declares(can, word)]
        if off:
            return f"{' and '.join(off)} not declared"
        on = [word for word in self.lacks if declares(can, word)]
        return f"{' and '.join(on)} declared" if on else ""


def declares(can: Capabilities, word: str) -> bool:
    """Say whether a capability is on; ``"dram"`` stands for the kind of memory the suite uses."""
    if word == "dram":
        return "dram" in can.memory_kinds
    return getattr(can, word) not in (False, 0, "none", frozenset())


_rules: dict[str, Rule] = {}


def rule(id: str, sentence: str, **more: Any) -> Callable[[RuleFunction], RuleFunction]:  # noqa: A002
    """Enter a method of the suite as the proof of a rule."""
    if id in _rules:
        raise ValueError(f"rule {id} exists already: {_rules[id].sentence!r} and {sentence!r}")
    if id.partition("-")[0] not in GROUPS:
        raise ValueError(f"rule {id} belongs to none of the groups {', '.join(GROUPS)}")

    def enter(function: RuleFunction) -> RuleFunction:
        name = function.__name__
        if any(other.method == name for other in _rules.values()):
            raise ValueError(f"rule {id}: another rule has a method {name}, too")
        _rules[id] = Rule(id, sentence, function=function, **more)
        function.__doc__ = sentence
        setattr(function, RULE_ATTRIBUTE, _rules[id])
        return function

    return enter


def all_rules() -> dict[str, Rule]:
    """Return every rule of the suite by id, group by group."""
    import_module("kvbridge.testing.suite")  # whose methods enter the rules
    order = list(GROUPS)
    return dict(sorted(_rules.items(), key=lambda item: (order.index(item[1].group), item[0])))
