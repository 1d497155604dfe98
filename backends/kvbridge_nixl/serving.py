"""What served reads need of NIXL."""

from collections.abc import Callable, Sequence

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import Descriptors, Ended, Region
from kvbridge_nixl.card import AgentCard, check_reachable
from kvbridge_nixl.connections import Connection
from kvbridge_nixl.job import Job
from kvbridge_nixl.translate import translate
from kvbridge_nixl.worker import Worker


class NixlCarrier:
    """Sends and writes for :class:`~kvbridge.transport.ServedReads`, in the worker's thread."""

    def __init__(
        self,
        worker: Worker,
        card: AgentCard,
        introduce: Callable[[], tuple[bytes, Sequence[Region]]],
    ) -> None:
        """Serve for the agent of a card."""
        self._worker = worker
        self._card = card
        self.introduce = introduce

    def admit(self, sender: str, agent_info: bytes) -> Connection:
        """Make the sender known to NIXL; it stays so until it is lost."""
        card = AgentCard.unseal("nixl", agent_info)
        if card.agent != sender:
            raise TransportError(f"agent {sender} introduces itself as {card.agent}")
        check_reachable(self._card, card)
        try:
            return self._worker.join(card.agent, card.metadata)
        except self._worker.errors as error:
            raise PeerLostError(str(translate(error, f"adding reader {sender}"))) from error

    def send(self, link: Connection, message: bytes) -> None:
        """Send a message."""
        self._worker.send(link, message)

    def write(
        self,
        link: Connection,
        local: Descriptors,
        remote: Descriptors,
        message: bytes,
        ended: Ended,
    ) -> None:
        """Queue a write among the agent's own operations."""
        self._worker.enqueue(Job("write", link, local, remote, message, then=ended))
