"""The reader's side of the payload check: what has come is compared with what its owner holds.

Once all bytes of a request are here and quiet, each rank that they came from is asked for digests
of the cells that it gave, and digests of the same cells are taken here meanwhile. If they differ,
the load fails, with the first layer and tokens that do. Questions are repeated until they are
answered. Nothing is written for one, so at its deadline a check is simply forgotten.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvbridge.errors import (
    KVBridgeError,
    NotSupportedError,
    PeerLostError,
    PlanError,
    TransportError,
)
from kvbridge.handshake import EngineAddress
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.handshake.messages import NOTE_MAX_BYTES
from kvbridge.model import Rank, RankCache
from kvbridge.plan import digests_of, first_difference
from kvbridge.session.beside import Beside
from kvbridge.session.causes import Cause, cause_of, cause_told
from kvbridge.session.digesting import TAKING, Values, unpacked
from kvbridge.session.questions import CheckMode, PayloadCheck, Question, question
from kvbridge.session.session import Session
from kvbridge.session.transfer import Transfer
from kvbridge.session.wants import AGAIN_S
from kvbridge.transport import Peer, State

MUTE_S = 30.0
"""An engine that has not answered is asked again after so long, unless everything is compared."""


class Checked(NamedTuple):
    """What has come of a payload check.

    Attributes:
        outcome: Whether both sides hold the same, or not, or that is unknown.
        reason: Why not, or why that is unknown.
        words: Why it was skipped, for people.
    """

    outcome: Literal["ok", "failed", "skipped"]
    reason: Cause | Literal["unsupported", "unanswered"] = ""
    words: str = ""


@dataclass(slots=True, eq=False)
class _Asked:
    """One rank that bytes came from.

    Attributes:
        rank: The rank.
        peer: The same as a peer.
        number: That of the question.
        planning: The question, as soon as it is ready.
        ours: Digests that are taken here; None until the question is ready.
        theirs: The digests that have come.
        again_s: Clock when it is asked again.
    """

    rank: Rank
    peer: Peer
    number: int
    planning: Future[Question]
    ours: Future[Values] | None = None
    theirs: Values | None = None
    again_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Check:
    """All that one transfer waits for.

    Attributes:
        transfer: The transfer.
        check: What is compared.
        cache: What this rank holds.
        since_s: Clock when it began.
        asked: Those ranks of which the digests have not been compared.
    """

    transfer: Transfer
    check: PayloadCheck
    cache: RankCache
    since_s: float
    asked: list[_Asked] = field(default_factory=list)


class Checks:
    """The payload checks of one rank.

    Attributes:
        ignored: Answers to what was not asked, or was answered before.
    """

    def __init__(
        self,
        send: Callable[[Peer, bytes], None],
        beside: Beside,
        clock: Callable[[], float],
    ) -> None:
        """Check nothing yet.

        Args:
            send: Sends a notification; raises TransportError.
            beside: Where digests are taken.
            clock: Seconds that never run backwards.
        """
        self._send, self._beside, self._clock = send, beside, clock
        self._numbers = itertools.count(1)
        self._open: dict[Transfer, _Check] = {}
        self.ignored = 0

    def begin(self, transfer: Transfer, cache: RankCache) -> bool:
        """Begin what a transfer is to be checked for, once; whether it has to wait for that."""
        check, transfer.check = transfer.check, None
        if check is None:
            return False
        session, now_s = transfer.session, self._clock()
        if now_s >= transfer.deadline_s:
            transfer.checked = Checked("failed", "deadline")
            transfer.fail("no time was left to compare what has come", "deadline")
            return False
        if not session.digests:
            _do_without(
                transfer,
                check.mode,
                f"engine {session.engine_id!r} says that it cannot take digests of its blocks: it "
                "is too old, or they are in memory that its host cannot read",
            )
            return False
        if check.mode == "sampled" and now_s < session.mute_s:
            transfer.checked = Checked("skipped", "unanswered")
            return False
        transfer.reads_instead = False  # it has been written
        begun = _Check(transfer, check, cache, now_s)
        regions = {source.rank: source.regions for source in session.plan.sources}
        for source in transfer.sources:
            number, peer = next(self._numbers), session.peers[source.rank]
            most = min(peer.capabilities.notify_max_bytes, NOTE_MAX_BYTES)
            asks = replace(check.asks, number=number)
            plan = partial(question, cache, regions[source.rank], check, asks, most)
            begun.asked.append(_Asked(source.rank, peer, number, self._beside.start(plan, TAKING)))
        self._open[transfer] = begun
        transfer.pending.add(begun)
        return True

    def heard(self, sender: str, answer: Digests) -> None:
        """Take an answer."""
        for check in self._open.values():
            for asked in check.asked:
                is_asked = (asked.number, asked.peer.agent) == (answer.number, sender)
                if is_asked and asked.ours is not None and asked.theirs is None:
                    self._take(check, asked, answer)
                    return
        self.ignored += 1

    def poll(self, is_current: Callable[[Session], bool]) -> None:
        """Ask, ask again for what is due, and compare what has come.

        Args:
            is_current: Whether a session is still the one with its engine.
        """
        now_s = self._clock()
        for check in list(self._open.values()):
            transfer, session = check.transfer, check.transfer.session
            if not is_current(session):
                words = f"engine {session.engine_id!r} was dropped before the payload was compared"
                self._fail(check, words, "transport")
                continue
            try:
                for asked in list(check.asked):
                    if transfer in self._open:  # the one before may have failed it
                        self._advance(check, asked, now_s)
            except PeerLostError as error:
                session.lost = True
                self._fail(check, str(error), "transport")
            except NotSupportedError as error:
                self._fail(check, f"digests cannot be asked for: {error}", "refused")
            except KVBridgeError as error:
                self._fail(check, str(error), cause_of(error))
            if transfer in self._open:
                self._settle(check, now_s)

    def give_up(self, transfer: Transfer) -> str:
        """Forget the check of a transfer that is late; return what it waited for, if anything."""
        check = self._open.get(transfer)
        if check is None:
            return ""
        silent = [asked.rank for asked in check.asked if asked.theirs is None]
        words = f"digests of ranks {silent} had not come" if silent else "digests were not taken"
        if silent and not transfer.session.answers:
            words += f" (they must be able to meet this engine at {_at(check.check.asks)})"
        transfer.checked = None if transfer.reason else Checked("failed", "deadline")
        self._end(check)
        return words

    def _take(self, check: _Check, asked: _Asked, answer: Digests) -> None:
        """Take an answer of the rank that was asked."""
        check.transfer.session.answers = True
        if answer.reason:
            words = f"rank {asked.rank} sends no digests of its blocks: {answer.reason}"
            self._fail(check, words, cause_told(answer.cause, otherwise="lease"))
            return
        counts = [len(probe.chunks) for probe in asked.planning.result().probes]
        try:
            asked.theirs = unpacked(answer.values, counts)
        except PlanError as error:
            self._fail(check, f"rank {asked.rank}: {error}", "incompatible")

    def _advance(self, check: _Check, asked: _Asked, now_s: float) -> None:
        """Bring one rank's part forward: the question, our digests, theirs, the comparison."""
        if not asked.planning.done():
            return
        note, probes = asked.planning.result()
        if asked.ours is None:
            if not probes:
                check.asked.remove(asked)
                return
            work = partial(digests_of, check.cache, probes, check.check.tables)
            asked.ours = self._beside.start(work, TAKING)
        if asked.theirs is None and now_s >= asked.again_s:
            asked.again_s = now_s + AGAIN_S
            try:
                self._send(asked.peer, note)
            except (NotSupportedError, PeerLostError):
                raise
            except TransportError:
                return  # it is asked again
        if asked.theirs is None or not asked.ours.done():
            return
        check.asked.remove(asked)
        difference = first_difference(probes, asked.ours.result(), asked.theirs)
        if difference is not None:
            transfer = check.transfer
            words = (
                f"what has come from engine {transfer.session.engine_id!r} rank {asked.rank} of "
                f"request {transfer.request_id!r} is not what it holds: {difference}"
            )
            self._fail(check, words, "corrupt")

    def _settle(self, check: _Check, now_s: float) -> None:
        """End a check of which all is compared, or that nobody will ever answer."""
        transfer, session = check.transfer, check.transfer.session
        patience_s = (transfer.deadline_s - check.since_s) / 4
        if not check.asked:
            transfer.checked = Checked("ok")
        elif check.check.mode == "full" or session.answers or now_s < check.since_s + patience_s:
            return
        else:
            session.mute_s = now_s + MUTE_S
            transfer.checked = Checked(
                "skipped",
                "unanswered",
                f"engine {session.engine_id!r} did not answer in {patience_s:.3g} s; its ranks "
                f"must be able to meet this engine at {_at(check.check.asks)}",
            )
        self._end(check)

    def _fail(self, check: _Check, words: str, cause: Cause) -> None:
        check.transfer.checked = Checked("failed", cause)
        check.transfer.fail(words, cause)
        self._end(check)

    def _end(self, check: _Check) -> None:
        """Let a transfer wait no longer."""
        del self._open[check.transfer]
        check.transfer.settle(check, State.DONE, "")


def _do_without(transfer: Transfer, mode: CheckMode, why: str) -> None:
    """Fail a transfer that cannot be checked, if all of it must be."""
    if mode == "sampled":
        transfer.checked = Checked("skipped", "unsupported", why)
        return
    words = f"{why}; upgrade it, or set payload_check to 'sampled' or 'off' here"
    transfer.checked = Checked("failed", "incompatible")
    transfer.fail(words, "incompatible")


def _at(asks: DigestRequest) -> str:
    """Say where this engine can be met."""
    host, port = asks.address
    return str(EngineAddress(host, port))
