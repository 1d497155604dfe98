"""What two agents say to each other on our own connection, as bytes."""

import hmac
import struct
from collections.abc import Iterator
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from kvbridge.errors import TransportError
from kvbridge.transport import Card

PROTOCOL_VERSION = 1
NOTIFY_MAX_BYTES = 64 << 10
TOKEN_BYTES = 32

# The kinds of messages. A connection carries hellos both ways; then notifications and questions
# from who opened it, and answers to the questions back.
HELLO, NOTIFICATION, ARE_YOU_QUIET, QUIET = b"h", b"n", b"q", b"a"

_HEADER = struct.Struct("<Ic")

_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Port = Annotated[int, Meta(ge=1, le=65535)]


class AgentCard(Card, frozen=True):
    """What an agent publishes.

    Attributes:
        version: Of all that is in this file.
        agent: Its name, new at each start.
        token: What a caller has to know to be let in.
        address: IPv4 address of its host.
        control_port: Where it accepts our connections.
        engine_port: Where Mooncake accepts questions; it makes the engine's name.
        beacon: Address of the registered memory that holds its name.
    """

    version: int
    agent: _Name
    token: _Token
    address: Annotated[str, Meta(pattern=r"^\d{1,3}(\.\d{1,3}){3}$")]
    control_port: _Port
    engine_port: _Port
    beacon: Annotated[int, Meta(gt=0)]

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        card = super().decode(payload)
        if card.version != PROTOCOL_VERSION:
            raise TransportError(
                f"peer {card.agent} speaks version {card.version} of transport 'mooncake', "
                f"this side {PROTOCOL_VERSION}; run the same KVBridge version on both sides"
            )
        return card


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """First message each way: who speaks, and that it is meant."""

    version: int
    agent: _Name
    token: _Token


def encode(kind: bytes, body: bytes) -> bytes:
    """Return one message."""
    return _HEADER.pack(len(body), kind) + body


def encode_hello(agent: str, token: bytes) -> bytes:
    """Return the message that opens a connection, or answers it."""
    return encode(HELLO, msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, agent, token)))


def decode_hello(kind: bytes, body: bytes, token: bytes) -> str:
    """Return the name of the agent that said hello.

    Raises:
        TransportError: This is no hello, or it is not meant for this agent.
    """
    if kind != HELLO:
        raise TransportError(f"the first message is {kind!r} and no hello")
    try:
        hello = msgspec.msgpack.decode(body, type=Hello)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the hello is garbled: {error}") from error
    if hello.version != PROTOCOL_VERSION or not hmac.compare_digest(hello.token, token):
        raise TransportError(f"the hello of {hello.agent} has another version or token")
    return hello.agent


def take_messages(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take the messages that are complete out of a buffer: kind and body of each.

    Raises:
        TransportError: A message is larger than any can be.
    """
    at = 0
    try:
        while len(buffer) - at >= _HEADER.size:
            nbytes, kind = _HEADER.unpack_from(buffer, at)
            if nbytes > NOTIFY_MAX_BYTES:
                raise TransportError(f"a message of {nbytes} bytes, at most {NOTIFY_MAX_BYTES}")
            body = at + _HEADER.size
            if len(buffer) < body + nbytes:
                return
            at = body + nbytes
            yield kind, bytes(memoryview(buffer)[body:at])
    finally:
        del buffer[:at]
