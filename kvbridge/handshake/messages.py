"""Everything that crosses the wire, and the one place where it is decoded.

Messages are msgpack of plain data into typed values. What does not decode, or contradicts
itself, raises a :class:`~kvbridge.errors.HandshakeError`; nothing else ever does.

A rank's metadata travels in two steps: an *envelope* and named *factors* that any version can
read, around a *body* that is looked at only once the factors agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvbridge.errors import HandshakeError
from kvbridge.model import Rank, RankCache

WIRE_MAJOR = 1
"""Raised when old peers cannot read new messages any more."""
WIRE_MINOR = 0
"""Raised when messages gain a field that old peers may ignore."""
MESSAGE_MAX_BYTES = 64 << 20

Factors = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HandshakeMetadata:
    """What one rank publishes.

    Attributes:
        engine_id: The engine, one id for all its ranks.
        incarnation: Fresh at every start of the engine.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank.
        payload: Opaque to whoever carries it; see :func:`encode_payload`.
    """

    engine_id: str
    incarnation: str
    pp_rank: int
    tp_rank: int
    payload: bytes

    @property
    def rank(self) -> Rank:
        """Coordinate of the rank."""
        return (self.pp_rank, self.tp_rank)


class RankPayload(msgspec.Struct, frozen=True):
    """The body: all that a peer needs to plan with a rank and to reach it.

    Attributes:
        cache: What the rank holds.
        agent_info: What its transport's peers need.
    """

    cache: RankCache
    agent_info: bytes


class _Envelope(msgspec.Struct, frozen=True):
    wire: tuple[int, int]
    factors: dict[str, Any]
    body: bytes


class MetadataRequest(msgspec.Struct, frozen=True, tag="metadata?"):
    """Asks an engine for the metadata of its ranks.

    Attributes:
        wire: Version that the asker speaks.
        engine_id: Engine that the asker expects behind the address, or None for whichever.
    """

    wire: tuple[int, int] = (WIRE_MAJOR, WIRE_MINOR)
    engine_id: str | None = None


class MetadataReply(msgspec.Struct, frozen=True, tag="metadata"):
    """Answers with every rank.

    Attributes:
        generation: Rises whenever the engine publishes anew.
        ranks: Metadata of every rank.
    """

    generation: int
    ranks: tuple[HandshakeMetadata, ...]

    @property
    def by_rank(self) -> dict[Rank, HandshakeMetadata]:
        """The metadata of each rank, by its coordinate."""
        return {data.rank: data for data in self.ranks}


class RefusalReply(msgspec.Struct, frozen=True, tag="refusal"):
    """Answers that the request cannot be served.

    Attributes:
        reason: Why, in words.
        not_yet: Whether the same request may be served a little later.
    """

    reason: str
    not_yet: bool = False


Reply = MetadataReply | RefusalReply


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Tells a producer rank that one reader needs a request's blocks no more.

    Attributes:
        request_id: The request, by the producer's name for it.
        engine_id: The reader's engine.
        incarnation: That engine's incarnation.
        rank: The reader.
        readers: How many distinct readers of that engine will report to this producer rank.
        ok: Whether the reader has what it needs.
    """

    request_id: str
    engine_id: str
    incarnation: str
    rank: Rank
    readers: int
    ok: bool = True


MessageT = TypeVar("MessageT")


def encode(message: Any) -> bytes:
    """Encode any message of this module."""
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: Any, what: str) -> Any:
    if len(data) > MESSAGE_MAX_BYTES:
        raise HandshakeError(
            f"{what} of {len(data)} bytes is larger than the {MESSAGE_MAX_BYTES} allowed"
        )
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError(f"{what} of {len(data)} bytes cannot be read: {error}") from error


def decode_request(data: bytes) -> MetadataRequest:
    """Decode what a peer asks.

    Raises:
        HandshakeError: It is no request.
    """
    request: MetadataRequest = _decode(data, MetadataRequest, "request")
    return request


def decode_reply(data: bytes) -> MetadataReply | None:
    """Decode a peer's answer; None means that it has nothing to say yet.

    Raises:
        HandshakeError: It is no answer, or the peer refused; the message says why.
    """
    reply: Reply = _decode(data, Reply, "reply")
    if isinstance(reply, MetadataReply):
        return reply
    if reply.not_yet:
        return None
    raise HandshakeError(f"the peer refused: {reply.reason}")


def decode_release(data: bytes) -> Release:
    """Decode a reader's release.

    Raises:
        HandshakeError: It is none.
    """
    release: Release = _decode(data, Release, "release")
    if release.readers < 1:
        raise HandshakeError(f"release of {release.request_id!r} expects {release.readers} readers")
    return release


def encode_payload(factors: Factors, payload: RankPayload) -> bytes:
    """Wrap a rank's body in an envelope with its factors."""
    return encode(_Envelope((WIRE_MAJOR, WIRE_MINOR), dict(factors), encode(payload)))


def decode_factors(payload: bytes) -> dict[str, Any]:
    """Return the named factors of a payload without looking at its body.

    Raises:
        HandshakeError: The envelope cannot be read, or is of another major version.
    """
    return _envelope(payload).factors


def decode_body(payload: bytes) -> RankPayload:
    """Return the body of a payload; compare the factors first.

    Raises:
        HandshakeError: The body cannot be read, or describes an impossible cache.
    """
    body: RankPayload = _decode(_envelope(payload).body, RankPayload, "rank description")
    return body


def _envelope(payload: bytes) -> _Envelope:
    envelope: _Envelope = _decode(payload, _Envelope, "envelope")
    if envelope.wire[0] != WIRE_MAJOR:
        raise HandshakeError(
            f"the peer speaks wire version {envelope.wire[0]}.{envelope.wire[1]}, this side "
            f"{WIRE_MAJOR}.{WIRE_MINOR}; the major versions must be equal: upgrade the older side"
        )
    return envelope
