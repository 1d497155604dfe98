"""Bytes into values: the one place where what others sent is decoded.

Messages are msgpack of plain data into typed values. What does not decode, or contradicts
itself, raises a :class:`~kvbridge.errors.HandshakeError`; nothing else ever does.
"""

from typing import Any, NamedTuple, TypeVar

import msgspec

from kvbridge.errors import HandshakeError

# Small data may become large: an empty table is one byte on the wire and 64 in memory.
MESSAGE_MAX_BYTES = 16 << 20
REQUEST_MAX_BYTES = 128 << 10
FACTORS_MAX_BYTES = 128 << 10

T = TypeVar("T")


class WireVersion(NamedTuple):
    """Version of the messages.

    Attributes:
        major: Raised when old peers cannot read new messages any more.
        minor: Raised when messages gain a field that old peers may ignore.
    """

    major: int
    minor: int

    def __str__(self) -> str:
        """Write it as people do."""
        return f"{self.major}.{self.minor}"


WIRE = WireVersion(1, 2)
"""What this side speaks. 1.0 had no factors in requests and no generation in envelopes, 1.1 no
renewals."""


def common_version(theirs: tuple[int, int]) -> WireVersion:
    """Return the version that both sides speak: the lower minor of one major.

    Raises:
        HandshakeError: The majors differ.
    """
    version = WireVersion(*theirs)
    if version.major != WIRE.major or version.minor < 0:
        raise HandshakeError(
            f"the peer speaks wire version {version}, this side {WIRE}; the major versions must "
            "be equal: upgrade the older side"
        )
    return min(version, WIRE)


def encode(message: Any) -> bytes:
    """Encode any message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T], what: str, *, limit: int = MESSAGE_MAX_BYTES) -> T:
    """Decode a message.

    Args:
        data: What came.
        kind: Type of the message.
        what: What it should be, for messages of errors.
        limit: Most bytes that it may have.

    Raises:
        HandshakeError: It is too large, or none.
    """
    if len(data) > limit:
        raise HandshakeError(f"{what} of {len(data)} bytes is larger than the {limit} allowed")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError(
            f"{what} of {len(data)} bytes cannot be read: {error!s:.300}"
        ) from error
