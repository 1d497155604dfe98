"""The producer's side of push: what other ranks want written, as soon as it is ready.

Each want is carried out once at most, and each is answered: once its bytes are there, or once it is
certain that none will come. A want may come before the blocks are held; then it waits. What has
been answered is remembered for as long as the blocks are held, so that a want which comes again is
not carried out again: by then the reader's blocks may be somebody else's.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbridge.errors import KVBridgeError
from kvbridge.handshake.messages import Given, Want, Withdrawal
from kvbridge.session.agent import RankAgent
from kvbridge.session.causes import Cause, cause_of
from kvbridge.session.introductions import Introductions
from kvbridge.session.readers import REASON_MAX, Asked, Asker, Readers
from kvbridge.session.wants import FRESH_S
from kvbridge.transport import Handle, State

WANTS_MAX = 4096
"""So many are open at once, and so many known of requests that are not held."""
NOT_KEPT = "the request's blocks are kept no longer, or never were"
KEPT_S = 600.0
"""So long are answers known of requests that are not held."""


@dataclass(slots=True, eq=False, kw_only=True)
class Gift(Asked):
    """One want, on its way.

    Attributes:
        request_id: The request, by our name for it.
        want: What it asked for; None if only a withdrawal has come.
        since_s: Clock when it was heard.
        nbytes: Bytes that have been submitted.
        pending: Handles that are not quiet.
        has_begun: Whether some of it has been submitted.
        is_whole: Whether all of it has been.
        end_token: One past the last token that has been.
        attempt: In which the blocks were filled that this was written from.
        answer: What is said of it; None while that is open.
        is_told: Whether that has been sent, or could not be when it was asked for last.
    """

    request_id: str
    want: Want | None
    since_s: float
    nbytes: int = 0
    pending: set[Hashable] = field(default_factory=set)
    has_begun: bool = False
    is_whole: bool = False
    end_token: int = 0
    attempt: int = -1
    answer: Given | None = None
    is_told: bool = False

    @property
    def reads_blocks(self) -> bool:
        """Whether the request's blocks are being read; what has been packed is read elsewhere."""
        is_packed = self.is_whole and self.want is not None and self.want.packed is not None
        return bool(self.pending) and not is_packed

    def settle(self, handle: Handle, state: State, reason: str) -> None:
        """Note that a handle has become quiet."""
        self.pending.discard(handle)
        if state is not State.DONE:
            self.fail(reason or "no reason was given", "transport")

    def goes_on(self, attempt: int) -> bool:
        """Whether more can be submitted; begins again if the blocks were taken away meanwhile."""
        if attempt != self.attempt:
            if self.pending:
                return False  # what was read from them may be anybody's, and must not land later
            self.attempt, self.end_token, self.nbytes = attempt, 0, 0
        return True


class Outcome(NamedTuple):
    """How a gift has ended.

    Attributes:
        cause: Why nothing was written; empty if it was.
        nbytes: Bytes that were.
        seconds: Time since it was asked for.
    """

    cause: Cause
    nbytes: int
    seconds: float


