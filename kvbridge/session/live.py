"""The transfers that have not ended, and those of which no producer has been told."""

from collections.abc import Iterator

from kvbridge.session.causes import Cause
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.notes import Notes
from kvbridge.session.operations import Operations
from kvbridge.session.payload import Checks
from kvbridge.session.portions import Portions
from kvbridge.session.proofs import Proofs
from kvbridge.session.session import Session
from kvbridge.session.transfer import Transfer
from kvbridge.session.wants import Wants
from kvbridge.transport import Handle, State


class LiveTransfers:
    """What one rank reads, or has asked others to write."""

    def __init__(
        self,
        local: LocalRank,
        operations: Operations,
        wants: Wants,
        proofs: Proofs,
        checks: Checks,
        notes: Notes,
        *,
        portions: Portions,
    ) -> None:
        """Take what transfers wait for, and what tells producers that they have ended."""
        self._local, self._operations, self._wants = local, operations, wants
        self._portions = portions
        self._proofs, self._checks, self._notes = proofs, checks, notes
        self._live: list[Transfer] = []
        self._untold: list[Transfer] = []  # ended, but others still write to them

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._live)

    def add(self, transfer: Transfer) -> None:
        """Take one that has been started."""
        self._live.append(transfer)

    def cancel(self, transfer: Transfer, reason: str, now_s: float) -> None:
        """Let one end with the next poll, however much of it is still on its way."""
        transfer.fail(reason, "aborted")
        transfer.deadline_s = min(transfer.deadline_s, now_s)

    def are_with(self, session: Session) -> bool:
        """Whether one is with a remote engine, and has not ended or is not quiet."""
        if self._portions.are_with(session):
            return True
        return any(each.session is session for each in (*self._live, *self._untold))

    @property
    def quarantined(self) -> int:
        """What nobody waits for any more but is not quiet; asked from any thread."""
        moves = self._operations.owners()
        transfers = [each for each in moves if isinstance(each, Transfer)]
        handles = sum(1 for each in transfers if each.state is not State.PENDING)
        return handles + self._wants.quarantined + self._portions.quarantined

    def ended(self, now_s: float) -> Iterator[Transfer]:
        """End the transfers that are quiet or late, and tell the producer of each."""
        for transfer in list(self._live):
            if transfer.kind == "push" and transfer.reason and not transfer.quiet:
                self._wants.withdraw(transfer)  # the rest is of no use
            if not transfer.quiet and now_s < transfer.deadline_s:
                continue
            if transfer.quiet and not transfer.reason and self._is_open(transfer, now_s):
                continue
            if not transfer.quiet:
                self._give_up(transfer, now_s)
            transfer.end(now_s)
            self._live.remove(transfer)
            if transfer.kind != "greeting":
                if not transfer.must_be_read:
                    self._untold.append(transfer)
                yield transfer
        self._tell_of_ends()

    def _is_open(self, transfer: Transfer, now_s: float) -> bool:
        """Whether what has come must still be compared, or the word of the lease be looked at."""
        begun = self._checks.begin(transfer, self._local.cache)
        return begun or self._proofs.are_awaited(transfer, now_s)

    def _give_up(self, transfer: Transfer, now_s: float) -> None:
        """Fail what is late. It ends by itself, and is quiet only then."""
        cause: Cause = "deadline"
        what = self._portions.give_up(transfer)
        if transfer.kind == "pull":
            reads = sum(isinstance(each, Handle) for each in transfer.pending)
            if reads or not what:
                what = f"{reads} reads had not ended" + (what and f", {what}")
        else:
            what = " and ".join(filter(None, [self._wants.awaited(transfer), what]))
        if transfer.seen is not None:  # all bytes are here, but they prove nothing
            what = f"the lease of request {transfer.request_id!r} had not begun"
            cause = "lease"
        what = self._checks.give_up(transfer) or what
        transfer.fail(f"{what} after {now_s - transfer.started_s:.3g} s", cause)
        if transfer.kind == "pull":
            self._operations.abandon(transfer)
        else:
            self._wants.withdraw(transfer)

    def _tell_of_ends(self) -> None:
        """Tell producers of what has ended; those who may still write, only once they do not."""
        for transfer in [each for each in self._untold if each.kind == "pull" or each.quiet]:
            self._untold.remove(transfer)
            ok = transfer.state is State.DONE
            self._notes.release(transfer.session, transfer.request_id, ok=ok)
