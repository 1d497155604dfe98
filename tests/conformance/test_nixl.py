"""NIXL, on both paths that one host has."""

from kvbridge.testing import ConformanceSuite, TransportHarness


class TestNixl(ConformanceSuite):
    harness = TransportHarness("nixl", path="cma")


class TestNixlOverTcp(ConformanceSuite):
    harness = TransportHarness("nixl", environment={"UCX_TLS": "tcp"}, path="tcp")