class Gifts:
    """What other engines' ranks want from one rank.

    All calls come from the thread that polls the agent.

    Attributes:
        ignored: Wants that came while too many others were open.
    """

    def __init__(
        self,
        agent: RankAgent,
        meetings: Introductions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what it works with; the caller closes that.

        Args:
            agent: The rank.
            meetings: Meets engines.
            clock: That of the agent.
        """
        self._agent, self._clock = agent, clock
        self._readers = Readers(agent, meetings)
        self._gifts: dict[str, dict[Asker, Gift]] = {}  # by request
        self._live: list[Gift] = []  # those to which an answer is to be sent
        self._idle: dict[Gift, float] = {}  # those of requests that are not held; when answered
        self._outcomes: list[Outcome] = []
        self.ignored = 0

    @property
    def strangers(self) -> int:
        """Wants that came from another agent than the rank that they named."""
        return self._readers.strangers

    def __len__(self) -> int:
        """How many have not been answered."""
        return len(self._live)

    def heard(self, sender: str, note: Want | Withdrawal) -> None:
        """Take what another rank asks for."""
        if len(self._live) >= WANTS_MAX:
            self.ignored += 1  # whoever asks in earnest asks again
            return
        asker = (sender, note.number)
        gift = self._gifts.setdefault(note.request_id, {}).get(asker)
        if gift is None:
            want = note if isinstance(note, Want) else None
            now_s = self._clock()
            gift = Gift(asker, now_s, request_id=note.request_id, want=want, since_s=now_s)
            self._gifts[note.request_id][asker] = gift
            self._live.append(gift)
        elif gift.is_told:  # the answer was lost
            gift.is_told = False
            self._idle.pop(gift, None)
            self._live.append(gift)
        if isinstance(note, Want):
            gift.heard_s = self._clock()
        if gift.want is None and isinstance(note, Want):
            gift.want = note  # too late, but it says where the answer goes
        if isinstance(note, Withdrawal) and not gift.is_whole:
            gift.fail("the reader needs it no more", "deadline")

    def poll(self) -> tuple[Outcome, ...]:
        """Write what is ready, and answer what has ended. Never waits.

        Returns:
            What has ended since the last call.
        """
        now_s = self._clock()
        self._live = [gift for gift in self._live if not self._is_answered(gift, now_s)]
        while self._idle:
            oldest, since_s = next(iter(self._idle.items()))
            if now_s < since_s + KEPT_S and len(self._idle) + len(self._live) <= WANTS_MAX:
                break
            self._drop(oldest)
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    def is_writing(self, request_id: str, attempt: int) -> bool:
        """Whether a request's blocks are being read for somebody.

        Args:
            request_id: The request.
            attempt: In which the blocks were filled; what was written from other ones, which it has
                lost since, holds none of these.
        """
        gifts = self._gifts.get(request_id, {}).values()
        return any(gift.reads_blocks and gift.attempt == attempt for gift in gifts)

    def stop(self, request_id: str) -> None:
        """Begin to write nothing more of a request, whose blocks are not kept any longer."""
        for gift in list(self._gifts.get(request_id, {}).values()):
            if not gift.is_whole:
                gift.fail(NOT_KEPT, "lease")
            if gift.is_told:
                self._drop(gift)

    def _is_answered(self, gift: Gift, now_s: float) -> bool:
        """Bring a gift forward; whether there is nothing more to do."""
        if not gift.is_whole and not gift.reason:
            self._go_on(gift, now_s)
        if gift.answer is None and not gift.pending and (gift.is_whole or gift.reason):
            self._close(gift, now_s)
        if gift.answer is None:
            return False
        peer = self._agent.peer_named(gift.asker[0])
        if peer is not None:
            self._agent.tell(peer, gift.answer)
        elif gift.want is not None:
            self._readers.meet(gift, gift.want, now_s)  # so that the next time it can be told
        gift.is_told = True  # who has not heard it asks again, and by then we may have met
        if not self._agent.is_held(gift.request_id):
            self._idle[gift] = now_s
        return True

    def _go_on(self, gift: Gift, now_s: float) -> None:
        """Write what is there, if the reader's engine is known."""
        want = gift.want
        if want is None:
            return
        if not self._readers.has_met(gift, want, now_s):
            pass
        elif not self._agent.gives:
            gift.fail("this engine writes for nobody", "refused")
        elif want.is_empty:
            gift.is_whole = True
        elif want.epoch is None and self._was_given(gift):
            gift.fail("a request of that name has been written there before", "refused")
        elif self._agent.releases.is_over(want.request_id):
            gift.fail(NOT_KEPT, "lease")
        else:
            self._give(gift, want, now_s)
        if not gift.is_whole and now_s >= gift.since_s + want.timeout_s:
            gift.fail("it was not ready in time", "deadline")

    def _give(self, gift: Gift, want: Want, now_s: float) -> None:
        """Write more, if the reader still wants it: one that cannot ask any more may not."""
        if now_s > gift.heard_s + FRESH_S:
            return
        try:
            self._agent.give(gift, want)
        except KVBridgeError as error:
            gift.fail(str(error), cause_of(error))

    def _was_given(self, gift: Gift) -> bool:
        """Whether its reader has been given that request; who knows no lease has no other fence."""
        others = self._gifts[gift.request_id].values()
        return any(
            each.has_begun and each is not gift and each.asker[0] == gift.asker[0]
            for each in others
        )

    def _close(self, gift: Gift, now_s: float) -> None:
        """Fix what is said of a gift: nothing of it will touch anything any more."""
        nbytes = 0 if gift.reason else gift.nbytes
        gift.answer = Given(gift.asker[1], nbytes, gift.reason[:REASON_MAX], gift.cause)
        if gift.want is not None and not gift.want.is_empty:
            self._outcomes.append(Outcome(gift.cause, nbytes, now_s - gift.since_s))

    def _drop(self, gift: Gift) -> None:
        self._idle.pop(gift, None)
        known = self._gifts[gift.request_id]
        del known[gift.asker]
        if not known:
            del self._gifts[gift.request_id]
