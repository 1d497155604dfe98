"""UCX, on both paths that one host has."""

from kvbridge.testing import ConformanceSuite, TransportHarness


class TestUcx(ConformanceSuite):
    harness = TransportHarness("ucx", path="cma")


class TestUcxOverTcp(ConformanceSuite):
    harness = TransportHarness("ucx", options={"tls": "tcp"}, path="tcp")
