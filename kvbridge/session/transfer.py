"""One request on its way: all that it waits for, until every part of that is quiet."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvbridge.model import Rank
from kvbridge.plan import TransferBatch
from kvbridge.session.causes import Cause
from kvbridge.session.leases import Lease
from kvbridge.transport import State

if TYPE_CHECKING:
    from kvbridge.session.payload import Checked
    from kvbridge.session.questions import PayloadCheck
    from kvbridge.session.session import Session

Kind = Literal["pull", "push", "greeting"]


@dataclass(slots=True)
class SourceStats:
    """What one remote rank contributes to a request.

    Attributes:
        rank: The remote rank.
        nbytes: Bytes moved.
        copies: Pieces before neighbours were merged.
        merged: Pieces that were submitted.

    Of a load that is staged, these are whole pages, with what of them is not needed.
    """

    rank: Rank
    nbytes: int
    copies: int
    merged: int

    @classmethod
    def of(cls, batch: TransferBatch) -> "SourceStats":
        """Return what the rank of a batch contributes by it."""
        return cls(batch.remote_rank, batch.total_nbytes, batch.piece_count, batch.nbytes.size)


@dataclass(slots=True, eq=False)
class Transfer:
    """The bytes of one request.

    It ends once, as DONE or FAILED. A transfer that failed at its deadline may not be quiet yet:
    its blocks must not be used for anything else until :attr:`quiet`.

    Attributes:
        session: The engine that it comes from.
        kind: Whether we read it, or that engine writes it; or nothing moves, and that engine is
            only asked whether it can reach us.
        request_id: The request, by the producer's name for it.
        started_s: Clock when it was submitted.
        deadline_s: Clock when it fails if it has not ended.
        sources: What each remote rank contributes.
        state: How it stands.
        reason: Why it failed.
        cause: The same in a word.
        ended_s: Clock when it ended.
        pending: Handles, and what has been asked for, that are not quiet.
        lease: The promise that the blocks were kept, to be looked at once all bytes are here.
        seen: Where the word of each source's lease lands; None until it is looked at.
        reads_instead: Whether it will be read where it cannot be written.
        check: What is to be compared once all bytes are here; None once that has begun.
        checked: What has come of that; None while it is open, or if nothing was to be compared.
        read_s: Clock when the last bytes that are staged had come.
        arranging_s: How long it then took until all of them were in their places; None where
            nothing is staged.
        is_arranging: Whether it waits for that alone; read from any thread.
    """

    session: "Session"
    request_id: str
    started_s: float
    deadline_s: float
    kind: Kind = "pull"
    sources: list[SourceStats] = field(default_factory=list)
    state: State = State.PENDING
    reason: str = ""
    cause: Cause = ""
    ended_s: float = 0.0
    pending: set[Hashable] = field(default_factory=set)
    lease: Lease | None = None
    seen: list[int] | None = None
    reads_instead: bool = False
    check: "PayloadCheck | None" = None
    checked: "Checked | None" = None
    read_s: float = 0.0
    arranging_s: float | None = None
    is_arranging: bool = False

    @property
    def quiet(self) -> bool:
        """Whether nothing can touch the request's blocks any more."""
        return not self.pending

    @property
    def must_be_read(self) -> bool:
        """Whether it was not written but can still be read, and is going to be."""
        return self.reads_instead and self.quiet and self.cause in {"handshake", "refused"}

    @property
    def seconds(self) -> float:
        """Time from submission to the end."""
        return self.ended_s - self.started_s

    def reads(self, batch: TransferBatch) -> None:
        """Note what is read from a remote rank, beside what that contributes so far."""
        self.gets(SourceStats.of(batch))

    def gets(self, more: SourceStats) -> None:
        """Note what a remote rank contributes, beside what it has so far."""
        for source in self.sources:
            if source.rank == more.rank:
                source.nbytes += more.nbytes
                source.copies += more.copies
                source.merged += more.merged
                return
        self.sources.append(more)

    def fail(self, reason: str, cause: Cause) -> None:
        """Note a failure; the first one is kept, later ones follow from it."""
        if not self.reason:
            self.reason, self.cause = reason, cause

    def settle(self, part: Hashable, state: State, reason: str, cause: Cause = "transport") -> None:
        """Note that a handle, or what has been asked for, has become quiet."""
        self.pending.discard(part)
        if state is not State.DONE:
            self.fail(reason or "no reason was given", cause)

    def end(self, now_s: float) -> None:
        """Fix the outcome."""
        self.state = State.FAILED if self.reason else State.DONE
        self.sources.sort(key=lambda source: source.rank)
        self.ended_s = now_s
