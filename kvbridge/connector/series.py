"""Everything that connectors count, by the names that operators chart."""

from dataclasses import dataclass
from typing import Literal

from kvbridge.session import CAUSES, Cause

OWN = ("connector", "transport")
"""Whose it is: the name tells two connectors over one transport apart."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BYTES = tuple(float(4**power) for power in range(7, 18))  # 16 KiB to 16 GiB


@dataclass(frozen=True, slots=True)
class Series:
    """What is counted under one name.

    Attributes:
        name: Its name, as Prometheus has it.
        kind: Whether it only grows, is as it is now, or counts by size.
        meaning: What is counted.
        labels: Names of its labels.
        rows: Values of the labels after the connector's own; all are there from the start, at 0.
        bounds: Upper bounds of the sizes.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = OWN
    rows: tuple[tuple[str, ...], ...] = ((),)
    bounds: tuple[float, ...] = ()


MOVES = (*OWN, "direction")
DIRECTIONS = ("read", "write")
"""Whether the engine that loads has read, or the other one has written."""
_COUNTED = tuple(cause for cause in CAUSES if cause != "fault")  # which never gets to us
PHASES = ("meeting", "queued", "reading", "arranging")


def outcome_of(cause: Cause) -> str:
    """Return what a load that did not succeed counts as: to be unwanted is no failure."""
    return "aborted" if cause == "aborted" else "failed"


