"""All rules together."""

from typing import ClassVar

from kvbridge.testing.harness import TransportHarness
from kvbridge.testing.suite.abandoned import AbandonRules
from kvbridge.testing.suite.concurrency import ConcurrencyRules
from kvbridge.testing.suite.failure import FailureRules
from kvbridge.testing.suite.lifecycle import LifeRules
from kvbridge.testing.suite.limits import LimitRules
from kvbridge.testing.suite.moves import MoveRules
from kvbridge.testing.suite.notifications import NotificationRules
from kvbridge.testing.suite.peering import PeeringRules
from kvbridge.testing.suite.plans import PlanRules
from kvbridge.testing.suite.refusal import RefusalRules
from kvbridge.testing.suite.registration import RegistrationRules
from kvbridge.testing.suite.restart import RestartRules

__all__ = ["ConformanceSuite"]


class ConformanceSuite(
    LifeRules,
    RegistrationRules,
    PeeringRules,
    MoveRules,
    NotificationRules,
    AbandonRules,
    LimitRules,
    RefusalRules,
    FailureRules,
    ConcurrencyRules,
    RestartRules,
    PlanRules,
):
    """Proves a transport; a test class derives from it and sets ``harness``.

    Attributes:
        harness: The transport, and how to run it.
    """

    harness: ClassVar[TransportHarness]
