"""Mooncake, which listens on every interface: in a network namespace of its own."""

from kvbridge.testing import ConformanceSuite, TransportHarness


class TestMooncake(ConformanceSuite):
    harness = TransportHarness(
        "mooncake", options={"allow_open_data_port": True}, isolate_network=True, path="tcp"
    )
