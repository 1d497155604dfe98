"""Wrappers that change nothing, and a transport that can nothing."""

import pytest

from kvbridge.testing import ConformanceSuite, TransportHarness
from tests.mutants.minimal import MinimalTransport


@pytest.mark.full
class TestMinimal(ConformanceSuite):
    harness = TransportHarness(MinimalTransport)


@pytest.mark.full
class TestWrappers(ConformanceSuite):
    harness = TransportHarness("recording", options={"inner": {"transport": "faulty"}})
