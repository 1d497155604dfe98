"""One remote engine, alive: plan and peers become handles, handles become completions."""

from kvbridge.session.agent import AgentPoll, RankAgent
from kvbridge.session.answers import Answers
from kvbridge.session.causes import CAUSES, Cause, cause_of
from kvbridge.session.computed import Event
from kvbridge.session.digesting import can_digest
from kvbridge.session.gifts import Gift, Gifts, Outcome
from kvbridge.session.introductions import Asks, Introduction, Introductions
from kvbridge.session.leases import Lease
from kvbridge.session.questions import CheckMode
from kvbridge.session.readers import Asked, Readers
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.session import Session, close_session, open_session
from kvbridge.session.tokens import digest_of_tokens, ids_of_tokens
from kvbridge.session.transfer import SourceStats, Transfer

__all__ = [
    "CAUSES",
    "AgentPoll",
    "Answers",
    "Asked",
    "Asks",
    "Cause",
    "CheckMode",
    "Event",
    "Gift",
    "Gifts",
    "Introduction",
    "Introductions",
    "Lease",
    "Outcome",
    "RankAgent",
    "Readers",
    "ReleaseBook",
    "Session",
    "SourceStats",
    "Transfer",
    "can_digest",
    "cause_of",
    "close_session",
    "digest_of_tokens",
    "ids_of_tokens",
    "open_session",
]
