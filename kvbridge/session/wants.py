"""The reader's side of push: what has been asked for, until whoever writes it is known to be done.

A producer rank that is asked to write answers once it touches the reader's blocks no more: it has
written, or it will not. Until then nobody else may have them, so what nobody waits for any more is
*withdrawn*, and only the answer to that gives the blocks back. Questions are repeated until they
are answered, so that no lost message costs more than a moment; an answer that comes twice changes
nothing. A producer that is gone does not write. That it is gone is certain once its engine has been
met in another start; where it only cannot be reached, it is looked for until it must have stopped.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvbridge.errors import NotSupportedError, PeerLostError, TransportError
from kvbridge.handshake.messages import Given, Want, Withdrawal
from kvbridge.handshake.wire import encode
from kvbridge.model import Rank
from kvbridge.session.causes import Cause, cause_told
from kvbridge.session.transfer import SourceStats, Transfer
from kvbridge.transport import Peer, State

AGAIN_S, AGAIN_LONGEST_S = 0.5, 2.0
FRESH_S = 5.0
"""A producer begins to write only what it was asked for no longer ago."""
LOST_S = 2 * FRESH_S
"""One that cannot be reached for so long does not write: it begins nothing after half of that."""
SETTLE_S = 1.0
"""So long after the end of a producer bytes of it may still arrive; drivers say 0.1 to 0.5."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """What one producer rank has been asked for.

    Attributes:
        transfer: Whose it is.
        rank: The producer rank.
        peer: The same as a peer.
        want: What was asked.
        source: What must come; None if we cannot know.
        again_s: Clock when it is asked again.
        pause_s: How long after the last time; a list of blocks may be long.
        withdrawn: Whether nobody waits for it any more.
        quiet_s: Clock when that rank, which cannot be reached, does not write any more; None while
            it can.
        insists: Whether that has been said before.
        orphaned: Whether the engine was dropped, and the peer is to be dropped at the end.
    """

    transfer: Transfer
    rank: Rank
    peer: Peer
    want: Want
    source: SourceStats | None
    again_s: float
    pause_s: float = AGAIN_S
    withdrawn: bool = False
    insists: bool = False
    quiet_s: float | None = None
    orphaned: bool = False


class Wants:
    """What one rank has asked others to write.

    Attributes:
        ignored: Answers to what was not asked, or was answered before.
    """

    def __init__(
        self,
        send: Callable[[Peer, bytes], None],
        drop: Callable[[Peer], None],
        find: Callable[[str], Peer | None],
        clock: Callable[[], float],
    ) -> None:
        """Ask nothing yet.

        Args:
            send: Sends a notification; raises TransportError.
            drop: Lets a peer go.
            find: Returns a connected rank by the name of its agent.
            clock: Seconds that never run backwards.
        """
        self._send, self._drop, self._find, self._clock = send, drop, find, clock
        self._numbers = itertools.count(1)
        self._open: dict[int, _Wanted] = {}
        self.ignored = 0

    def __len__(self) -> int:
        """How many are not quiet."""
        return len(self._open)

    @property
    def quarantined(self) -> int:
        """What nobody waits for any more, and is not quiet; from any thread."""
        return sum(each.transfer.state is not State.PENDING for each in list(self._open.values()))

    def number(self) -> int:
        """Return a number for the next want."""
        return next(self._numbers)

    def ask(
        self, transfer: Transfer, rank: Rank, want: Want, source: SourceStats | None = None
    ) -> Hashable:
        """Ask a producer rank; what cannot be sent fails the transfer.

        Args:
            transfer: Whose it is.
            rank: The producer rank.
            want: What it shall write.
            source: What must come; None if we cannot know.

        Returns:
            What stands for it in the transfer's ``pending`` until it is answered.
        """
        peer = transfer.session.peers[rank]
        wanted = _Wanted(transfer, rank, peer, want, source, self._clock() + AGAIN_S)
        self._open[want.number] = wanted
        transfer.pending.add(wanted)
        try:
            self._send(peer, encode(want))
        except NotSupportedError as error:
            self._settle(wanted, f"it cannot be asked for: {error}", "refused")
        except TransportError as error:  # who knows whether it was sent
            transfer.fail(str(error), "transport")
            self._is_lost(wanted, error)
        return wanted

    def withdraw(self, transfer: Transfer) -> None:
        """Ask no more for what a transfer still waits for; each part is quiet once answered."""
        for wanted in [each for each in self._open.values() if each.transfer is transfer]:
            if wanted.want.is_empty:  # nothing would be written
                self._settle(wanted, "nobody waits for it any more", "deadline")
            elif not wanted.withdrawn:
                wanted.withdrawn = True
                if wanted.quiet_s is None:
                    wanted.again_s = self._clock()

    def awaited(self, transfer: Transfer) -> str:
        """Say what a transfer that is late still waits for; nothing, if that is not a rank."""
        late = [each for each in self._open.values() if each.transfer is transfer]
        if not late:
            return ""
        ranks = sorted({each.rank for each in late})
        who = f"ranks {ranks} of engine {transfer.session.engine_id!r}"
        if transfer.kind == "greeting":
            return f"{who} had not said whether they can reach this rank"
        words = f"{who} had not said that they have written request {transfer.request_id!r}"
        is_early = any(each.source is None for each in late)
        return f"{words} (its prefill may not have ended)" if is_early else words

    def heard(self, sender: str, given: Given) -> None:
        """Take an answer."""
        wanted = self._open.get(given.number)
        if wanted is None or wanted.peer.agent != sender:
            self.ignored += 1
            return
        if given.reason:
            cause = cause_told(given.cause, otherwise="transport")
            if wanted.want.packed is not None and cause == "refused":
                wanted.transfer.session.packs_nbytes = 0  # so that the next ones come cell by cell
            self._settle(wanted, f"rank {wanted.rank} will not write: {given.reason}", cause)
        elif wanted.source is not None and wanted.source.nbytes != given.nbytes:
            expected = wanted.source.nbytes
            self._settle(
                wanted,
                f"rank {wanted.rank} has written {given.nbytes} bytes where {expected} were "
                "wanted; the engines disagree about what the request's blocks hold",
                "incompatible",
            )
        else:
            if not wanted.want.is_empty:
                came = wanted.source or SourceStats(wanted.rank, given.nbytes, 0, 0)
                wanted.transfer.gets(came)
            self._settle(wanted, "", "")

    def poll(self) -> None:
        """Ask again for what is due, and end what those who are gone will not write."""
        now_s = self._clock()
        for wanted in [each for each in self._open.values() if each.again_s <= now_s]:
            if wanted.quiet_s is not None and not self._has_come_back(wanted):
                wanted.again_s = min(now_s + AGAIN_S, wanted.quiet_s)
                if now_s >= wanted.quiet_s:
                    reason = f"rank {wanted.rank} of the engine was lost before it had answered"
                    self._settle(wanted, reason, "transport")
                continue
            notes = self._questions(wanted)
            wanted.pause_s = min(2 * wanted.pause_s, AGAIN_LONGEST_S)
            wanted.again_s = now_s + (AGAIN_S if wanted.withdrawn else wanted.pause_s)
            try:
                for note in notes:
                    self._send(wanted.peer, encode(note))
            except TransportError as error:
                self._is_lost(wanted, error)

    def _questions(self, wanted: _Wanted) -> tuple[Want | Withdrawal, ...]:
        """Return what to ask now."""
        want = wanted.want
        if not wanted.withdrawn:
            return (want,)
        withdrawal = Withdrawal(want.number, want.request_id)
        if not wanted.insists:
            wanted.insists = True
            return (withdrawal,)
        # Who does not know us, or not any more, learns from the want where the answer goes.
        return (withdrawal, want)

    def orphan(self, peers: Sequence[Peer]) -> list[Peer]:
        """Take over peers that are to be dropped, as far as they have not answered yet."""
        kept = []
        for wanted in list(self._open.values()):  # this may come from a thread that joins
            if wanted.peer in peers:
                wanted.orphaned = True
                kept.append(wanted.peer)
        return kept

    def replaced(self, engine_id: str, incarnation: str) -> None:
        """Take note that an engine is there in another start: the ones before do not write."""
        now_s = self._clock()
        for wanted in list(self._open.values()):  # this may come from a thread that joins
            session = wanted.transfer.session
            if session.engine_id == engine_id and session.incarnation != incarnation:
                at_most_s = now_s + SETTLE_S
                quiet_s = at_most_s if wanted.quiet_s is None else min(wanted.quiet_s, at_most_s)
                wanted.quiet_s = wanted.again_s = quiet_s

    def _is_lost(self, wanted: _Wanted, error: TransportError) -> None:
        """Take note that a peer cannot be reached; after any other error it is asked again.

        That is no proof that it is gone: a connection may break while the other direction holds.
        """
        if isinstance(error, PeerLostError):
            now_s = self._clock()
            wanted.transfer.session.lost = True
            wanted.quiet_s, wanted.again_s = now_s + LOST_S, now_s + AGAIN_S

    def _has_come_back(self, wanted: _Wanted) -> bool:
        """Whether the same agent has been met anew; then it is asked through that."""
        newer = self._find(wanted.peer.agent)
        if newer is None or newer is wanted.peer:
            return False
        self._let_go(wanted)
        wanted.peer, wanted.orphaned, wanted.quiet_s = newer, False, None
        return True

    def _settle(self, wanted: _Wanted, reason: str, cause: Cause) -> None:
        self._forget(wanted)
        state = State.FAILED if reason else State.DONE
        wanted.transfer.settle(wanted, state, reason, cause)

    def _forget(self, wanted: _Wanted) -> None:
        del self._open[wanted.want.number]
        self._let_go(wanted)

    def _let_go(self, wanted: _Wanted) -> None:
        """Drop the peer of a want, if nobody else needs it."""
        others = (each.peer for each in self._open.values() if each is not wanted)
        if wanted.orphaned and wanted.peer not in others:
            self._drop(wanted.peer)
