"""The loads of one rank, from the word of the scheduler half to their end."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.connector.series import (
    COPIES,
    HANDSHAKE_SECONDS,
    HANDSHAKES,
    NOTICES_LOST,
    PENDING,
    QUEUED,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
)
from kvbridge.connector.stats import Key, Meter
from kvbridge.connector.step import Load
from kvbridge.connector.values import Loaded
from kvbridge.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KVBridgeError,
    TransportError,
    UnknownHostError,
)
from kvbridge.plan import BlockTable
from kvbridge.session import (
    Cause,
    Introduction,
    Introductions,
    RankAgent,
    Session,
    Transfer,
    cause_of,
)
from kvbridge.transport import State

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A load that waits for its engine to be met, and then for a place.

    Attributes:
        load: The load.
        introduction: How far we have come with its engine.
        begun_s: Clock when we were told.
        deadline_s: Clock when it fails.
        met_s: Clock when its engine was known; None before.
        is_queued: Whether it has found no place.
    """

    load: Load
    introduction: Introduction
    begun_s: float
    deadline_s: float
    met_s: float | None = None
    is_queued: bool = False


@dataclass(slots=True, eq=False)
class _Reading:
    """A load that has begun to read.

    Attributes:
        waited: What it was before.
        transfer: What moves.
        has_ended: Whether its outcome has been noted; it may not be quiet then.
    """

    waited: _Waiting
    transfer: Transfer
    has_ended: bool = False


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what it works with; the caller closes that.

        Args:
            name: Name of the connector.
            agent: The rank.
            meetings: Meets engines.
            meter: Counts.
            reads_max: So many loads read at once.
            clock: That of the agent.
        """
        self._name, self._agent, self._meetings = name, agent, meetings
        self._meter, self._clock = meter, clock
        self._reads_max, self._share = reads_max, reads_max - reads_max // 4
        self._waiting: list[_Waiting] = []
        self._reading: list[_Reading] = []
        self._ended: dict[str, Loaded] = {}
        self._said_unleased = False

    def __len__(self) -> int:
        """How many have not ended, or are not quiet."""
        return len(self._waiting) + len(self._reading)

    def add(self, load: Load, *, timeout_s: float) -> None:
        """Take a load."""
        now_s = self._clock()
        self._waiting.append(_Waiting(load, self._meet(load), now_s, now_s + timeout_s))

    def start(self) -> None:
        """Start the loads whose engines have been met, as far as there are places."""
        for met in self._meetings.poll():
            self._count_meeting(met)
        if self._waiting:
            taken = Counter(
                each.transfer.session.engine_id
                for each in self._reading
                if each.transfer.state is State.PENDING
            )
            self._waiting = [each for each in self._waiting if not self._leaves(each, taken)]

    def end(self) -> None:
        """End what has ended and is quiet: until then, nobody may have the blocks."""
        running = []
        for each in self._reading:
            transfer, request_id = each.transfer, each.waited.load.request_id
            if transfer.state is not State.PENDING and not each.has_ended:
                each.has_ended = True
                self._count_end(each)
                if not transfer.quiet:
                    _log.warning(
                        "request %s is given up over %s: %s; its blocks are kept until that is "
                        "quiet",
                        request_id,
                        self._name,
                        transfer.reason,
                    )
            if not each.has_ended or not transfer.quiet:
                running.append(each)
                continue
            if transfer.state is not State.DONE:
                self._meetings.doubt(transfer.session.engine_id)
            self._ended[request_id] = Loaded(
                transfer.reason,
                self._name,
                tuple(transfer.sources),
                transfer.seconds,
                transfer.cause,
            )
        self._reading = running

    def take(self) -> dict[str, Loaded]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended

    def pending(self) -> dict[Key, float]:
        """Return how many are how far, for :class:`Meter`; from any thread."""
        waiting, reading = self._waiting, self._reading
        queued = sum(each.is_queued for each in waiting)
        return {
            (PENDING.name, "read", "meeting"): len(waiting) - queued,
            (PENDING.name, "read", "queued"): queued,
            (PENDING.name, "read", "reading"): sum(not each.has_ended for each in reading),
        }

    def close(self) -> None:
        """Count what will not come to its end. Idempotent."""
        unread = [each.load for each in self._waiting]
        unread += [each.waited.load for each in self._reading if not each.has_ended]
        for load in unread:
            self._fail(load, "the reader was shut down", "shutdown")
        self._waiting, self._reading, self._ended = [], [], {}

    def _meet(self, load: Load) -> Introduction:
        remote = load.remote
        return self._meetings.meet(
            remote.engine_id,
            remote.address,
            incarnation=remote.incarnation,
            generation=remote.generation,
        )

    def _leaves(self, each: _Waiting, taken: Counter[str]) -> bool:
        """Start a load, or fail it; False if it has to wait. Counts the place that it takes."""
        load, introduction, now_s = each.load, each.introduction, self._clock()
        engine_id = load.remote.engine_id
        wanted = load.remote.incarnation
        if introduction.state == "failed" and wanted not in {None, introduction.incarnation}:
            # It was asked for another start of its engine, perhaps while this one was not up yet.
            introduction = each.introduction = self._meet(load)
        if introduction.state == "failed" and introduction.error is not None:
            self._fail(load, str(introduction.error), cause_of(introduction.error))
            return True
        session = self._agent.sessions.get(engine_id) if introduction.state == "live" else None
        if session is not None:
            each.met_s = now_s if each.met_s is None else each.met_s
            stale = _staleness(load, session)
            if stale:
                self._fail(load, stale, "stale")
                return True
            if load.is_empty:
                self._agent.decline(engine_id, load.remote.request_id)
                return True
            if taken.total() < self._reads_max and taken[engine_id] < self._share:
                taken[engine_id] += self._read(each, now_s)
                return True
        if now_s >= each.deadline_s:
            self._fail_late(each, session)
            return True
        if session is not None and not each.is_queued:
            each.is_queued = True
            self._meter.count(QUEUED, "read")
        elif session is None and introduction.state == "live":  # met, and gone again
            each.introduction = self._meet(load)
        return False

    def _read(self, each: _Waiting, now_s: float) -> bool:
        """Begin to read; False if that cannot be."""
        load, remote = each.load, each.load.remote
        if remote.lease is None and not self._said_unleased:
            self._said_unleased = True
            _log.warning(
                "request %s comes without a lease, so nothing shows that its blocks were kept "
                "until they are read; have proxies pass on all of kv_transfer_params (said once)",
                load.request_id,
            )
        try:
            transfer = self._agent.pull(
                remote.engine_id,
                remote.request_id,
                [BlockTable(ids) for ids in load.block_ids],
                [BlockTable(ids) for ids in remote.block_ids],
                start_token=load.start_token,
                end_token=load.end_token,
                timeout_s=max(each.deadline_s - now_s, 1e-3),
                lease=remote.lease,
            )
        except KVBridgeError as error:
            self._fail(load, str(error), cause_of(error))
            self._agent.decline(remote.engine_id, remote.request_id)  # nothing will be read
            return False
        self._reading.append(_Reading(each, transfer))
        return True

    def _fail_late(self, each: _Waiting, session: Session | None) -> None:
        """Fail a load whose time is over before it has begun to read."""
        load, remote = each.load, each.load.remote
        timeout_s = each.deadline_s - each.begun_s
        if session is None:
            self._fail(
                load,
                f"engine {remote.engine_id!r} at {remote.address} was not met within the "
                f"{timeout_s:g} s that connector {self._name!r} may take",
                "handshake",
            )
            return
        self._fail(
            load,
            f"no place to read was free within the {timeout_s:g} s that connector {self._name!r} "
            f"may take: {self._reads_max} loads may read at once, {self._share} of one engine; "
            "raise reads_max, or look for what is slow",
            "deadline",
        )
        self._agent.decline(remote.engine_id, remote.request_id)  # nothing will be read

    def _fail(self, load: Load, error: str, cause: Cause) -> None:
        if load.is_empty:
            self._meter.count(NOTICES_LOST, cause)
            _log.info("engine %s was not told: %s", load.remote.engine_id, error)
        else:
            self._meter.count(TRANSFERS, "read", "failed", cause)
            self._ended[load.request_id] = Loaded(error, self._name, cause=cause)

    def _count_meeting(self, met: Introduction) -> None:
        if met.error is None:
            self._meter.count(HANDSHAKES, "ok", "")
            self._meter.measure(HANDSHAKE_SECONDS, self._clock() - met.started_s)
        else:
            self._meter.count(HANDSHAKES, "failed", _why_not_met(met.error))

    def _count_end(self, each: _Reading) -> None:
        waited, transfer, meter = each.waited, each.transfer, self._meter
        if transfer.state is not State.DONE:
            meter.count(TRANSFERS, "read", "failed", transfer.cause)
            return
        meter.count(TRANSFERS, "read", "ok", "")
        meter.measure(TRANSFER_BYTES, sum(source.nbytes for source in transfer.sources), "read")
        for stage, pieces in (
            ("planned", sum(source.copies for source in transfer.sources)),
            ("submitted", sum(source.merged for source in transfer.sources)),
        ):
            meter.count(COPIES, "read", stage, by=pieces)
        met_s = waited.begun_s if waited.met_s is None else waited.met_s
        for phase, seconds in (
            ("meeting", met_s - waited.begun_s),
            ("queued", transfer.started_s - met_s),
            ("reading", transfer.seconds),
            ("all", transfer.ended_s - waited.begun_s),
        ):
            meter.measure(TRANSFER_SECONDS, seconds, "read", phase)


def _staleness(load: Load, session: Session) -> str:
    """Return why the blocks of a request are not those that an engine has now; or nothing."""
    remote = load.remote
    if remote.incarnation not in {None, session.incarnation}:
        return (
            f"engine {remote.engine_id!r} has restarted: its incarnation is "
            f"{session.incarnation!r}, the request's blocks are of {remote.incarnation!r}"
        )
    if remote.generation and session.generation != remote.generation:
        return (
            f"engine {remote.engine_id!r} has registered other memory since: registration "
            f"{session.generation}, the request's blocks are of {remote.generation}"
        )
    return ""


def _why_not_met(error: KVBridgeError) -> str:
    match error:
        case HandshakeTimeoutError():
            return "timeout"
        case AuthenticationError():
            return "keys"
        case UnknownHostError():
            return "address"
        case TransportError():
            return "transport"
    return "incompatible" if cause_of(error) == "incompatible" else "refused"
