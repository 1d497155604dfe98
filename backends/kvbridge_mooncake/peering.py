"""Finding out that a peer is there, and that it is the one meant."""

import threading
import time
from dataclasses import dataclass

import numpy as np

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import Descriptors, Peer, State
from kvbridge_mooncake.hub import Hub
from kvbridge_mooncake.job import Connection, make_job
from kvbridge_mooncake.library import Engine
from kvbridge_mooncake.translate import translate
from kvbridge_mooncake.wire import AgentCard
from kvbridge_mooncake.worker import Worker

BEACON_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class MooncakePeer(Peer):
    """A peer, and the connection behind it."""

    connection: Connection


class Beacon:
    """Memory of the driver's own: the agent's name, for peers that want to see who answers."""

    def __init__(self, agent: str = "") -> None:
        """Write the name."""
        self.bytes = np.zeros(BEACON_BYTES, np.uint8)
        self.bytes[: len(agent)] = np.frombuffer(agent.encode(), np.uint8)

    @property
    def address(self) -> int:
        """Its first byte."""
        return int(self.bytes.ctypes.data)

    @property
    def descriptors(self) -> Descriptors:
        """All of it."""
        return beacon_at(self.address)

    @property
    def agent(self) -> str:
        """The name that is written here."""
        return self.bytes.tobytes().rstrip(b"\0").decode(errors="replace")


def beacon_at(address: int) -> Descriptors:
    """Return the descriptors of a beacon."""
    return Descriptors(np.array([address], np.uint64), np.array([BEACON_BYTES], np.uint64))


class EngineNames:
    """What to call each remote engine.

    Mooncake knows an engine by the text "address:port" and keeps what it once heard of it for
    good, the data port above all. A port may be taken again by another engine: that one gets
    another text for the same address, with one more leading zero.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._lock = threading.Lock()
        self._agents: dict[tuple[str, int], list[str]] = {}

    def name(self, card: AgentCard) -> str:
        """Return the name of an agent's engine, the same at each call."""
        with self._lock:
            agents = self._agents.setdefault((card.address, card.engine_port), [])
            if card.agent not in agents:
                agents.append(card.agent)
            generation = agents.index(card.agent)
        if not generation:
            return f"{card.address}:{card.engine_port}"
        number = int.from_bytes(bytes(map(int, card.address.split("."))), "big")
        return f"0x{'0' * generation}{number:x}:{card.engine_port}"


def meet(
    hub: Hub, worker: Worker, engine: Engine, name: str, card: AgentCard, deadline: float
) -> Connection:
    """Connect to a peer, and read its name from its memory.

    First by our own connection, which has a deadline. Then Mooncake's probe, in a thread that may
    be left behind. Only then a copy: with a silent peer the first would stop all others for 61 s.

    Raises:
        PeerLostError: It does not answer before the deadline, or is somebody else.
    """
    channel = hub.connect(card, deadline, worker.wake)
    connection = Connection(card.agent, name, channel)
    try:
        _probe(engine, name, card, deadline)
        _read_beacon(worker, connection, card, deadline)
    except PeerLostError:
        worker.drop(connection)
        raise
    return connection


def _probe(engine: Engine, name: str, card: AgentCard, deadline: float) -> None:
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(engine.send_probe(name)),
        name="kvbridge-mooncake-probe",
        daemon=True,
    )
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0))
    if not answers:
        raise PeerLostError(_silence(card))
    if answers[0]:
        raise PeerLostError(str(translate(answers[0], f"probing the engine of {card.agent}")))


def _read_beacon(worker: Worker, connection: Connection, card: AgentCard, deadline: float) -> None:
    scratch = Beacon()
    job = make_job("read", connection, scratch.descriptors, beacon_at(card.beacon))
    job.kept = scratch
    connection.has_sockets = True
    worker.enqueue(job)
    if not job.ended.wait(max(deadline - time.monotonic(), 0)):
        raise PeerLostError(_silence(card))
    if job.state is not State.DONE:
        raise PeerLostError(f"agent {card.agent} cannot be reached: {job.failure}")
    if scratch.agent != card.agent:
        raise PeerLostError(
            f"agent {card.agent} does not exist any more; {scratch.agent!r} answers in its place"
        )


def _silence(card: AgentCard) -> str:
    return (
        f"agent {card.agent} does not answer in time at {card.address}:{card.engine_port}; is it "
        "alive, and do both its ports lead there?"
    )


def check_not_self(ours: str, card: AgentCard) -> None:
    """Refuse an agent as its own peer.

    Raises:
        TransportError: It is.
    """
    if card.agent == ours:
        raise TransportError("this is the agent info of this agent itself; give the peer's")
