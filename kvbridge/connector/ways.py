"""Whether what an engine loads is read by it, or written by the engine that has it."""

from typing import Literal

from kvbridge.errors import NotSupportedError
from kvbridge.handshake import EngineAddress
from kvbridge.session import RankAgent, Session
from kvbridge.transport import State

Way = Literal["pull", "push"]

GREET_AGAIN_S = 30.0
"""An engine that did not say that it can write here is asked again after so long."""


def choose_way(
    agent: RankAgent,
    session: Session,
    direction: Literal["auto", "pull", "push"],
    address: EngineAddress | None,
    *,
    is_expected: bool,
    timeout_s: float,
    now_s: float,
) -> Way | None:
    """Return whether to read, or to have it written; None while the other engine is being asked.

    Writing is chosen where it is asked for, where the transport cannot read, or says that writing
    is faster or safer, as over TCP. What the transport prefers is outweighed where whole pages are
    read, because the plan counts fewer copies and bytes that way, the rearrangement included: that
    engine would have to write every cell by itself, or to pack them. That a transport prefers to
    write is no reason against it: reads that are not safe by themselves are served by writes.

    Args:
        agent: The rank that loads.
        session: With the engine that has it.
        direction: What the configuration says.
        address: Where that engine can meet this one; None if that is unknown.
        is_expected: Whether the blocks are still being computed, so that nobody can read them.
        timeout_s: How long engines may take to meet. That engine has to meet this one, and then
            to say so, for which it has twice as long; a quarter of it if it can be read instead.
        now_s: Clock of the agent.

    Raises:
        NotSupportedError: It must be written, and cannot be.
    """
    can = [peer.capabilities for peer in session.peers.values()]
    must_push = direction == "push" or is_expected or not can_read(session)
    prefers_push = any(each.preferred_direction == "write" for each in can)
    prefers_push = prefers_push and not agent.stages(session.engine_id)
    if not is_expected and (direction == "pull" or not (must_push or prefers_push)):
        return "pull"
    why = (
        "its direction here is 'pull'" if direction == "pull" else _why_not(agent, session, address)
    )
    if not why and address is not None:
        greeting = session.greeting
        if greeting is None or (
            greeting.state is State.FAILED and now_s >= greeting.ended_s + GREET_AGAIN_S
        ):
            wait_s = 2 * timeout_s if must_push else timeout_s / 4
            greeting = agent.greet(session.engine_id, address, timeout_s=wait_s)
        if greeting.state is State.PENDING:
            return None
        why = greeting.reason
    if why and must_push:
        session.greeting = None  # it may have become possible until the next one
        raise NotSupportedError(
            f"engine {session.engine_id!r} cannot write here, and "
            + ("what is still being computed" if is_expected else f"direction {direction!r}")
            + f" with transport {agent.transport_name!r} leaves nothing else: {why}"
        )
    return "pull" if why else "push"


def can_read(session: Session) -> bool:
    """Whether all ranks of an engine can be read from."""
    return all(peer.capabilities.read for peer in session.peers.values())


def _why_not(agent: RankAgent, session: Session, address: EngineAddress | None) -> str:
    """Return why an engine cannot write here, as far as that is known; empty if it is not."""
    if address is None:
        return "this engine has no address at which it could be met"
    if not session.gives:
        return (
            "that engine writes for nobody: it is too old, or its direction is 'pull', or its role "
            "'consumer'"
        )
    for rank, peer in session.peers.items():
        if not (peer.capabilities.write and peer.capabilities.notify):
            return f"transport {agent.transport_name!r} offers no writes or notes with rank {rank}"
    return ""
