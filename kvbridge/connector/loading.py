"""One load of one rank: how far it is, and how what it names is asked for."""

from dataclasses import dataclass
from typing import Any

from kvbridge.connector.step import Load
from kvbridge.connector.values import block_tables
from kvbridge.connector.ways import Way
from kvbridge.session import CheckMode, Introduction, RankAgent, Session, Transfer


@dataclass(slots=True, eq=False)
class Waiting:
    """A load that waits for its engine to be met, and then for a place.

    Attributes:
        load: The load.
        introduction: How far we have come with its engine.
        begun_s: Clock when we were told.
        deadline_s: Clock when it fails.
        met_s: Clock when its engine was known; None before.
        is_queued: Whether it has found no place.
        way: Whether we read, or the engine writes; None while that is open.
    """

    load: Load
    introduction: Introduction
    begun_s: float
    deadline_s: float
    met_s: float | None = None
    is_queued: bool = False
    way: Way | None = None

    @property
    def direction(self) -> str:
        """The same as metrics call it."""
        return "write" if self.way == "push" else "read"

    def staleness(self, session: Session) -> str:
        """Return why its blocks are not those that its engine has now; or nothing."""
        remote = self.load.remote
        if remote.incarnation not in {None, session.incarnation}:
            return (
                f"engine {remote.engine_id!r} has restarted: its incarnation is "
                f"{session.incarnation!r}, the request's blocks are of {remote.incarnation!r}"
            )
        if remote.generation and session.generation != remote.generation:
            return (
                f"engine {remote.engine_id!r} has registered other memory since: registration "
                f"{session.generation}, the request's blocks are of {remote.generation}"
            )
        return ""

    def ask(
        self, agent: RankAgent, *, reads_instead: bool, check: CheckMode | None, now_s: float
    ) -> Transfer:
        """Read it, or have it written, in the way that was chosen.

        Args:
            agent: The rank that loads.
            reads_instead: Whether what turns out not to be written will be read.
            check: How what has come is compared with what is there; None if it is not.
            now_s: Clock of the agent.

        Raises:
            KVBridgeError: It cannot be; nothing has begun.
        """
        load, remote = self.load, self.load.remote
        ours, theirs = block_tables(load.block_ids), block_tables(remote.block_ids)
        common: dict[str, Any] = {
            "start_token": load.start_token,
            "end_token": load.end_token,
            "timeout_s": max(self.deadline_s - now_s, 1e-3),
            "lease": remote.lease,
            "check": check,
            "address": load.address,
        }
        if self.way == "push" and load.address is not None:
            return agent.want(
                remote.engine_id,
                remote.request_id,
                ours,
                None if remote.is_expected else theirs,
                reads_instead=reads_instead,
                tokens_digest=load.tokens_digest,
                **common,
            )
        return agent.pull(remote.engine_id, remote.request_id, ours, theirs, **common)


@dataclass(slots=True, eq=False)
class Reading:
    """A load that has begun to read.

    Attributes:
        waited: What it was before.
        transfer: What moves.
        has_ended: Whether its outcome has been noted; it may not be quiet then.
    """

    waited: Waiting
    transfer: Transfer
    has_ended: bool = False