HANDSHAKES = Series(
    "kvbridge_handshakes_total",
    "counter",
    "Attempts of a rank to meet another engine",
    (*OWN, "outcome", "reason"),
    (
        ("ok", ""),
        *(
            ("failed", reason)
            for reason in ("timeout", "keys", "address", "incompatible", "transport", "refused")
        ),
    ),
)
HANDSHAKE_SECONDS = Series(
    "kvbridge_handshake_seconds",
    "histogram",
    "Time that it took to meet an engine, where that succeeded",
    bounds=SECONDS,
)
TRANSFERS = Series(
    "kvbridge_transfers_total",
    "counter",
    "Loads of requests that have ended on a rank",
    (*MOVES, "outcome", "reason"),
    tuple(
        (direction, *outcome)
        for direction in DIRECTIONS
        for outcome in (("ok", ""), *((outcome_of(cause), cause) for cause in _COUNTED))
    ),
)
TRANSFER_BYTES = Series(
    "kvbridge_transfer_bytes",
    "histogram",
    "Bytes of a load that succeeded",
    MOVES,
    tuple((direction,) for direction in DIRECTIONS),
    BYTES,
)
COPIES = Series(
    "kvbridge_transfer_copies_total",
    "counter",
    "Pieces of loads that succeeded, as planned and as merged neighbours were submitted",
    (*MOVES, "stage"),
    tuple((each, stage) for each in DIRECTIONS for stage in ("planned", "submitted")),
)
TRANSFER_SECONDS = Series(
    "kvbridge_transfer_seconds",
    "histogram",
    "Time of a load that succeeded, by what it was spent on; phase all is the whole of it",
    (*MOVES, "phase"),
    tuple((each, phase) for each in DIRECTIONS for phase in (*PHASES, "all")),
    SECONDS,
)
PENDING = Series(
    "kvbridge_transfers_pending",
    "gauge",
    "Loads that have not ended, by what they wait for",
    (*MOVES, "phase"),
    tuple((each, phase) for each in DIRECTIONS for phase in PHASES),
)
QUEUED = Series(
    "kvbridge_transfers_queued_total",
    "counter",
    "Loads that had to wait because as many as may (reads_max) were reading",
    MOVES,
    tuple((direction,) for direction in DIRECTIONS),
)
PUSHES = Series(
    "kvbridge_pushes_total",
    "counter",
    "Requests' blocks that ranks of other engines asked this one to write",
    (*OWN, "outcome", "reason"),
    (("ok", ""), *(("failed", cause) for cause in _COUNTED)),
)
PAYLOAD_CHECKS = Series(
    "kvbridge_payload_checks_total",
    "counter",
    "Loads that were compared with what the other engine holds, or were to be",
    (*OWN, "outcome", "reason"),
    (
        ("ok", ""),
        *(("failed", cause) for cause in _COUNTED),
        ("skipped", "unsupported"),
        ("skipped", "unanswered"),
    ),
)
QUARANTINED = Series(
    "kvbridge_quarantined_operations",
    "gauge",
    "Operations that were given up and may still write",
)
STAGING = Series(
    "kvbridge_staging_bytes",
    "gauge",
    "Staging memory that pages are read into or put in their places from; at most staging_nbytes",
)
NOTICES_LOST = Series(
    "kvbridge_notices_lost_total",
    "counter",
    "Notices that could not be sent, so that the other engine keeps blocks until its lease is over",
    (*OWN, "reason"),
    tuple((cause,) for cause in _COUNTED),
)
NOTICES_IGNORED = Series(
    "kvbridge_notices_ignored_total",
    "counter",
    "Notices of readers that changed nothing",
    (*OWN, "reason"),
    (
        ("duplicate",),
        ("late",),
        ("unknown",),
        ("unreadable",),
        ("unasked",),
        ("stranger",),
        ("too_many",),
    ),
)
LEASES_EXPIRED = Series(
    "kvbridge_leases_expired_total",
    "counter",
    "Requests that a rank kept to the end of their lease, since not every reader reported",
)
LEASES_HELD = Series(
    "kvbridge_leases_held",
    "gauge",
    "Requests whose blocks an engine keeps for readers",
)
OFFERS = Series(
    "kvbridge_offers_total",
    "counter",
    "Finished requests that other engines wanted, and whether they were offered",
    (*OWN, "outcome", "reason"),
    (
        ("made", ""),
        *(
            ("declined", reason)
            for reason in ("leases_max", "draining", "blocks", "duplicate", "role", "cache")
        ),
    ),
)
RENEWALS = Series(
    "kvbridge_renewals_total",
    "counter",
    "Requests that another engine was asked to keep; failed are questions without an answer",
    (*OWN, "outcome"),
    (("kept",), ("refused",), ("failed",)),
)
PARAMS_REFUSED = Series(
    "kvbridge_params_refused_total",
    "counter",
    "Requests that were to be loaded, and whose params are of no use to the connector",
    (*OWN, "reason"),
    (("malformed",), ("unmatched",), ("role",)),
)
FAILOVERS = Series(
    "kvbridge_failovers_total",
    "counter",
    "Loads that went on over another connector, by rank",
    ("from", "to"),
    (),
)
CHILD_ERRORS = Series(
    "kvbridge_connector_errors_total",
    "counter",
    "Hooks of a connector among several that raised",
    ("connector",),
    (),
)
CHILD_REPORTS_IGNORED = Series(
    "kvbridge_connector_reports_ignored_total",
    "counter",
    "Reports of a connector among several on requests that it had nothing to do with any more",
    (),
    (),
)

WORKER = (
    HANDSHAKES,
    HANDSHAKE_SECONDS,
    TRANSFERS,
    TRANSFER_BYTES,
    COPIES,
    TRANSFER_SECONDS,
    QUEUED,
    PAYLOAD_CHECKS,
    PUSHES,
    NOTICES_LOST,
    LEASES_EXPIRED,
)
"""What a worker half counts itself."""
SCHEDULER = (OFFERS, PARAMS_REFUSED)
"""What a scheduler half counts itself."""
SERIES: dict[str, Series] = {
    each.name: each
    for each in (
        *WORKER,
        PENDING,
        QUARANTINED,
        STAGING,
        NOTICES_IGNORED,
        *SCHEDULER,
        LEASES_HELD,
        RENEWALS,
        FAILOVERS,
        CHILD_ERRORS,
        CHILD_REPORTS_IGNORED,
    )
}
"""All there is, by name."""
