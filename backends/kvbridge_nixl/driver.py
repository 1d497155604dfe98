"""The transport ``nixl``: NIXL agents with the UCX backend."""

from typing import ClassVar

from kvbridge.transport import Availability, Capabilities, Driver, Events, TransportConfig
from kvbridge_nixl import library
from kvbridge_nixl.agent import CAPABILITIES, NixlAgent
from kvbridge_nixl.config import NixlConfig


class NixlTransport(Driver[NixlConfig, NixlAgent]):
    """Moves bytes with NIXL: CMA within a host, TCP or RDMA between hosts."""

    name: ClassVar[str] = "nixl"
    config_type: ClassVar[type[TransportConfig]] = NixlConfig

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def start(self, options: NixlConfig, events: Events) -> NixlAgent:
        return NixlAgent(options, events, self.memory)
