"""Finding out, before a peer is used, whether it is there and what carries the bytes."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from kvbridge.errors import PeerLostError
from kvbridge.transport import Descriptors, Region, State
from kvbridge_ucx.connections import Route
from kvbridge_ucx.job import Job
from kvbridge_ucx.peering import AgentCard
from kvbridge_ucx.worker import Worker

NOTHING = Descriptors(np.empty(0, np.uint64), np.empty(0, np.uint64))

# An answer may get lost: a peer sends it over the connection that it has, and may not have
# noticed yet that this one has just ended.
ASK_AGAIN_S = 0.5


def meet(
    worker: Worker, card: AgentCard, rkeys: Sequence[tuple[Region, bytes]], deadline: float
) -> Route:
    """Connect to a peer, ask it for nothing, and wait for the answer.

    That proves who it is, and that it can write here.

    Raises:
        PeerLostError: No answer before the deadline, or by another agent.
    """
    route = worker.call(partial(worker.join, card, rkeys))
    known = route.connection.met
    while True:
        answer: Future[tuple[State, str]] = Future()
        told = partial(_tell, answer)
        question = Job("read", route, NOTHING, NOTHING, b"", told, served=True)
        worker.start(question)
        try:
            state, reason = answer.result(min(max(deadline - time.monotonic(), 0), ASK_AGAIN_S))
        except TimeoutError:
            question.given_up = True
            if time.monotonic() < deadline:
                continue
            worker.call(partial(worker.give_up, route.connection, "it did not answer in time"))
            raise PeerLostError(
                f"agent {card.agent} does not answer in time; is it alive, and does device "
                f"{card.device!r} there lead here?"
            ) from None
        if known and route.lost:  # it had broken, and only now this came to light
            route, known = worker.call(partial(worker.join, card, rkeys)), False
            continue
        if state is not State.DONE:
            raise PeerLostError(f"agent {card.agent} cannot be reached: {reason}")
        worker.call(partial(worker.look_at_lanes, route.connection))
        return route


def _tell(answer: Future[tuple[State, str]], state: State, reason: str) -> None:
    answer.set_result((state, reason))


def try_lane(worker: Worker, route: Route, deadline: float) -> None:
    """Copy one byte natively: that UCX has chosen a lane does not mean that it is allowed.

    Raises:
        PeerLostError: It is not, or takes too long.
    """
    if not route.table.regions:
        return
    scratch = np.zeros(1, np.uint8)
    one = np.ones(1, np.uint64)
    local = Descriptors(np.array([scratch.ctypes.data], np.uint64), one)
    remote = Descriptors(np.array([route.table.regions[0].address], np.uint64), one)
    end: Future[tuple[State, str]] = Future()

    def told(state: State, reason: str, _: object = scratch) -> None:  # it lives until then
        end.set_result((state, reason))

    worker.start(Job("read", route, local, remote, b"", told))
    try:
        state, reason = end.result(max(deadline - time.monotonic(), 0))
    except TimeoutError:
        state, reason = State.PENDING, "it takes too long"
    if state is not State.DONE:
        raise PeerLostError(
            f"UCX chose {route.connection.path!r} for agent {route.agent}, and that fails: "
            f"{reason}. Does its memory still exist, and may this process access that one's? "
            "Option tls='tcp' on both sides goes another way"
        )
