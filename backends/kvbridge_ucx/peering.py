"""What two agents tell each other about themselves, and what follows for how they can talk."""

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath

import msgspec

from kvbridge.errors import TransportError
from kvbridge.transport import Card, Path, Peer, Region
from kvbridge_ucx.config import LOOPBACK
from kvbridge_ucx.connections import Route

NAME = "ucx"

# UCX's names of what carries one-sided operations, best first.
_PATHS: tuple[tuple[Path, tuple[str, ...]], ...] = (
    ("cma", ("cma",)),
    ("shm", ("xpmem", "knem", "posix", "sysv")),
    ("rdma", ("rc_", "dc_", "gga_", "srd")),
    ("tcp", ("tcp",)),
)
# Here a read needs nothing of the owner, and does not endanger it.
NATIVE_PATHS = frozenset({"cma", "shm", "rdma"})


class AgentCard(Card, frozen=True):
    """What an agent publishes.

    Attributes:
        agent: Its name, new at each start.
        address: UCX's own.
        device: The network device it listens on.
        network: The network namespace, the same for all who share a loopback device.
        memory: Its regions, each (address, length, kind, device, UCX's key).
    """

    agent: str
    address: bytes
    device: str
    network: str
    memory: tuple[tuple[int, int, str, int, bytes], ...] = ()

    def rkeys(self) -> list[tuple[Region, bytes]]:
        """Return the regions with their keys."""
        return [(Region(*row[:4]), row[4]) for row in self.memory]

    def at(self, address: bytes) -> "AgentCard":
        """Return the same card with UCX's address."""
        return msgspec.structs.replace(self, address=address)

    def with_memory(self, rkeys: Iterable[tuple[Region, bytes]]) -> "AgentCard":
        """Return the same card with other regions."""
        memory = tuple((r.address, r.nbytes, r.memory_kind, r.device, key) for r, key in rkeys)
        return msgspec.structs.replace(self, memory=memory)


@dataclass(frozen=True, slots=True, eq=False)
class UcxPeer(Peer):
    """A peer, and the way to it."""

    route: Route


def network() -> str:
    """Return the id of the network namespace, unlike that of any other host."""
    try:
        kernel = FilePath("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel}/{FilePath('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # an id that nobody shares makes every peer a stranger, which is safe
        return uuid.uuid4().hex


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


def chosen_keys(card: AgentCard, regions: Iterable[Region]) -> list[tuple[Region, bytes]]:
    """Return the keys of the regions that are to be used.

    Raises:
        TransportError: The card has none for one of them.
    """
    rkeys = dict(card.rkeys())
    for region in regions:
        if region not in rkeys:
            raise TransportError(
                f"region {region.address:#x}+{region.nbytes} is not among the {len(rkeys)} that "
                f"agent {card.agent} had registered; fetch its agent info again"
            )
    return [(region, rkeys[region]) for region in regions]


def path_of(lanes: Collection[str]) -> Path:
    """Name what carries the bytes."""
    for path, prefixes in _PATHS:
        if any(lane.startswith(prefixes) for lane in lanes):
            return path
    return "unknown"
