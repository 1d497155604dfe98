"""Why a request's bytes did not come, in a word that a program can act on."""

from typing import Literal, get_args

from kvbridge.errors import (
    BlockTableError,
    ConfigError,
    IncompatibleError,
    KVBridgeError,
    NotSupportedError,
    PlanError,
    UnsupportedLayoutError,
)

Cause = Literal[
    "",
    "handshake",
    "incompatible",
    "stale",
    "refused",
    "transport",
    "lease",
    "corrupt",
    "deadline",
    "aborted",
    "fault",
    "shutdown",
]
"""What a failure came from; empty where nothing has failed.

- ``handshake``: the other engine could not be met.
- ``incompatible``: it was met, and does not fit.
- ``stale``: the blocks are of an earlier start of it, or of an earlier registration of its memory.
- ``refused``: what was asked for cannot be, such as blocks that do not hold the tokens.
- ``transport``: a read has failed.
- ``lease``: the blocks were not kept until they were read.
- ``corrupt``: what has come is not what the other engine holds; only a payload check finds that.
- ``deadline``: there was not enough time.
- ``aborted``: nobody wants them any more.
- ``fault``: a connector's own code has raised.
- ``shutdown``: the reader was shut down; nobody is told, so this one is only counted.
"""

CAUSES: tuple[Cause, ...] = tuple(cause for cause in get_args(Cause) if cause)


def cause_of(error: KVBridgeError) -> Cause:
    """Return why an engine could not be met, or a read not begin, by the kind of the error."""
    match error:
        case IncompatibleError() | PlanError() | UnsupportedLayoutError():
            return "incompatible"
        case BlockTableError() | ConfigError() | NotSupportedError():
            return "refused"
    return "handshake"


def cause_told(word: str, *, otherwise: Cause) -> Cause:
    """Return why a rank of another engine has refused something, from what it says itself."""
    told = (cause for cause in CAUSES if cause not in {"aborted", "fault", "shutdown"})
    return next((cause for cause in told if cause == word), otherwise)
