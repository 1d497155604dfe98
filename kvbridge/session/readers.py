"""Ranks of other engines that have asked for something: who they are, and how they are answered.

A rank is answered through a peer of its own, so its engine is met first: at the address that it has
given, within the networks that may be dialled. Who asks must be the agent that the rank which it
names has published.
"""

from typing import Protocol

from kvbridge.errors import ConfigError
from kvbridge.handshake import DigestRequest, EngineAddress, Want
from kvbridge.session.agent import RankAgent
from kvbridge.session.causes import Cause, cause_of
from kvbridge.session.introductions import Introduction, Introductions
from kvbridge.session.session import Session
from kvbridge.session.wants import AGAIN_S

REASON_MAX = 2000
"""So long are answers in words, to be sent in one notification."""

Asker = tuple[str, int]
"""Name of a remote agent, and its number for what it asks."""


Who = Want | DigestRequest
"""What says of itself who asks, and where its engine can be met."""


class _Asked(Protocol):
    """What is being done about a question.

    Attributes:
        asker: Who asked.
        introduction: How far we have come with the reader's engine.
        meet_s: Clock before which that is not asked for again.
        reason: Why nothing will come of it.
    """

    asker: Asker
    introduction: Introduction | None
    meet_s: float
    reason: str

    def fail(self, reason: str, cause: Cause) -> None:
        """Note why nothing will come of it."""


class Readers:
    """Meets the engines of those who ask.

    Attributes:
        strangers: Questions that came from another agent than the rank that they named.
    """

    def __init__(self, agent: RankAgent, meetings: Introductions) -> None:
        """Take what it works with."""
        self._agent, self._meetings = agent, meetings
        self.strangers = 0

    def has_met(self, asked: _Asked, who: Who, now_s: float) -> bool:
        """Whether the reader's engine is known; meets it if not, and fails what cannot be."""
        session = self._agent.sessions.get(who.engine_id)
        if session is not None and _is_meant(session, who):
            peer = session.peers.get(who.rank)
            if peer is None or peer.agent != asked.asker[0]:
                self.strangers += 1
                asked.fail(f"it was asked for by another agent than rank {who.rank}", "refused")
            return not asked.reason
        if asked.introduction is not None and asked.introduction.error is not None:
            error = asked.introduction.error
            asked.fail(str(error), cause_of(error))
        elif asked.introduction is None or asked.introduction.state == "live":
            self.meet(asked, who, now_s)
        return False

    def meet(self, asked: _Asked, who: Who, now_s: float) -> None:
        """Begin to meet the reader's engine, but not all the time."""
        if now_s < asked.meet_s:
            return
        asked.meet_s = now_s + AGAIN_S
        try:
            asked.introduction = self._meetings.meet(
                who.engine_id,
                EngineAddress.of(*who.address, where="address of the reader's engine"),
                incarnation=who.incarnation,
                generation=who.generation,
                direction="write",
            )
        except ConfigError as error:
            asked.fail(str(error), "handshake")


def _is_meant(session: Session, who: Who) -> bool:
    """Whether a reader is of the start and the registration that a session is bound to."""
    start = (session.incarnation, session.generation)
    return start == (who.incarnation, who.generation) and "write" in session.plans
