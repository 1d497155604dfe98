"""Counts what becomes of the loads of one rank."""

import logging
from collections.abc import Iterable

from kvbridge.connector.loading import Reading, Waiting
from kvbridge.connector.series import (
    COPIES,
    DIRECTIONS,
    HANDSHAKE_SECONDS,
    HANDSHAKES,
    NOTICES_LOST,
    PAYLOAD_CHECKS,
    PENDING,
    PHASES,
    QUEUED,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFERS,
    outcome_of,
)
from kvbridge.connector.stats import Key, Meter
from kvbridge.errors import (
    AuthenticationError,
    HandshakeTimeoutError,
    KVBridgeError,
    TransportError,
    UnknownHostError,
)
from kvbridge.session import Cause, CheckMode, Introduction, Transfer, cause_of
from kvbridge.transport import State

_log = logging.getLogger(__name__)


class Tally:
    """Counts for all loads alike, each step in a load's life once."""

    def __init__(self, meter: Meter, check: CheckMode | None) -> None:
        """Count nothing yet.

        Args:
            meter: Where it is counted.
            check: How what has come is compared with what is there; None if it is not.
        """
        self._meter, self._check = meter, check
        self._unchecked: set[str] = set()  # engines of which that was said

    def met(self, introduction: Introduction, now_s: float) -> None:
        """Count that an engine has been met, or could not be."""
        if introduction.error is None:
            self._meter.count(HANDSHAKES, "ok", "")
            self._meter.measure(HANDSHAKE_SECONDS, now_s - introduction.started_s)
        else:
            self._meter.count(HANDSHAKES, "failed", _why_not_met(introduction.error))

    def queued(self, waiting: Waiting) -> None:
        """Count a load that has found no place."""
        self._meter.count(QUEUED, waiting.direction)

    def failed(self, waiting: Waiting, cause: Cause) -> None:
        """Count a load that has failed before anything moved."""
        if waiting.load.is_empty:
            self._meter.count(NOTICES_LOST, cause)
        else:
            self._meter.count(TRANSFERS, waiting.direction, outcome_of(cause), cause)

    def ended(self, reading: Reading) -> None:
        """Count how a load has ended that had begun to read."""
        waited, transfer, meter = reading.waited, reading.transfer, self._meter
        direction = waited.direction
        self._checked(transfer)
        if transfer.state is not State.DONE:
            meter.count(TRANSFERS, direction, outcome_of(transfer.cause), transfer.cause)
            return
        meter.count(TRANSFERS, direction, "ok", "")
        meter.measure(TRANSFER_BYTES, sum(source.nbytes for source in transfer.sources), direction)
        for stage, pieces in (
            ("planned", sum(source.copies for source in transfer.sources)),
            ("submitted", sum(source.merged for source in transfer.sources)),
        ):
            meter.count(COPIES, direction, stage, by=pieces)
        met_s = waited.begun_s if waited.met_s is None else waited.met_s
        arranging_s = transfer.arranging_s
        for phase, seconds in (
            ("meeting", met_s - waited.begun_s),
            ("queued", transfer.started_s - met_s),
            ("reading", transfer.seconds - (arranging_s or 0.0)),
            ("arranging", arranging_s),
            ("all", transfer.ended_s - waited.begun_s),
        ):
            if seconds is not None:
                meter.measure(TRANSFER_SECONDS, seconds, direction, phase)

    def _checked(self, transfer: Transfer) -> None:
        checked, engine_id = transfer.checked, transfer.session.engine_id
        if checked is None:
            return
        self._meter.count(PAYLOAD_CHECKS, checked.outcome, checked.reason)
        if checked.outcome == "skipped" and engine_id not in self._unchecked:
            self._unchecked.add(engine_id)
            _log.warning(
                "request %s is not checked, though payload_check is %r: %s (said once of each "
                "engine)",
                transfer.request_id,
                self._check,
                checked.words,
            )


def count_pending(waiting: Iterable[Waiting], reading: Iterable[Reading]) -> dict[Key, float]:
    """Return how many loads are how far, for :class:`~kvbridge.connector.stats.Meter`."""
    counts: dict[Key, float] = {
        (PENDING.name, direction, phase): 0 for direction in DIRECTIONS for phase in PHASES
    }
    for each in waiting:
        counts[PENDING.name, each.direction, "queued" if each.is_queued else "meeting"] += 1
    for started in reading:
        phase = "arranging" if started.transfer.is_arranging else "reading"
        counts[PENDING.name, started.waited.direction, phase] += not started.has_ended
    return counts


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
