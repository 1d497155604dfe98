"""The reference transport."""

from kvbridge.testing import ConformanceSuite, TransportHarness


class TestLocal(ConformanceSuite):
    harness = TransportHarness("local", path="cma")
