"""UCX's status codes, and what each means here."""

from kvbridge.errors import KVBridgeError, NotSupportedError, PeerLostError, TransportError

OK, IN_PROGRESS, BUSY = 0, 1, -15

# ``ucs_status_t``; what is not listed is a TransportError.
MEANING: dict[int, type[KVBridgeError]] = {
    -6: PeerLostError,  # UNREACHABLE
    -8: NotSupportedError,  # NOT_IMPLEMENTED
    -20: PeerLostError,  # TIMED_OUT
    -22: NotSupportedError,  # UNSUPPORTED
    -23: PeerLostError,  # REJECTED
    -24: PeerLostError,  # NOT_CONNECTED
    -25: PeerLostError,  # CONNECTION_RESET
    -80: PeerLostError,  # ENDPOINT_TIMEOUT
}


class UcxError(Exception):
    """UCX refused a call.

    Attributes:
        status: Its ``ucs_status_t``.
    """

    def __init__(self, status: int, text: str, call: str) -> None:
        """Keep the status beside UCX's own text for it."""
        super().__init__(f"{call}: UCX says {text!r} ({status})")
        self.status = status


def translate(error: UcxError, doing: str) -> KVBridgeError:
    """Make our error out of theirs.

    Args:
        error: What UCX said.
        doing: What failed, for the message.
    """
    return MEANING.get(error.status, TransportError)(f"{doing}: {error}")
