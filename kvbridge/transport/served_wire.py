"""The messages of :mod:`kvbridge.transport.served`, and how they lie in bytes.

Every message of a driver that serves reads starts with one byte that tells notifications of the
user from questions and answers. What follows is msgpack; arrays travel as they lie in memory.

============  =======================================================================
NOTIFICATION  of the user, in either direction
READ          reader to owner: pieces of both sides, and how to reach the reader
DONE          owner to reader, after the bytes: all of it is there
FAILED        owner to reader: why nothing will come, or come any more
PING          to find out whether the other side is gone; it takes no answer
============  =======================================================================

No order of messages is relied on: each READ says all that is needed to serve it.
"""

from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np

from kvbridge.errors import OutOfBoundsError, TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.descriptors import Descriptors

NOTIFICATION, READ, DONE, FAILED, PING = (bytes([kind]) for kind in range(5))

_REASON_MAX_CHARS = 1000


def seal_notification(payload: bytes) -> bytes:
    """Make the message that carries a notification of the user."""
    return NOTIFICATION + payload


def open_notification(message: bytes) -> bytes | None:
    """Return what a message notifies the user of; None if it is a question or an answer."""
    return message[1:] if message[:1] == NOTIFICATION else None


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Decode what a peer sent.

        Raises:
            TransportError: It is garbled.
        """
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError(f"a garbled {cls.__name__} of {len(payload)} bytes") from error


class Introduction(_Message, frozen=True):
    """How to write into a reader: its agent info and its regions, field by field."""

    agent_info: bytes
    regions: tuple[tuple[int, int, str, int], ...]

    @classmethod
    def of(cls, agent_info: bytes, regions: Sequence[Region]) -> Self:
        """Take the regions apart."""
        rows = tuple((r.address, r.nbytes, r.memory_kind, r.device) for r in regions)
        return cls(agent_info, rows)


class Side(_Message, frozen=True):
    """The pieces of one side: little-endian uint64, without their common lengths."""

    address: bytes
    memory_kind: str
    device: int

    @classmethod
    def of(cls, descriptors: Descriptors, part: slice) -> Self:
        """Take a part of the descriptors apart."""
        return cls(raw(descriptors.address[part]), descriptors.memory_kind, descriptors.device)

    def descriptors(self, nbytes: bytes) -> Descriptors:
        """Put them together again.

        Raises:
            OutOfBoundsError: Addresses and lengths do not pair up.
        """
        return Descriptors(_array(self.address), _array(nbytes), self.memory_kind, self.device)


class Read(_Message, frozen=True):
    """A question of at most :data:`~kvbridge.transport.served.PIECES_MAX` pieces.

    Attributes:
        id: Its number at the reader.
        owner: Name of the agent that is meant.
        introduction: Of the reader, encoded; the same bytes as long as nothing has changed.
        nbytes: Lengths of the pieces.
        source: Where the bytes are, at the owner.
        target: Where they go, at the reader.
    """

    id: int
    owner: str
    introduction: bytes
    nbytes: bytes
    source: Side
    target: Side


class Answer(_Message, frozen=True):
    """DONE or FAILED; ``reason`` says why."""

    id: int
    reason: str = ""

    @property
    def message(self) -> bytes:
        """The whole message, with its kind."""
        if not self.reason:
            return DONE + self.encode()
        return FAILED + Answer(self.id, self.reason[:_REASON_MAX_CHARS]).encode()


def raw(array: np.ndarray[Any, np.dtype[np.uint64]]) -> bytes:
    """Return the bytes of an array."""
    return array.astype("<u8", copy=False).tobytes()


def _array(data: bytes) -> np.ndarray[Any, np.dtype[np.uint64]]:
    if len(data) % 8:
        raise OutOfBoundsError(f"{len(data)} bytes are no list of 64-bit numbers")
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
