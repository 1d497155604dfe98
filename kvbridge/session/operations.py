"""What the transport does for this rank, and whose each operation is until it is quiet."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.model import Rank
from kvbridge.plan import TransferBatch
from kvbridge.session.causes import Cause
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.session import Session
from kvbridge.transport import Descriptors, Handle, Op, Peer, State, Transport


class Moves(Protocol):
    """What operations belong to: a transfer, or a gift.

    Attributes:
        pending: Those that are not quiet.
    """

    pending: set[Any]

    def settle(self, handle: Handle, state: State, reason: str) -> None:
        """Note that one has become quiet."""

    def fail(self, reason: str, cause: Cause) -> None:
        """Note that one could not be submitted."""


class Operations:
    """The operations of one rank that are not quiet."""

    def __init__(self, transport: Transport, local: LocalRank) -> None:
        """Take what moves the bytes, and what they are moved from or to."""
        self._transport, self._local = transport, local
        self._owners: dict[Handle, Moves] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._owners)

    def owners(self) -> list[Moves]:
        """Return whose they are, one for each; asked from any thread."""
        return list(self._owners.values())

    def reach(self, peers: Collection[Peer]) -> bool:
        """Whether one of them is with one of these peers."""
        busy = {handle.peer for handle in self._owners}
        return any(peer in busy for peer in peers)

    def submit(
        self, op: Op, session: Session, moves: Moves, batch: TransferBatch
    ) -> frozenset[Handle]:
        """Submit what is exchanged with one rank, in as many parts as the transport needs.

        Returns:
            The operations; without those that the transport refuses, which fails the rest.
        """
        handles: list[Handle] = []
        rank = batch.remote_rank
        most = session.peers[rank].capabilities.descriptors_max
        for part in _parts(batch.nbytes.size, most):
            nbytes = batch.nbytes[part]
            here = Descriptors(batch.local_address[part], nbytes, *self._local.memory)
            there = Descriptors(batch.remote_address[part], nbytes, *session.memory[rank])
            handle = self.submit_part(op, session, moves, rank, here, there)
            if handle is None:
                break
            handles.append(handle)
        return frozenset(handles)

    def submit_part(
        self,
        op: Op,
        session: Session,
        moves: Moves,
        rank: Rank,
        here: Descriptors,
        there: Descriptors,
    ) -> Handle | None:
        """Submit a part of something; None if the transport refuses, which fails it."""
        try:
            handle = self._transport.submit(op, session.peers[rank], here, there)
        except TransportError as error:
            session.lost |= isinstance(error, PeerLostError)
            moves.fail(str(error), "transport")
            return None
        moves.pending.add(handle)
        self._owners[handle] = moves
        return handle

    def settle(self, finished: Iterable[tuple[Handle, State, str]]) -> None:
        """Take note of what has become quiet."""
        for handle, state, reason in finished:
            moves = self._owners.pop(handle, None)
            if moves is not None:
                moves.settle(handle, state, reason)

    def abandon(self, moves: Moves) -> None:
        """Wait no more for what is not quiet; it ends by itself."""
        for handle in moves.pending:
            if isinstance(handle, Handle):
                self._transport.abandon(handle)


def _parts(count: int, most: int) -> Iterator[slice]:
    """Cut a list of pieces into parts that one operation takes; 0 means no limit."""
    step = most or max(count, 1)
    for start in np.arange(0, count, step).tolist():
        yield slice(start, start + step)
