"""Bugs of what is written on request, of renewed leases, and of engines that end in order."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvbridge.connector.holds import Holds
from kvbridge.connector.renewals import Renewals
from kvbridge.connector.scheduler import BridgeScheduler
from kvbridge.connector.step import StepMetadata
from kvbridge.connector.values import WorkerReport
from kvbridge.connector.worker import BridgeWorker
from kvbridge.handshake.messages import Given, Want, Withdrawal
from kvbridge.session import Gift, Gifts, RankAgent, Readers, Transfer, wants
from kvbridge.session.computed import Computed, Ready
from kvbridge.session.live import LiveTransfers
from kvbridge.session.wants import Wants
from tests.mutants.bugs import bug, changed

# --- the reader -----------------------------------------------------------------------------------


@bug("can touch it", "its own bytes")
def frees_what_was_wanted_at_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """Whoever writes has not said that it will not."""

    def withdraw(self: Wants, transfer: Transfer) -> None:
        for wanted in [each for each in self._open.values() if each.transfer is transfer]:
            self._settle(wanted, "nobody waits for it any more", "deadline")

    patch.setattr(Wants, "withdraw", withdraw)


@bug("can touch it", "its own bytes")
def takes_any_answer_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """Of another number, or of another rank."""

    def heard(self: Wants, sender: str, given: Given) -> None:
        first = next((each for each in self._open.values() if not each.want.is_empty), None)
        if first is None:
            sound(self, sender, given)
        else:
            sound(self, first.peer.agent, changed(given, number=first.want.number))

    sound = Wants.heard
    patch.setattr(Wants, "heard", heard)


@bug("can touch it", "its own bytes")
def takes_a_lost_writer_for_quiet_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wants, "SETTLE_S", 0.0)
    patch.setattr(wants, "LOST_S", 0.0)


@bug("nothing is held", "before its deadline")
def forgets_to_insist_on_an_answer(patch: pytest.MonkeyPatch) -> None:
    """What is withdrawn is withdrawn once."""

    def poll(self: Wants) -> None:
        said = [each for each in self._open.values() if each.withdrawn and each.quiet_s is None]
        sound(self)
        for wanted in said:
            wanted.again_s = float("inf")

    sound = Wants.poll
    patch.setattr(Wants, "poll", poll)


@bug("until every reader is done")
def says_that_it_is_done_before_it_reads_instead(patch: pytest.MonkeyPatch) -> None:
    def ended(self: LiveTransfers, now_s: float) -> Iterator[Transfer]:
        for transfer in sound(self, now_s):
            if transfer.must_be_read:
                self._notes.release(transfer.session, transfer.request_id, ok=False)
            yield transfer

    sound = LiveTransfers.ended
    patch.setattr(LiveTransfers, "ended", ended)


# --- the producer ---------------------------------------------------------------------------------


@bug("but what was wanted")
def carries_out_a_want_that_comes_again(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Gifts, sender: str, note: Want | Withdrawal) -> None:
        known = self._gifts.get(note.request_id, {}).get((sender, note.number))
        if known is not None and known.is_told:
            self._drop(known)
        sound(self, sender, note)

    sound = Gifts.heard
    patch.setattr(Gifts, "heard", heard)


@bug("but what was wanted")
def carries_out_what_was_withdrawn(patch: pytest.MonkeyPatch) -> None:
    def heard(self: Gifts, sender: str, note: Want | Withdrawal) -> None:
        if isinstance(note, Want):
            sound(self, sender, note)

    sound = Gifts.heard
    patch.setattr(Gifts, "heard", heard)


@bug("nothing is held")
def does_not_answer_what_was_withdrawn(patch: pytest.MonkeyPatch) -> None:
    def tell(self: RankAgent, peer: Any, given: Given) -> bool:
        return "needs it no more" in given.reason or sound(self, peer, given)

    sound = RankAgent.tell
    patch.setattr(RankAgent, "tell", tell)


@bug("nothing is held")
def does_not_answer_whom_it_could_not_meet(patch: pytest.MonkeyPatch) -> None:
    """The reader waits for an answer for ever."""

    def meet(self: Readers, asked: Any, who: Any, now_s: float) -> None:
        if getattr(asked, "answer", None) is None:
            sound(self, asked, who, now_s)

    sound = Readers.meet
    patch.setattr(Readers, "meet", meet)


@bug("touches the reader's blocks no more")
def answers_before_its_writes_have_ended(patch: pytest.MonkeyPatch) -> None:
    def give(self: RankAgent, gift: Any, want: Want) -> None:
        sound(self, gift, want)
        gift.pending.clear()

    sound = RankAgent.give
    patch.setattr(RankAgent, "give", give)


@bug("can touch it")
def frees_what_it_is_writing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gifts, "is_writing", lambda self, request_id, attempt: False)


# --- what goes while the rest is computed ---------------------------------------------------------


@bug("its own bytes", "wanted, once")
def writes_on_after_blocks_were_taken_away(patch: pytest.MonkeyPatch) -> None:
    """What was written of them before is not written again."""
    patch.setattr(Gift, "goes_on", lambda self, attempt: True)


@bug("wanted, once", "its own bytes")
def begins_again_while_the_old_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    def goes_on(self: Gift, attempt: int) -> bool:
        if attempt != self.attempt:
            self.attempt, self.end_token, self.nbytes = attempt, 0, 0
        return True

    patch.setattr(Gift, "goes_on", goes_on)


@bug("its own bytes")
def writes_what_is_not_computed_yet(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Computed, request_id: str, end_token: int) -> Ready | None:
        found = sound(self, request_id, end_token)
        if found is None or not found.tables:
            return found
        there = 4 * len(found.tables[0].block_ids)
        return found._replace(end_token=min(there, end_token))

    sound = Computed.ready
    patch.setattr(Computed, "ready", ready)


# --- leases that are renewed ----------------------------------------------------------------------


@bug("without a cause")
def does_not_ask_to_keep_what_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Renewals, "wait", lambda self, request_id, remote: None)


@bug("asks no more")
def takes_a_refused_renewal_for_a_granted_one(patch: pytest.MonkeyPatch) -> None:
    def take(self: Renewals, question: Any) -> bool:
        ended = sound(self, question)
        for each in question.waiting:
            each.due_s = min(each.due_s, self.clock() + 1.0)
        return ended

    sound = Renewals._take
    patch.setattr(Renewals, "_take", take)


@bug("as long as was said")
def ranks_end_leases_by_their_own_clocks(patch: pytest.MonkeyPatch) -> None:
    """They let go of what was renewed while their engine was at a long step."""

    def begin(self: BridgeWorker, step: StepMetadata) -> None:
        sound(self, step)
        for transfer_id in self._held.keys() - ends.keys():
            ends[transfer_id] = self._clock() + self._config.lease_s

    def report(self: BridgeWorker) -> WorkerReport:
        now_s = self._clock()
        self._expire([each for each in self._held if now_s >= ends[each]])
        return poll(self)

    ends: dict[str, float] = {}
    sound, poll = BridgeWorker.begin, BridgeWorker.report
    patch.setattr(BridgeWorker, "begin", begin)
    patch.setattr(BridgeWorker, "report", report)


@bug("as long as was said")
def renews_a_lease_that_is_over(patch: pytest.MonkeyPatch) -> None:
    """The ranks have been told to let go of it."""

    def keep(self: Holds, transfer_ids: Any) -> Any:
        for promise in self._promises.values():
            promise.is_over = False
        return sound(self, transfer_ids)

    sound = Holds.keep
    patch.setattr(Holds, "keep", keep)


# --- engines that end in order --------------------------------------------------------------------


@bug("offers nothing")
def offers_while_it_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "draining", property(lambda self: False))


@bug("as long as was said")
def renews_beyond_its_own_end(patch: pytest.MonkeyPatch) -> None:
    def drain(self: Holds, within_s: float) -> None:
        sound(self, within_s)
        for promise in self._promises.values():
            promise.last_s += 3600

    sound = Holds.drain
    patch.setattr(Holds, "drain", drain)


@bug("drained in time")
def is_drained_while_blocks_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BridgeScheduler, "drained", property(lambda self: not self._loading))
