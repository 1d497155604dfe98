"""Which remote engines this rank is paired with."""

from collections.abc import Mapping

from kvbridge.errors import HandshakeError, UnknownEngineError
from kvbridge.handshake import HandshakeMetadata
from kvbridge.model import Rank, TransferTopology
from kvbridge.plan.values import Direction
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.session import Session, close_session, generation_of, open_session
from kvbridge.session.wants import Wants
from kvbridge.transport import Peer, Transport


class Pairings:
    """The sessions of one rank; :meth:`connect` may run in another thread than the rest.

    Attributes:
        sessions: The sessions, by the ids of the engines.
    """

    def __init__(
        self,
        topology: TransferTopology,
        local: LocalRank,
        transport: Transport,
        wants: Wants,
    ) -> None:
        """Take what sessions are made from.

        Args:
            topology: Learns of remote engines.
            local: The rank.
            transport: Moves the bytes.
            wants: What has been asked for, and needs its peers until it is answered.
        """
        self._topology, self._local, self._transport = topology, local, transport
        self._wants = wants
        self.sessions: dict[str, Session] = {}

    def session(self, engine_id: str) -> Session:
        """Return the session with an engine.

        Raises:
            UnknownEngineError: It is not connected.
        """
        if engine_id not in self.sessions:
            raise UnknownEngineError(
                f"engine {engine_id!r} is not connected; connected: {sorted(self.sessions)}"
            )
        return self.sessions[engine_id]

    def is_current(self, session: Session) -> bool:
        """Whether a session is still the one with its engine."""
        return self.sessions.get(session.engine_id) is session

    def peer_named(self, agent: str) -> Peer | None:
        """Return a connected rank by the name of its agent."""
        sessions = list(self.sessions.values())  # others may be joined meanwhile
        peers = (peer for session in sessions for peer in session.peers.values())
        return next((peer for peer in peers if peer.agent == agent), None)

    def connect(
        self,
        metadata: Mapping[Rank, HandshakeMetadata],
        *,
        timeout_s: float,
        direction: Direction,
    ) -> Session:
        """Pair with a remote engine; see :meth:`RankAgent.connect`."""
        known = None
        for data in metadata.values():
            known = self.sessions.get(data.engine_id)
            start = (data.incarnation, generation_of(metadata))
            if known is not None and (known.incarnation, known.generation) != start:
                self.disconnect(data.engine_id)
                known = None
        if known is not None and direction in known.plans:
            return known
        before = {} if known is None else known.peers
        cache = self._local.cache
        session = open_session(
            self._topology,
            cache,
            self._transport,
            metadata,
            factors=self._local.factors,
            local_engine=self._local.engine,
            timeout_s=timeout_s,
            direction=direction,
            known=known,
        )
        if known is None:
            self.sessions[session.engine_id] = session
            self._wants.replaced(session.engine_id, session.incarnation)
        elif not self.is_current(known):
            for rank in session.peers.keys() - before.keys():
                self._transport.drop_peer(session.peers[rank])
            raise HandshakeError(
                f"engine {session.engine_id!r} was dropped while it was joined; join it again"
            )
        if self._local.cache is not cache:  # a renewal sees the session, or this sees the renewal
            self._drop(session.engine_id)
            raise HandshakeError(
                f"{cache.where} registered other memory while engine {session.engine_id!r} was "
                "joined; join it again"
            )
        return session

    def disconnect(self, engine_id: str) -> None:
        """Forget a remote engine.

        Raises:
            UnknownEngineError: It is not connected.
        """
        self.session(engine_id)
        self._drop(engine_id)

    def disconnect_all(self) -> None:
        """Forget every remote engine."""
        for engine_id in list(self.sessions):
            self._drop(engine_id)

    def _drop(self, engine_id: str) -> None:
        """Forget a remote engine, if nobody else does so at this moment."""
        session = self.sessions.pop(engine_id, None)
        if session is not None:
            kept = self._wants.orphan(tuple(session.peers.values()))
            close_session(self._topology, self._transport, session, keep=kept)
