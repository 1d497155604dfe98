"""What an agent publishes, and what can be told from that before anything is connected."""

import uuid
from pathlib import Path

import numpy as np

from kvbridge.errors import TransportError
from kvbridge.transport import Card, Descriptors, Region
from kvbridge_nixl.config import LOOPBACK

LANDING_BYTES = 4096


class AgentCard(Card, frozen=True):
    """What an agent publishes.

    Attributes:
        agent: Its name, new at each start.
        metadata: NIXL's own.
        landing: Address of the memory that peers may write to, to try the lane.
        device: The network device it listens on.
        kernel: The running kernel, the same for all containers of a host.
        network: The network namespace, the same for all who share a loopback device.
    """

    agent: str
    metadata: bytes
    landing: int
    device: str
    kernel: str
    network: str


class Landing:
    """Memory of the driver's own that peers write to; nobody cares what."""

    def __init__(self) -> None:
        """Make it."""
        self._bytes = np.zeros(LANDING_BYTES, np.uint8)
        self.region = Region(int(self._bytes.ctypes.data), LANDING_BYTES)


def landing_at(address: int) -> Descriptors:
    """Return the whole landing of an agent."""
    return Descriptors(np.array([address], np.uint64), np.array([LANDING_BYTES], np.uint64))


def whereabouts() -> tuple[str, str]:
    """Return the ids of the running kernel and of the network namespace."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = f"{kernel}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # an id that nobody shares makes every peer a stranger, which is safe
        kernel = network = uuid.uuid4().hex
    return kernel, network


def check_reachable(ours: AgentCard, theirs: AgentCard) -> None:
    """Refuse peers that no connection can lead to.

    Raises:
        TransportError: It is this agent, or a loopback device would have to lead elsewhere.
    """
    if ours.agent == theirs.agent:
        raise TransportError("this is the agent info of this agent itself; give the peer's")
    if LOOPBACK in (ours.device, theirs.device) and ours.network != theirs.network:
        raise TransportError(
            f"the peer is on another host or in another network namespace, and the device is "
            f"{ours.device!r} here and {theirs.device!r} there; set option 'device' on both "
            "sides to one that leads to the other"
        )
