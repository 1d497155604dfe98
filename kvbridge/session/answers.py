"""The producer's side of the payload check: digests of what is kept, for those who have taken it.

A digest takes time, so it is taken beside the engine's steps. While it is, the blocks are in use:
they are not given to anybody else, even if their lease is over meanwhile. Nothing is remembered of
a question that has been answered; one that comes again is answered again.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kvbridge.errors import KVBridgeError
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.session.agent import RankAgent
from kvbridge.session.causes import cause_of
from kvbridge.session.digesting import Values, packed
from kvbridge.session.readers import REASON_MAX, Asked, Asker, Readers

QUESTIONS_MAX = 1024
"""So many are open at once."""
DIGESTS_MAX = 2
"""So many are worked on at once; the second one lets the thread go on between two polls."""
EARLY_S = 2.0
"""A question that cannot be worked on yet is forgotten so long after it was last heard; who still
waits has asked again by then."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Question(Asked):
    """One question that has not been answered.

    Attributes:
        asks: What.
        values: What is being worked on.
    """

    asks: DigestRequest
    values: Future[Values] | None = None

    @property
    def is_running(self) -> bool:
        """Whether blocks are being read for it."""
        return self.values is not None and not self.values.done()


class Answers:
    """What other engines' ranks ask one rank about what it keeps.

    All calls come from the thread that polls the agent.

    Attributes:
        ignored: Questions that came while too many others were open.
    """

    def __init__(
        self,
        agent: RankAgent,
        readers: Readers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what it works with; ``clock`` is that of the agent."""
        self._agent, self._readers, self._clock = agent, readers, clock
        self._open: dict[Asker, _Question] = {}
        self._places = DIGESTS_MAX  # as far as they are known to be free
        self.ignored = 0

    @property
    def strangers(self) -> int:
        """Questions that came from another agent than the rank that they named."""
        return self._readers.strangers

    def __len__(self) -> int:
        """How many have not been answered."""
        return len(self._open)

    def heard(self, sender: str, asks: DigestRequest) -> None:
        """Take a question."""
        known = self._open.get((sender, asks.number))
        if known is not None:
            known.heard_s = self._clock()
        elif len(self._open) >= QUESTIONS_MAX:
            self.ignored += 1  # whoever asks in earnest asks again
        else:
            asker = (sender, asks.number)
            self._open[asker] = _Question(asker, self._clock(), asks=asks)

    def poll(self) -> None:
        """Begin what there is a place for, and answer what is done. Never waits."""
        now_s = self._clock()
        self._places = DIGESTS_MAX - sum(each.is_running for each in self._open.values())
        for question in list(self._open.values()):
            if question.values is None and not question.reason:
                self._begin(question, now_s)
            is_early = question.values is None and not question.reason
            if is_early and now_s >= question.heard_s + EARLY_S:
                del self._open[question.asker]
            elif not (is_early or question.is_running):
                self._answer(question)
                del self._open[question.asker]

    def is_reading(self, request_id: str) -> bool:
        """Whether a request's blocks are being read for somebody."""
        return any(q.is_running and q.asks.request_id == request_id for q in self._open.values())

    def _begin(self, question: _Question, now_s: float) -> None:
        """Start to take digests, if the reader's engine is known and the blocks are held."""
        asks = question.asks
        if not self._readers.has_met(question, asks, now_s):
            return
        if not self._agent.is_held(asks.request_id):
            if self._agent.releases.is_over(asks.request_id):
                question.fail("the request's blocks are kept no longer", "lease")
        elif self._places > 0:
            self._places -= 1
            try:
                question.values = self._agent.digest(asks)
            except KVBridgeError as error:
                question.fail(str(error), "lease")

    def _answer(self, question: _Question) -> None:
        """Say what has been found; who cannot be told asks again."""
        values = b""
        if question.values is not None:
            try:
                values = packed(question.values.result())
            except KVBridgeError as error:
                question.fail(str(error), cause_of(error))
        peer = self._agent.peer_named(question.asker[0])
        if peer is not None:
            reason = question.reason[:REASON_MAX]
            self._agent.tell(peer, Digests(question.asker[1], values, reason, question.cause))
