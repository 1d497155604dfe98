"""One remote engine, alive: plan and peers become handles, handles become completions."""

from kvbridge.session.agent import AgentPoll, RankAgent
from kvbridge.session.introductions import Asks, Introduction, Introductions
from kvbridge.session.leases import Lease
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.session import Session, close_session, open_session
from kvbridge.session.transfer import SourceStats, Transfer

__all__ = [
    "AgentPoll",
    "Asks",
    "Introduction",
    "Introductions",
    "Lease",
    "RankAgent",
    "ReleaseBook",
    "Session",
    "SourceStats",
    "Transfer",
    "close_session",
    "open_session",
]
