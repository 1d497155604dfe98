"""Bugs of the life cycle of requests."""

from dataclasses import replace
from typing import Any

import pytest

from kvbridge.connector.bridge import BridgeConnector
from kvbridge.connector.gather import ReportGatherer
from kvbridge.connector.loads import Loads
from kvbridge.connector.multi_worker import MultiWorker
from kvbridge.connector.scheduler import BridgeScheduler
from kvbridge.connector.step import Load
from kvbridge.connector.values import Loaded, WorkerReport
from kvbridge.connector.worker import BridgeWorker
from kvbridge.handshake import Release
from kvbridge.model import Rank
from kvbridge.plan import EngineTransferPlan
from kvbridge.session import (
    Cause,
    Introductions,
    Lease,
    RankAgent,
    ReleaseBook,
    Transfer,
    notes,
)
from kvbridge.session.leases import LeaseTable
from kvbridge.session.proofs import Proofs
from kvbridge.transport import State
from tests.mutants.bugs import bug, changed

# --- the producer: when are blocks free? ----------------------------------------------------------


@bug("until every reader is done")
def frees_after_the_first_reader(patch: pytest.MonkeyPatch) -> None:
    def report(self: ReleaseBook, release: Release) -> bool:
        return sound(self, changed(release, readers=1))

    sound = ReleaseBook.report
    patch.setattr(ReleaseBook, "report", report)


@bug("until every reader is done")
def counts_reports_and_not_readers(patch: pytest.MonkeyPatch) -> None:
    """A notice that comes twice counts twice."""
    count = 0

    def report(self: ReleaseBook, release: Release) -> bool:
        nonlocal count
        count += 1
        return sound(self, changed(release, rank=(0, count)))

    sound = ReleaseBook.report
    patch.setattr(ReleaseBook, "report", report)


@bug("until every reader is done")
def adds_up_readers_of_several_engines(patch: pytest.MonkeyPatch) -> None:
    def report(self: ReleaseBook, release: Release) -> bool:
        rank = (hash((release.engine_id, release.rank[0])), release.rank[1])
        return sound(self, changed(release, engine_id="", incarnation="", rank=rank))

    sound = ReleaseBook.report
    patch.setattr(ReleaseBook, "report", report)


@bug("until every reader is done", "without a cause")
def names_requests_alike_each_time(patch: pytest.MonkeyPatch) -> None:
    """A late notice about an earlier request of a name ends the hold of a later one."""

    class Same:
        def __iter__(self) -> "Same":
            return self

        def __next__(self) -> int:
            return 1

    def init(self: BridgeScheduler, *args: Any, **kwargs: Any) -> None:
        sound(self, *args, **kwargs)
        self._offers._numbers = Same()  # type: ignore[assignment]

    sound = BridgeScheduler.__init__
    patch.setattr(BridgeScheduler, "__init__", init)


@bug("before its blocks are free")
def forgets_to_revoke_when_all_have_read(patch: pytest.MonkeyPatch) -> None:
    def poll(self: RankAgent) -> Any:
        revoke = LeaseTable.revoke
        LeaseTable.revoke = lambda self, lease: None  # type: ignore[method-assign]
        try:
            return sound(self)
        finally:
            LeaseTable.revoke = revoke  # type: ignore[method-assign]

    sound = RankAgent.poll
    patch.setattr(RankAgent, "poll", poll)


@bug("before its blocks are free")
def revokes_only_after_the_blocks_are_free(patch: pytest.MonkeyPatch) -> None:
    """An expired lease is taken back at the next poll."""
    late: list[tuple[LeaseTable, Lease]] = []

    def poll(self: RankAgent) -> Any:
        for table, lease in [each for each in late if each[0] is self._leases]:
            revoke(table, lease)
            late.remove((table, lease))
        return sound(self)

    sound, revoke = RankAgent.poll, LeaseTable.revoke
    patch.setattr(RankAgent, "poll", poll)
    patch.setattr(LeaseTable, "revoke", lambda self, lease: late.append((self, lease)))


