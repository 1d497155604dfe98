"""What served reads need of UCX."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbridge.errors import TransportError
from kvbridge.transport import Descriptors, Ended, Region
from kvbridge_ucx.connections import Route
from kvbridge_ucx.job import Job
from kvbridge_ucx.peering import NAME, AgentCard, check_reachable

if TYPE_CHECKING:
    from kvbridge_ucx.worker import Worker


class UcxCarrier:
    """Sends and writes for :class:`~kvbridge.transport.ServedReads`, in the worker's thread."""

    def __init__(self, worker: "Worker") -> None:
        """Serve for the agent of a worker."""
        self._worker = worker

    def introduce(self) -> tuple[bytes, Sequence[Region]]:
        """Return what a peer needs to write here."""
        return self._worker.memory.agent_info, self._worker.memory.regions

    def admit(self, sender: str, agent_info: bytes) -> Route:
        """Connect to an agent that wants to read."""
        card = AgentCard.unseal(NAME, agent_info)
        if card.agent != sender:
            raise TransportError(f"agent {sender} introduces itself as {card.agent}")
        check_reachable(self._worker.memory.card, card)
        route = self._worker.join(card, card.rkeys())
        route.connection.met = True
        return route

    def send(self, link: Route, message: bytes) -> None:
        """Send a message."""
        self._worker.send(link, message)

    def write(
        self, link: Route, local: Descriptors, remote: Descriptors, message: bytes, ended: Ended
    ) -> None:
        """Queue a write among the agent's own operations."""
        self._worker.begin(Job("write", link, local, remote, message, ended))
