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
from kvbridge.transport.card import Card
from kvbridge.transport.carried import tcp_nbytes_sent
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.driver import Agent, Driver
from kvbridge.transport.environment import UCX_VARIABLES, ucx_environment
from kvbridge.transport.events import Events
from kvbridge.transport.frame import open_agent_info, seal_agent_info
from kvbridge.transport.memory import LocalMemory, RegionTable
from kvbridge.transport.registry import (
    TransportChoice,
    available_transports,
    check_choice,
    check_transport,
    get_transport,
    open_transport,
)
from kvbridge.transport.served import Carrier, Ended, Link, ServedReads
from kvbridge.transport.served_wire import open_notification, seal_notification
from kvbridge.transport.wrappers import Fault, Faults, FaultyTransport, Record, RecordingTransport

__all__ = [
    "TRANSPORT_API_VERSION",
    "UCX_VARIABLES",
    "Agent",
    "Availability",
    "Capabilities",
    "Card",
    "Carrier",
    "Descriptors",
    "Driver",
    "Ended",
    "Events",
    "Fault",
    "Faults",
    "FaultyTransport",
    "Finished",
    "Handle",
    "Link",
    "LocalMemory",
    "Notification",
    "Op",
    "Path",
    "Peer",
    "Poll",
    "Record",
    "RecordingTransport",
    "Region",
    "RegionTable",
    "ServedReads",
    "State",
    "Transport",
    "TransportChoice",
    "TransportConfig",
    "available_transports",
    "check_choice",
    "check_transport",
    "get_transport",
    "open_agent_info",
    "open_notification",
    "open_transport",
    "parse_config",
    "seal_agent_info",
    "seal_notification",
    "tcp_nbytes_sent",
    "ucx_environment",
]
