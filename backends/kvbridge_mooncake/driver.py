"""The transport ``mooncake``: Mooncake's transfer engine over TCP."""

from typing import ClassVar

from kvbridge.transport import Availability, Capabilities, Driver, Events, TransportConfig
from kvbridge_mooncake import library
from kvbridge_mooncake.agent import CAPABILITIES, MooncakeAgent
from kvbridge_mooncake.config import MooncakeConfig


class MooncakeTransport(Driver[MooncakeConfig, MooncakeAgent]):
    """Moves bytes with Mooncake over TCP; notifies over connections of its own."""

    name: ClassVar[str] = "mooncake"
    config_type: ClassVar[type[TransportConfig]] = MooncakeConfig

    @classmethod
    def probe(cls) -> Availability:
        return library.availability()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def start(self, options: MooncakeConfig, events: Events) -> MooncakeAgent:
        return MooncakeAgent(options, events, self.memory)
