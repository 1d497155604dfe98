"""The transport ``local``: one-sided copies between processes of one Linux host."""

from kvbridge.transport import Availability, Capabilities, Driver, Events
from kvbridge.transport.local import library
from kvbridge.transport.local.agent import CAPABILITIES, LocalAgent
from kvbridge.transport.local.config import LocalConfig


class LocalTransport(Driver[LocalConfig, LocalAgent]):
    """Copies by the kernel's cross-memory calls; notifies over Unix sockets."""

    name = "local"
    config_type = LocalConfig

    @classmethod
    def probe(cls) -> Availability:
        return library.probe()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def start(self, options: LocalConfig, events: Events) -> LocalAgent:
        self.check_available()
        return LocalAgent(options, events)
