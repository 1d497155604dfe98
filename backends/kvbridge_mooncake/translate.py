"""What Mooncake's numbers mean here: the one table."""

from kvbridge.errors import (
    KVBridgeError,
    OutOfBoundsError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)

# Status of one operation. Once it is one of the two that end it, its id must not be used again:
# it is a pointer to memory that is free by then.
DONE, FAILED = 1, -1

_MEANINGS: dict[int, tuple[type[KVBridgeError], str]] = {
    -1: (TransportError, "it failed, and that is all it says"),
    -2: (TransportError, "too many requests"),
    -3: (OutOfBoundsError, "the address is not registered"),
    -4: (TransportError, "the batch is busy"),
    -6: (TransportUnavailableError, "the device does not exist"),
    -7: (OutOfBoundsError, "the memory overlaps what is registered"),
    -101: (PeerLostError, "the peer's host name cannot be resolved"),
    -102: (PeerLostError, "the peer cannot be connected to"),
    -103: (PeerLostError, "the peer's answer is malformed"),
    -104: (PeerLostError, "the peer refuses"),
    -200: (TransportError, "its metadata is wrong"),
    -201: (TransportError, "its endpoint is wrong"),
    -202: (TransportError, "its context is wrong"),
    -300: (TransportUnavailableError, "NUMA does not work"),
    -301: (TransportUnavailableError, "the clock does not work"),
    -302: (TransportError, "out of memory"),
    -303: (TransportError, "not implemented"),
}


def translate(code: int, doing: str) -> KVBridgeError:
    """Make our error out of their number.

    Args:
        code: What the library returned, other than success.
        doing: What failed, for the message.
    """
    kind, words = _MEANINGS.get(code, (TransportError, "unknown"))
    return kind(f"{doing}: Mooncake says {code} ({words})")
