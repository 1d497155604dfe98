"""The loads of one rank, from the word of the scheduler half to their end."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from kvbridge.connector.loading import Reading, Waiting
from kvbridge.connector.stats import Key, Meter
from kvbridge.connector.step import Load
from kvbridge.connector.tally import Tally, count_pending
from kvbridge.connector.values import Loaded, OnFailure
from kvbridge.connector.ways import can_read, choose_way
from kvbridge.errors import KVBridgeError, NotSupportedError
from kvbridge.session import (
    Cause,
    CheckMode,
    Introduction,
    Introductions,
    RankAgent,
    Session,
    cause_of,
)
from kvbridge.transport import State

_log = logging.getLogger(__name__)

_ABORTED = "the request was aborted"
_NO_CACHE = (
    "this rank has no cache to load into: it was unregistered; register another one, and hand over "
    "its metadata, before requests are scheduled"
)


class Loads:
    """Meets the engines that loads name, has them read in order, and counts what becomes of it.

    So many may read at once, and none of their engines may take all places: what hangs gives its
    place back at its deadline, and until then a quarter of the places is left to other engines. A
    load that moves nothing needs no place.
    """

    def __init__(
        self,
        name: str,
        agent: RankAgent,
        meetings: Introductions,
        meter: Meter,
        *,
        reads_max: int,
        direction: Literal["auto", "pull", "push"] = "auto",
        payload_check: Literal["off"] | CheckMode = "off",
        on_failure: OnFailure = "recompute",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what it works with; the caller closes that.

        Args:
            name: Name of the connector.
            agent: The rank.
            meetings: Meets engines.
            meter: Counts.
            reads_max: So many loads read at once.
            direction: Whether they read, or the other engine writes.
            payload_check: Whether what has come is compared with what is there.
            on_failure: What is to become of requests that could not be loaded.
            clock: That of the agent.
        """
        self._name, self._agent, self._meetings = name, agent, meetings
        self._clock = clock
        self._reads_max, self._share = reads_max, reads_max - reads_max // 4
        self._waiting: list[Waiting] = []
        self._reading: list[Reading] = []
        self._ended: dict[str, Loaded] = {}
        self._direction, self._on_failure = direction, on_failure
        self._check = None if payload_check == "off" else payload_check
        self._tally = Tally(meter, self._check)
        self._said_unleased = False

    def __len__(self) -> int:
        """How many have not ended, or are not quiet."""
        return len(self._waiting) + len(self._reading)

    @property
    def unfinished(self) -> int:
        """How many use the rank's memory, or will: not those that only tell their engine."""
        return sum(not each.load.is_empty for each in self._waiting) + len(self._reading)

    def add(self, load: Load, *, timeout_s: float) -> None:
        """Take a load."""
        now_s = self._clock()
        waiting = Waiting(load, self._meet(load), now_s, now_s + timeout_s)
        self._waiting.append(waiting)
        if not (load.is_empty or self._agent.has_cache):
            self._fail_and_tell(waiting, _NO_CACHE, "refused")

    def abort(self, request_id: str) -> None:
        """Go on no further with a load, and tell its engine that nothing is needed any more.

        It is reported once it is quiet, like any other. One that has not begun is quiet at once;
        what is left of it is to meet its engine, and to tell it.
        """
        for waiting in self._waiting:
            if waiting.load.request_id == request_id and not waiting.load.is_empty:
                self._fail_and_tell(waiting, _ABORTED, "aborted")
        for reading in self._reading:
            if reading.waited.load.request_id == request_id:
                self._agent.cancel(reading.transfer, _ABORTED)

    def start(self) -> None:
        """Start the loads whose engines have been met, as far as there are places."""
        for met in self._meetings.poll():
            self._tally.met(met, self._clock())
        if self._waiting:
            taken = Counter(
                each.transfer.session.engine_id
                for each in self._reading
                if each.transfer.state is State.PENDING
                and not each.waited.load.remote.is_expected  # nothing moves before it is computed
            )
            self._waiting = [each for each in self._waiting if not self._leaves(each, taken)]

    def end(self) -> None:
        """End what has ended and is quiet: until then, nobody may have the blocks."""
        running = []
        for each in self._reading:
            transfer, request_id = each.transfer, each.waited.load.request_id
            if transfer.must_be_read and transfer.state is State.FAILED:
                _log.info("request %s is read instead: %s", request_id, transfer.reason)
                each.waited.way = "pull"
                self._waiting.append(each.waited)
                continue
            if transfer.state is not State.PENDING and not each.has_ended:
                each.has_ended = True
                self._tally.ended(each)
                if not transfer.quiet:
                    level = logging.INFO if transfer.cause == "aborted" else logging.WARNING
                    _log.log(
                        level,
                        "request %s is given up over %s: %s; its blocks are kept until that is "
                        "quiet",
                        request_id,
                        self._name,
                        transfer.reason,
                    )
            if not each.has_ended or not transfer.quiet:
                running.append(each)
                if each.has_ended and transfer.kind == "push" and transfer.session.lost:
                    self._look_for(each)
                continue
            if transfer.state is not State.DONE and transfer.cause != "aborted":
                self._meetings.doubt(transfer.session.engine_id)
            self._ended[request_id] = Loaded(
                transfer.reason,
                self._name,
                tuple(transfer.sources),
                transfer.seconds,
                transfer.cause,
            ).under(self._on_failure)
        self._reading = running

    def _look_for(self, each: Reading) -> None:
        """Meet an engine anew that may still write, to be told whether it does."""
        known = self._agent.sessions.get(each.transfer.session.engine_id)
        if known is each.transfer.session:
            self._meetings.doubt(known.engine_id)
        self._meet(each.waited.load)

    def take(self) -> dict[str, Loaded]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def pending(self) -> dict[Key, float]:
        """Return how many are how far, for :class:`Meter`; from any thread."""
        return count_pending(self._waiting, self._reading)

    def close(self) -> None:
        """Count what will not come to its end. Idempotent."""
        unread = [*self._waiting, *(each.waited for each in self._reading if not each.has_ended)]
        for waiting in unread:
            self._fail(waiting, "the reader was shut down", "shutdown")
        self._waiting, self._reading, self._ended = [], [], {}

    def _meet(self, load: Load) -> Introduction:
        remote = load.remote
        return self._meetings.meet(
            remote.engine_id,
            remote.address,
            incarnation=remote.incarnation,
            generation=remote.generation,
        )

    def _leaves(self, each: Waiting, taken: Counter[str]) -> bool:
        """Start a load, or fail it; False if it has to wait. Counts the place that it takes."""
        load, introduction, now_s = each.load, each.introduction, self._clock()
        wanted, address = load.remote.incarnation, load.remote.address
        was_for_another = wanted not in {None, introduction.incarnation}
        if introduction.state == "failed" and (was_for_another or address != introduction.address):
            # It was asked for another start of its engine, perhaps while this one was not up yet;
            # or at an address that another request had brought.
            introduction = each.introduction = self._meet(load)
        if introduction.state == "failed" and introduction.error is not None:
            self._fail(each, str(introduction.error), cause_of(introduction.error))
            return True
        session, is_late = self._session(each), now_s >= each.deadline_s
        may_go = load.is_empty or not is_late  # to say that nothing is needed is never too late
        if session is not None and may_go and self._goes(each, session, taken, now_s):
            return True
        if is_late:
            self._fail_late(each, session)
            return True
        if session is None and introduction.state == "live":  # met, and gone again
            each.introduction = self._meet(load)
        return False

    def _goes(self, each: Waiting, session: Session, taken: Counter[str], now_s: float) -> bool:
        """Start a load whose engine has been met, or fail it; False if it has to wait."""
        load, engine_id = each.load, session.engine_id
        each.met_s = now_s if each.met_s is None else each.met_s
        stale = each.staleness(session)
        if stale:
            self._fail(each, stale, "stale")
            return True
        if load.is_empty:
            self._agent.decline(engine_id, load.remote.request_id)
            return True
        try:
            each.way = each.way or choose_way(
                self._agent,
                session,
                self._direction,
                load.address,
                is_expected=load.remote.is_expected,
                timeout_s=self._meetings.timeout_s,
                now_s=now_s,
            )
        except NotSupportedError as error:
            self._fail_unread(each, str(error), "refused")
            return True
        if each.way is None:
            return False
        has_place = taken.total() < self._reads_max and taken[engine_id] < self._share
        if has_place or load.remote.is_expected:
            has_begun = self._read(each, session, now_s)
            taken[engine_id] += has_begun and not load.remote.is_expected
            return True
        if not each.is_queued:
            each.is_queued = True
            self._tally.queued(each)
        return False

    def _session(self, each: Waiting) -> Session | None:
        """Return the session with a load's engine, once that has been met."""
        session = self._agent.sessions.get(each.load.remote.engine_id)
        if session is None or each.introduction.state != "live":
            return None
        return session if "read" in session.plans else None

    def _read(self, each: Waiting, session: Session, now_s: float) -> bool:
        """Begin to read, or to have it written; False if that cannot be."""
        load, remote = each.load, each.load.remote
        if remote.lease is None and not remote.is_expected and not self._said_unleased:
            self._said_unleased = True
            _log.warning(
                "request %s comes without a lease, so nothing shows that its blocks were kept "
                "until they are read; have proxies pass on all of kv_transfer_params (said once)",
                load.request_id,
            )
        try:
            transfer = each.ask(
                self._agent,
                reads_instead=self._reads_instead(load, session),
                check=self._check,
                now_s=now_s,
            )
        except KVBridgeError as error:
            self._fail_unread(each, str(error), cause_of(error))
            return False
        self._reading.append(Reading(each, transfer))
        return True

    def _reads_instead(self, load: Load, session: Session) -> bool:
        """Whether what turns out not to be written will be read."""
        is_free = self._direction == "auto" and not load.remote.is_expected
        return is_free and can_read(session)

    def _fail_late(self, each: Waiting, session: Session | None) -> None:
        """Fail a load whose time is over before it has begun to read."""
        remote, timeout_s = each.load.remote, each.deadline_s - each.begun_s
        if session is None:
            self._fail(
                each,
                f"engine {remote.engine_id!r} at {remote.address} was not met within the "
                f"{timeout_s:g} s that connector {self._name!r} may take",
                "handshake",
            )
        elif not (each.is_queued or _is_asked(each, session)):
            self._fail_unread(
                each,
                f"it had not begun within the {timeout_s:g} s that connector {self._name!r} may "
                "take: this engine was busy with something else",
                "deadline",
            )
        elif each.way is None:
            self._fail_unread(
                each,
                f"engine {remote.engine_id!r} did not say within the {timeout_s:g} s that "
                f"connector {self._name!r} may take whether it can write here",
                "handshake",
            )
        else:
            self._fail_unread(
                each,
                f"no place to read was free within the {timeout_s:g} s that connector "
                f"{self._name!r} may take: {self._reads_max} loads may read at once, {self._share} "
                "of one engine; raise reads_max, or look for what is slow",
                "deadline",
            )

    def _fail_unread(self, each: Waiting, error: str, cause: Cause) -> None:
        """Fail a load of which nothing will be read, and tell its engine so."""
        self._fail(each, error, cause)
        self._agent.decline(each.load.remote.engine_id, each.load.remote.request_id)

    def _fail_and_tell(self, each: Waiting, error: str, cause: Cause) -> None:
        """Fail a load of which nothing will be read; its engine is told once it has been met."""
        self._fail(each, error, cause)
        each.load = each.load.emptied()

    def _fail(self, each: Waiting, error: str, cause: Cause) -> None:
        load = each.load
        self._tally.failed(each, cause)
        if load.is_empty:
            _log.info("engine %s was not told: %s", load.remote.engine_id, error)
        else:
            ended = Loaded(error, self._name, cause=cause)
            self._ended[load.request_id] = ended.under(self._on_failure)


def _is_asked(each: Waiting, session: Session) -> bool:
    """Whether an engine has been asked for a load whether it can write, and has not answered."""
    greeting = session.greeting
    return each.way is None and greeting is not None and greeting.state is State.PENDING
