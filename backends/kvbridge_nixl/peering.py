"""What two agents tell each other, and finding out whether and how they can talk."""

import time
import uuid
from dataclasses import dataclass
from pathlib import Path as FilePath

import msgspec
import numpy as np

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import Path, Peer, Region, State
from kvbridge_nixl.config import LOOPBACK
from kvbridge_nixl.connections import Connection
from kvbridge_nixl.job import Job
from kvbridge_nixl.library import Agent
from kvbridge_nixl.worker import Worker

BEACON_BYTES = 4096
# Reads of a beacon that decide on the lane; a busy machine may spoil one of them.
LANE_PROBES = 5


class AgentCard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an agent publishes.

    Attributes:
        agent: Its name, new at each start.
        metadata: NIXL's own.
        beacon: Address of the memory that holds its name, for peers to read.
        device: The network device it listens on.
        kernel: The running kernel, the same for all containers of a host.
        network: The network namespace, the same for all who share a loopback device.
    """

    agent: str
    metadata: bytes
    beacon: int
    device: str
    kernel: str
    network: str


@dataclass(frozen=True, slots=True, eq=False)
class NixlPeer(Peer):
    """A peer, and the remote agent of NIXL behind it."""

    connection: Connection


class Beacon:
    """Memory of the driver's own: the agent's name, for peers that want to see who answers."""

    def __init__(self, agent_name: str) -> None:
        """Write the name."""
        self.bytes = np.zeros(BEACON_BYTES, np.uint8)
        self.bytes[: len(agent_name)] = np.frombuffer(agent_name.encode(), np.uint8)

    @property
    def address(self) -> int:
        """Its first byte."""
        return int(self.bytes.ctypes.data)

    def check(self, agent_name: str) -> None:
        """Compare with a name.

        Raises:
            PeerLostError: Another one is written here.
        """
        found = self.bytes.tobytes().rstrip(b"\0").decode(errors="replace")
        if found != agent_name:
            raise PeerLostError(
                f"agent {agent_name} does not exist any more; {found[:80]!r} answers in its place"
            )


def whereabouts() -> tuple[str, str]:
    """Return the ids of the running kernel and of the network namespace."""
    try:
        kernel = FilePath("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = f"{kernel}/{FilePath('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # an id that nobody shares makes every peer a stranger, which is safe
        kernel = network = uuid.uuid4().hex
    return kernel, network


def read_card(payload: bytes) -> AgentCard:
    """Decode a card.

    Raises:
        TransportError: Its fields are not those of this version.
    """
    try:
        return msgspec.msgpack.decode(payload, type=AgentCard)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"agent info for transport 'nixl' has unknown fields ({error}); "
            "run the same KVBridge version on both sides"
        ) from error


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


def meet(worker: Worker, connection: Connection, card: AgentCard, deadline: float) -> bool:
    """Read a peer's beacon: connects, proves who answers, and shows the lane.

    Without this the first transfer would need the peer's help even where the kernel copies.

    Returns:
        Whether NIXL copies within its post call, as only the same-host lane does: over a
        network the answer would take a round trip.

    Raises:
        PeerLostError: No answer before the deadline, or by another agent.
    """
    scratch = Beacon("")
    with worker.library() as agent:
        registered = register(agent, Region(scratch.address, BEACON_BYTES))
    try:
        _read_beacon(worker, connection, card, scratch, deadline)
        scratch.check(card.agent)
        jobs = [
            _read_beacon(worker, connection, card, scratch, deadline) for _ in range(LANE_PROBES)
        ]
    except TimeoutError as error:
        # The bytes may still come, so their place has to stay.
        worker.kept.append((scratch, registered))
        raise PeerLostError(
            f"agent {card.agent} does not answer in time; is it alive, and does device "
            f"{card.device!r} there lead here?"
        ) from error
    except PeerLostError:
        _deregister(worker, registered)
        raise
    _deregister(worker, registered)
    return 2 * sum(job.at_once for job in jobs) > LANE_PROBES


def lane(ours: AgentCard, theirs: AgentCard, at_once: bool) -> Path:
    """Name what carries the bytes; "unknown" where NIXL does not let us know."""
    if at_once and ours.kernel == theirs.kernel:
        return "cma"
    return "tcp" if LOOPBACK in (ours.device, theirs.device) else "unknown"


def register(agent: Agent, region: Region, memory_type: str = "DRAM") -> object:
    """Register one region with NIXL; returns what deregisters it."""
    return agent.register_memory([(region.address, region.nbytes, region.device, "")], memory_type)


def _deregister(worker: Worker, registered: object) -> None:
    with worker.library() as agent:
        agent.deregister_memory(registered)


def _read_beacon(
    worker: Worker, connection: Connection, card: AgentCard, scratch: Beacon, deadline: float
) -> Job:
    job = Job(
        "read",
        connection,
        np.array([[scratch.address, BEACON_BYTES, 0]], np.uint64),
        np.array([[card.beacon, BEACON_BYTES, 0]], np.uint64),
    )
    worker.enqueue(job)
    if not job.ended.wait(max(deadline - time.monotonic(), 0)):
        raise TimeoutError
    if job.state is not State.DONE:
        raise PeerLostError(f"agent {card.agent} cannot be reached: {job.reason}")
    return job