@bug("before its deadline", "nothing is held")
def keeps_blocks_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BridgeWorker, "_expire", lambda self, transfer_ids: None)


@bug("nothing is held")
def keeps_the_slots_of_expired_leases(patch: pytest.MonkeyPatch) -> None:
    def ended(self: BridgeScheduler, report: WorkerReport) -> None:
        sound(self, WorkerReport(report.loaded, report.sent - report.expired))

    sound = BridgeScheduler.ended
    patch.setattr(BridgeScheduler, "ended", ended)


# --- the consumer: is it a success, and when are blocks quiet? ------------------------------------


@bug("its own bytes")
def looks_at_the_lease_before_the_bytes(patch: pytest.MonkeyPatch) -> None:
    def pull(self: RankAgent, *args: Any, **kwargs: Any) -> Transfer:
        transfer = sound(self, *args, **kwargs)
        if transfer.lease is not None and not transfer.reason:
            self._live._proofs.look(transfer, transfer.lease)
        return transfer

    sound = RankAgent.pull
    patch.setattr(RankAgent, "pull", pull)


@bug("its own bytes")
def looks_at_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Proofs, "standing", lambda self, transfer, lease: "kept")


@bug("without a cause")
def takes_a_lease_that_has_not_begun_for_one_that_is_over(patch: pytest.MonkeyPatch) -> None:
    """A reader may be faster than the next step of the engine that gives."""
    patch.setattr(Lease, "standing", lambda self, word: "kept" if word == self.epoch else "over")


@bug("can touch it")
def calls_a_late_transfer_quiet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Transfer, "quiet", property(lambda t: not t.pending or t.state is not State.PENDING)
    )


@bug("can touch it")
def ends_with_the_first_read_that_failed(patch: pytest.MonkeyPatch) -> None:
    """Report B39: a sibling still writes."""

    def settle(self: Transfer, part: Any, state: State, *why: Any) -> None:
        sound(self, part, state, *why)
        if state is not State.DONE:
            self.pending.clear()

    sound = Transfer.settle
    patch.setattr(Transfer, "settle", settle)


@bug("its own bytes")
def takes_a_failed_read_for_a_good_one(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Transfer, part: Any, *_: Any) -> None:
        self.pending.discard(part)

    patch.setattr(Transfer, "settle", settle)


@bug("can touch it", "its own bytes", "before its blocks are free")
def counts_a_load_that_one_rank_has_not_ended(patch: pytest.MonkeyPatch) -> None:
    def init(self: ReportGatherer, ranks: Any) -> None:
        ranks = sorted(ranks)
        sound(self, ranks[1:] or ranks)

    sound = ReportGatherer.__init__
    patch.setattr(ReportGatherer, "__init__", init)


@bug("before its deadline", "nothing is held")
def forgets_the_deadline_of_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    """Of those that failed before anything was read, one is never reported."""

    def fail(self: Loads, waiting: Any, error: str, cause: Cause) -> None:
        if "restarted" not in error:
            sound(self, waiting, error, cause)

    sound = Loads._fail
    patch.setattr(Loads, "_fail", fail)


@bug("ends once")
def reports_a_load_twice(patch: pytest.MonkeyPatch) -> None:
    last: dict[int, WorkerReport] = {}

    def report(self: BridgeWorker) -> WorkerReport:
        new = sound(self)
        old = last.get(id(self), WorkerReport())
        last[id(self)] = new
        return WorkerReport({**old.loaded, **new.loaded}, new.sent, new.expired)

    sound = BridgeWorker.report
    patch.setattr(BridgeWorker, "report", report)


@bug("as configured")
def has_computed_what_shall_fail(patch: pytest.MonkeyPatch) -> None:
    sound = Loaded.under
    patch.setattr(Loaded, "under", lambda self, on_failure: sound(self, "recompute"))


