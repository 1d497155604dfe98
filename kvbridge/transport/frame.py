"""The frame around a vendor's connection blob.

Vendor libraries do not survive garbled metadata: one flipped bit aborts the process in one of
them, and poisons the peer's name for good in another. So a blob travels in a frame of ours and
is handed on only when its length, transport, version and digest are right.
"""

import hashlib

import msgspec

from kvbridge.errors import TransportError

FRAME_VERSION = 1
FRAME_MAX_BYTES = 16 << 20
_DIGEST_BYTES = 16


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    transport: str
    digest: bytes
    payload: bytes


def _digest(version: int, transport: str, payload: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    state.update(f"{version}:{len(transport)}:{transport}:{len(payload)}:".encode())
    state.update(payload)
    return state.digest()


def seal_agent_info(transport: str, payload: bytes) -> bytes:
    """Wrap what a peer needs to reach an agent.

    Args:
        transport: Name of the transport that will be able to read the payload.
        payload: The driver's own bytes.
    """
    return msgspec.msgpack.encode(
        _Frame(FRAME_VERSION, transport, _digest(FRAME_VERSION, transport, payload), payload)
    )


def open_agent_info(transport: str, framed: bytes) -> bytes:
    """Return the payload of a frame, once everything about it has been checked.

    Raises:
        TransportError: The frame is no bytes, too large, garbled, truncated, of another version,
            or was made by another transport.
    """
    if not isinstance(framed, bytes | bytearray | memoryview):
        raise TransportError(
            f"agent info must be the bytes that the peer's agent_info() returned, got {framed!r}"
        )
    if len(framed) > FRAME_MAX_BYTES:
        raise TransportError(
            f"agent info of {len(framed)} bytes is larger than the {FRAME_MAX_BYTES} allowed"
        )
    try:
        frame = msgspec.msgpack.decode(framed, type=_Frame)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"agent info of {len(framed)} bytes for transport {transport!r} is garbled ({error}); "
            "fetch it from the peer again"
        ) from error
    if frame.version != FRAME_VERSION:
        raise TransportError(
            f"agent info has frame version {frame.version}, this side reads {FRAME_VERSION}; "
            "run the same KVBridge version on both sides"
        )
    if frame.transport != transport:
        raise TransportError(
            f"agent info was made by transport {frame.transport!r}, this side uses {transport!r}; "
            "configure the same transport on both sides"
        )
    if frame.digest != _digest(frame.version, frame.transport, frame.payload):
        raise TransportError(
            f"agent info of {len(framed)} bytes for transport {transport!r} fails its digest; "
            "fetch it from the peer again"
        )
    return frame.payload
