"""What the worker works on."""

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvbridge.transport import Descriptors, Handle, Op, State
from kvbridge_mooncake.channel import Channel


@dataclass(slots=True, eq=False)
class Connection:
    """A remote agent, as one peer uses it.

    Attributes:
        agent: Its name.
        engine: What Mooncake calls it.
        channel: Our own connection.
        dropped: Whether nobody uses it any more.
        queue: Operations that have pieces to post, in order.
        flying: Ids of what was posted and has not been seen to end, with their operations.
        doubtful: Operations that have failed and may still move bytes.
        has_sockets: Whether Mooncake has opened any to this peer, and may still have them.
    """

    agent: str
    engine: str
    channel: Channel
    dropped: bool = False
    queue: deque["Job"] = field(default_factory=deque)
    flying: deque[tuple[int, "Job"]] = field(default_factory=deque)
    doubtful: list["Job"] = field(default_factory=list)
    has_sockets: bool = False

    @property
    def busy(self) -> bool:
        """Whether any operation has not ended."""
        return bool(self.queue or self.flying or self.doubtful)

    @property
    def gone(self) -> str:
        """Why nothing more is to be posted; empty while there is no reason."""
        return "the peer was dropped" if self.dropped else self.channel.lost


@dataclass(slots=True, eq=False)
class Job:
    """One operation on its way.

    Attributes:
        op: What to do.
        connection: With whom.
        local: Addresses of the local pieces. Shape: [N] uint64.
        remote: Addresses of the remote pieces. Shape: [N] uint64.
        nbytes: Their lengths, none of them 0. Shape: [N] uint64.
        notification: What to send once all is done.
        handle: What the caller holds; None for an operation of the driver's own.
        posted: How many pieces were posted.
        flying: How many of these have not been seen to end.
        failure: Why it fails, once it does.
        in_doubt: Whether Mooncake reported a failure: then the peer may still move bytes.
        question: What the peer was asked to find out; 0 if it was not asked.
        kept: What must live until it has ended.
        ended: Set when it has ended.
        state: How it ended.
    """

    op: Op
    connection: Connection
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    notification: bytes = b""
    handle: Handle | None = None
    posted: int = 0
    flying: int = 0
    failure: str = ""
    in_doubt: bool = False
    question: int = 0
    kept: object = None
    ended: threading.Event = field(default_factory=threading.Event)
    state: State = State.PENDING

    @property
    def all_posted(self) -> bool:
        """Whether nothing is left to post."""
        return bool(self.failure) or self.posted == len(self.nbytes)


def make_job(
    op: Op,
    connection: Connection,
    local: Descriptors,
    remote: Descriptors,
    notification: bytes = b"",
    handle: Handle | None = None,
) -> Job:
    """Make an operation of descriptors, without the pieces that move nothing."""
    if local.nbytes.all():
        pieces = (local.address, remote.address, local.nbytes)
    else:
        some = local.nbytes > 0
        pieces = (local.address[some], remote.address[some], local.nbytes[some])
    return Job(op, connection, *pieces, notification, handle)