@bug("has said so", "says so")
def does_not_decline_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BridgeScheduler, "not_needed", lambda self, request: None)


@bug("can touch it", "its own bytes")
def ends_what_is_aborted_at_once(patch: pytest.MonkeyPatch) -> None:
    def abort(self: Loads, request_id: str) -> None:
        sound(self, request_id)
        for each in list(self._reading):
            if each.waited.load.request_id == request_id:
                self._reading.remove(each)
                self._fail(each.waited, "the request was aborted", "aborted")

    sound = Loads.abort
    patch.setattr(Loads, "abort", abort)


@bug("has said so", "says so")
def tells_nobody_that_a_waiting_load_was_aborted(patch: pytest.MonkeyPatch) -> None:
    def abort(self: Loads, request_id: str) -> None:
        sound(self, request_id)
        self._waiting = [w for w in self._waiting if w.load.request_id != request_id]

    sound = Loads.abort
    patch.setattr(Loads, "abort", abort)


@bug("says so")
def does_not_tell_ranks_that_it_does_not_read(patch: pytest.MonkeyPatch) -> None:
    def told_by(plan: EngineTransferPlan) -> list[Rank]:
        return [source.rank for source in plan.sources]

    patch.setattr(notes, "told_by", told_by)


@bug("until every reader is done", "without a cause")
def says_that_it_is_done_when_it_begins(patch: pytest.MonkeyPatch) -> None:
    def pull(self: RankAgent, *args: Any, **kwargs: Any) -> Transfer:
        transfer = sound(self, *args, **kwargs)
        self._notes.release(transfer.session, transfer.request_id, ok=True)
        return transfer

    sound = RankAgent.pull
    patch.setattr(RankAgent, "pull", pull)


# --- who is it? -----------------------------------------------------------------------------------


@bug("can load from every other")
def knows_an_engine_by_its_name_alone(patch: pytest.MonkeyPatch) -> None:
    """One that was restarted is taken for the one that it was."""

    def is_current(self: Introductions, engine_id: str, *_: object) -> bool:
        return engine_id in self._agent.sessions

    patch.setattr(Introductions, "_is_current", is_current)


@bug("its own bytes", "can load from every other")
def ignores_the_generation(patch: pytest.MonkeyPatch) -> None:
    """What is read was registered before the engine slept."""

    def is_current(
        self: Introductions, engine_id: str, incarnation: str | None, _: int, *others: Any
    ) -> bool:
        return sound(self, engine_id, incarnation, 0, *others)

    def add(self: Loads, load: Load, *, timeout_s: float) -> None:
        remote = changed(load.remote, generation=0)
        added(self, replace(load, remote=remote), timeout_s=timeout_s)

    sound, added = Introductions._is_current, Loads.add
    patch.setattr(Introductions, "_is_current", is_current)
    patch.setattr(Loads, "add", add)


@bug("nothing is held", "can load from every other", "without a cause")
def never_asks_again(patch: pytest.MonkeyPatch) -> None:
    """An engine that could not be met once is not met any more."""

    def fail(self: Introductions, introduction: Any, error: Any) -> None:
        sound(self, introduction, error)
        introduction.retry_s = float("inf")

    sound = Introductions._fail
    patch.setattr(Introductions, "_fail", fail)


# --- several connectors ---------------------------------------------------------------------------


@bug("until every reader is done", "before its blocks are free")
def frees_when_the_first_connector_is_done(patch: pytest.MonkeyPatch) -> None:
    def sent_by(self: MultiWorker, name: str, request_id: str, *, expired: bool) -> None:
        saving = self._saving.get(request_id)
        if saving is not None:
            saving.children &= {name}
        sound(self, name, request_id, expired=expired)

    sound = MultiWorker._sent_by
    patch.setattr(MultiWorker, "_sent_by", sent_by)


@bug("says so")
def forgets_connectors_that_stood_by(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BridgeConnector, "drop_standby", lambda self, load: None)
