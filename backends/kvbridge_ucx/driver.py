"""The transport ``ucx``: one-sided operations of UCX, without any library in between."""

from typing import ClassVar

from kvbridge.transport import Availability, Capabilities, Driver, Events, TransportConfig
from kvbridge_ucx import library
from kvbridge_ucx.agent import CAPABILITIES, UcxAgent
from kvbridge_ucx.config import UcxConfig
from kvbridge_ucx.peering import NAME


class UcxTransport(Driver[UcxConfig, UcxAgent]):
    """Moves bytes with UCX: CMA within a host, TCP or RDMA between hosts."""

    name: ClassVar[str] = NAME
    config_type: ClassVar[type[TransportConfig]] = UcxConfig

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def start(self, options: UcxConfig, events: Events) -> UcxAgent:
        return UcxAgent(options, events, self.memory)
