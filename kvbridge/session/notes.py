"""Notes from rank to rank: how they are sent and read, and how producers are told of an end."""

from kvbridge.errors import HandshakeError, TransportError
from kvbridge.handshake.messages import Note, Release, decode_note
from kvbridge.handshake.wire import encode
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.session import Session, told_by
from kvbridge.transport import Peer, Transport


class Notes:
    """What one rank says to others, and hears from them.

    Attributes:
        unreadable: Notifications that could not be read.
        unsent: Notifications that could not be sent.
    """

    def __init__(self, transport: Transport, local: LocalRank) -> None:
        """Take what carries them, and who sends them."""
        self._transport, self._local = transport, local
        self.unreadable = 0
        self.unsent = 0

    def read(self, payload: bytes) -> Note | None:
        """Return what a notification says; None if it cannot be read."""
        try:
            return decode_note(payload)
        except HandshakeError:
            self.unreadable += 1
            return None

    def send(self, peer: Peer, note: Note) -> bool:
        """Send a note; whether that could be done."""
        payload = encode(note)
        try:
            self._transport.notify(peer, payload)
        except TransportError:
            # A producer that is gone needs no telling; one that lives frees by its own deadline.
            self.unsent += 1
            return False
        return True

    def release(self, session: Session, request_id: str, *, ok: bool) -> None:
        """Tell an engine's ranks that this one needs a request's blocks no more.

        Args:
            session: With that engine.
            request_id: The request, by its name for it.
            ok: Whether this rank has what it needs.
        """
        local = self._local
        for rank in told_by(session.plan):  # and no rank that we only give to
            release = Release(
                request_id=request_id,
                engine_id=local.cache.engine_id,
                incarnation=local.incarnation,
                rank=local.cache.rank,
                readers=session.plan.readers[rank],
                ok=ok,
            )
            self.send(session.peers[rank], release)
