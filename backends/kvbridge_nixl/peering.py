"""Finding out whether a peer answers, and what carries the bytes to it."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbridge.errors import PeerLostError
from kvbridge.transport import Descriptors, Path, Peer, State, tcp_nbytes_sent
from kvbridge_nixl.card import LANDING_BYTES, AgentCard, landing_at
from kvbridge_nixl.config import is_rdma
from kvbridge_nixl.connections import Connection
from kvbridge_nixl.job import Job
from kvbridge_nixl.worker import Worker

logger = logging.getLogger(__name__)

NOTHING = Descriptors(np.empty(0, np.uint64), np.empty(0, np.uint64))
# Writes that decide on the lane; what others send meanwhile may spoil some of them.
LANE_TRIES = 3


@dataclass(frozen=True, slots=True, eq=False)
class NixlPeer(Peer):
    """A peer, the remote agent of NIXL behind it, and who moves the bytes of a read."""

    connection: Connection
    reads_are_served: bool


def meet(
    worker: Worker, connection: Connection, ours: AgentCard, theirs: AgentCard, deadline: float
) -> Path:
    """See that a peer answers, under its name and to this agent, and name the lane to it.

    Not a byte of the peer is touched before it has answered: at the address of an agent that has
    ended another process may listen, and an address of the old one would crash that.

    Raises:
        PeerLostError: No answer before the deadline, or by another agent.
    """
    before = _sent_by_tcp()
    greeting = Job("read", connection, NOTHING, NOTHING, served=True)
    _run(worker, greeting, theirs, deadline)
    greeted = _most_since(before)
    tries = []
    for _ in range(LANE_TRIES):
        before = _sent_by_tcp()
        probe = Job("write", connection, landing_at(ours.landing), landing_at(theirs.landing))
        _run(worker, probe, theirs, deadline)
        tries.append(_most_since(before))
    if min(tries) >= LANDING_BYTES:
        return "tcp"
    if is_rdma(ours.device):  # UCX then has no TCP at all
        return "cma" if ours.kernel == theirs.kernel else "rdma"
    # Messages always take TCP here; a kernel that has not counted the greeting counts nothing.
    return "cma" if greeted > 0 and ours.kernel == theirs.kernel else "unknown"


def _sent_by_tcp() -> dict[int, int]:
    try:
        return tcp_nbytes_sent()
    except OSError as error:
        logger.debug("cannot tell what carries the bytes: %s", error)
        return {}  # which makes the lane unknown


def _most_since(before: Mapping[int, int]) -> int:
    """Return the most bytes that one TCP socket has sent; peers that are added meanwhile send too.

    A sum would be wrong in both directions: it falls when a socket is closed.
    """
    return max((sent - before.get(inode, 0) for inode, sent in _sent_by_tcp().items()), default=0)


def _run(worker: Worker, job: Job, card: AgentCard, deadline: float) -> None:
    worker.enqueue(job)
    if not job.ended.wait(max(deadline - time.monotonic(), 0)):
        raise PeerLostError(
            f"agent {card.agent} does not answer in time; is it alive, and does device "
            f"{card.device!r} there lead here?"
        )
    if job.state is not State.DONE:
        raise PeerLostError(f"agent {card.agent} cannot be reached: {job.reason}")
