"""The transport contract, the registry, and all that a driver needs from KVBridge."""

from kvbridge.config import parse_config
from kvbridge.model.memory import Region
from kvbridge.transport.base import (
    TRANSPORT_API_VERSION,
    Availability,
    Finished,
    Handle,
    Notification,
    Op,
    Path,
    Peer,
    Poll,
    State,
    Transport,
    TransportConfig,
)
from kvbridge.transport.capabilities import Capabilities
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.frame import open_agent_info, seal_agent_info
from kvbridge.transport.memory import LocalMemory, RegionTable
from kvbridge.transport.registry import (
    TransportChoice,
    available_transports,
    check_transport,
    get_transport,
    open_transport,
)

__all__ = [
    "TRANSPORT_API_VERSION",
    "Availability",
    "Capabilities",
    "Descriptors",
    "Finished",
    "Handle",
    "LocalMemory",
    "Notification",
    "Op",
    "Path",
    "Peer",
    "Poll",
    "Region",
    "RegionTable",
    "State",
    "Transport",
    "TransportChoice",
    "TransportConfig",
    "available_transports",
    "check_transport",
    "get_transport",
    "open_agent_info",
    "open_transport",
    "parse_config",
    "seal_agent_info",
]
