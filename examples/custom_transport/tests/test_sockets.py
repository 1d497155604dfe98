"""All that KVBridge asks of a transport, asked of this one."""

from kvbridge.testing import ConformanceSuite, TransportHarness
from kvbridge_sockets import SocketsTransport


class TestSockets(ConformanceSuite):
    harness = TransportHarness(SocketsTransport)
