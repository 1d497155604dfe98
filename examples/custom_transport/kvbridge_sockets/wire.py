"""What goes over a connection: messages, each with its length before it, and the bytes themselves.

    read:   request, answer, bytes from the owner
    write:  request, answer, bytes to the owner, answer
    notify: request

Whoever has the last answer knows that the other side is through with the memory.
"""

import ctypes
import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvbridge.errors import TransportError
from kvbridge.transport import Descriptors

VERSION = 1
NOTIFY_MAX_BYTES = 64 << 10
DESCRIPTORS_MAX = 1 << 20
MESSAGE_MAX_BYTES = 16 * DESCRIPTORS_MAX + NOTIFY_MAX_BYTES + 1024

_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What travels; msgspec refuses everything that is not of these types."""


class Info(Message, frozen=True):
    """What a peer needs to reach an agent, and to know that it is the one."""

    version: int
    agent: _Name
    host: str
    port: Annotated[int, Meta(ge=1, le=65_535)]
    token: bytes


class Hello(Message, frozen=True):
    """First message each way."""

    agent: _Name
    token: bytes


class Request(Message, frozen=True):
    """An operation on the owner's pieces (arrays of little-endian uint64), or a notification."""

    op: Literal["read", "write", "notify"]
    address: bytes = b""
    nbytes: bytes = b""
    payload: Annotated[bytes, Meta(max_length=NOTIFY_MAX_BYTES)] = b""


class Answer(Message, frozen=True):
    """Why the owner refuses, or nothing."""

    refused: str = ""


MessageT = TypeVar("MessageT", bound=Message)


def send(sock: socket.socket, message: Message) -> None:
    """Send a message, its length first."""
    body = msgspec.msgpack.encode(message)
    sock.sendall(struct.pack("<I", len(body)) + body)


def receive(sock: socket.socket, kind: type[MessageT]) -> MessageT:
    """Receive a message.

    Raises:
        TransportError: It is not of that kind.
        EOFError: The other side has hung up.
    """
    (nbytes,) = struct.unpack("<I", receive_exactly(sock, bytearray(4)))
    if nbytes > MESSAGE_MAX_BYTES:
        raise TransportError(f"a message of {nbytes} bytes, at most {MESSAGE_MAX_BYTES} may come")
    try:
        return msgspec.msgpack.decode(receive_exactly(sock, bytearray(nbytes)), type=kind)
    except msgspec.MsgspecError as error:
        raise TransportError(f"a message is no {kind.__name__}: {error}") from error


def receive_exactly(sock: socket.socket, buffer: bytearray) -> bytearray:
    """Fill a buffer."""
    fill(sock, memoryview(buffer))
    return buffer


def send_pieces(sock: socket.socket, pieces: Descriptors) -> None:
    """Send the bytes of pieces, straight from where they are."""
    for view in views(pieces):
        sock.sendall(view)


def receive_pieces(sock: socket.socket, pieces: Descriptors) -> None:
    """Receive the bytes of pieces, straight to where they belong."""
    for view in views(pieces):
        fill(sock, view)


def fill(sock: socket.socket, view: memoryview) -> None:
    """Receive as many bytes as there is room for.

    Raises:
        EOFError: The other side has hung up before that.
    """
    while view:
        received = sock.recv_into(view)
        if not received:
            raise EOFError("it has hung up")
        view = view[received:]


def views(pieces: Descriptors) -> Iterator[memoryview]:
    """Return the memory under each piece that is not empty."""
    for address, nbytes in zip(pieces.address.tolist(), pieces.nbytes.tolist(), strict=True):
        if nbytes:
            yield memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
