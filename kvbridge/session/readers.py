"""Ranks of other engines that have asked for something: who they are, and how they are answered.

A rank is answered through a peer of its own, so its engine is met first: at the address that it has
given, within the networks that may be dialled. Who asks must be the agent that the rank which it
names has published.
"""

from dataclasses import dataclass

from kvbridge.errors import ConfigError
from kvbridge.handshake import EngineAddress, ReaderNote
from kvbridge.session.agent import RankAgent
from kvbridge.session.causes import Cause, cause_of
from kvbridge.session.introductions import Introduction, Introductions
from kvbridge.session.session import Session
from kvbridge.session.wants import AGAIN_S

REASON_MAX = 2000
"""So long are answers in words, to be sent in one notification."""

Asker = tuple[str, int]
"""Name of a remote agent, and its number for what it asks."""


@dataclass(slots=True, eq=False)
class Asked:
    """What is being done about a question.

    Attributes:
        asker: Who asked.
        heard_s: Clock when it was heard last.
        introduction: How far we have come with the reader's engine.
        meet_s: Clock before which that is not asked for again.
        reason: Why nothing will come of it.
        cause: The same in a word.
    """

    asker: Asker
    heard_s: float
    introduction: Introduction | None = None
    meet_s: float = 0.0
    reason: str = ""
    cause: Cause = ""

    def fail(self, reason: str, cause: Cause) -> None:
        """Note why nothing will come of it; the first reason is kept."""
        if not self.reason:
            self.reason, self.cause = reason, cause


class Readers:
    """Meets the engines of those who ask.

    Attributes:
        strangers: Questions that came from another agent than the rank that they named.
    """

    def __init__(self, agent: RankAgent, meetings: Introductions) -> None:
        """Take what it works with."""
        self._agent, self._meetings = agent, meetings
        self.strangers = 0

    def has_met(self, asked: Asked, who: ReaderNote, now_s: float) -> bool:
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

    def meet(self, asked: Asked, who: ReaderNote, now_s: float) -> None:
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
                rank=who.rank,
                direction="write",
            )
        except ConfigError as error:
            asked.fail(str(error), "handshake")


def _is_meant(session: Session, who: ReaderNote) -> bool:
    """Whether a reader is of the start and the registration that a session is bound to."""
    start = (session.incarnation, session.generations.get(who.rank))
    return start == (who.incarnation, who.generation) and "write" in session.plans
