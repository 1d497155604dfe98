"""What one rank publishes of itself.

It can be read in three steps: an *envelope* that any version can read, named *factors* that are
compared, and a *body* that is looked at only once the factors agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvbridge.errors import HandshakeError
from kvbridge.handshake.wire import FACTORS_MAX_BYTES, WIRE, common_version, decode, encode
from kvbridge.model import Rank, RankCache, Region

_Scalar = bool | int | float | str | None
_Flat = _Scalar | list[_Scalar] | dict[str, _Scalar]
_Deeper = _Scalar | list[_Flat] | dict[str, _Flat]
Fact = _Scalar | list[_Deeper] | dict[str, _Deeper]
"""Plain data that a peer may send as a fact: so deep and no deeper, lest walking it exhaust us."""

Factors = Mapping[str, Any]
"""Named facts of an engine; see :mod:`kvbridge.handshake.compatibility`."""

CHILDREN_MAX = 16

Payload = bytes | Annotated[tuple[bytes | None, ...], msgspec.Meta(max_length=CHILDREN_MAX)]
"""An encoded envelope; of a MultiConnector one for each child, None where a child has none."""


@dataclass(frozen=True, slots=True)
class HandshakeMetadata:
    """What one rank publishes.

    Attributes:
        engine_id: The engine, one id for all its ranks.
        incarnation: Fresh at every start of the engine.
        pp_rank: Pipeline stage.
        tp_rank: Tensor-parallel rank.
        payload: Opaque to whoever carries it; see :func:`seal`.
    """

    engine_id: str
    incarnation: str
    pp_rank: int
    tp_rank: int
    payload: Payload

    @property
    def rank(self) -> Rank:
        """Coordinate of the rank."""
        return (self.pp_rank, self.tp_rank)


class RankPayload(msgspec.Struct, frozen=True):
    """The body: all that a peer needs to plan with a rank and to reach it.

    Attributes:
        cache: What the rank holds.
        agent_info: What its transport's peers need.
        leases: Where its table of leases is, to be read by others; None where it has none.
        gives: Whether it writes what other ranks ask for.
        digests: Whether it can say what its blocks hold, see
            :class:`~kvbridge.handshake.DigestRequest`.
        staging: Memory that others may write parts to that it puts in their places; None for none.
        packs_nbytes: The longest part that it packs for others; 0 if it packs nothing.
    """

    cache: RankCache
    agent_info: bytes
    leases: Region | None = None
    gives: bool = False
    digests: bool = False
    staging: Region | None = None
    packs_nbytes: int = 0


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is around the factors and the body; it decodes whatever they are.

    Attributes:
        wire: Version that the rank speaks.
        factors: Named facts, not decoded yet.
        body: An encoded :class:`RankPayload`.
        engine_id: The rank's engine.
        incarnation: Fresh at every start of the engine.
        generation: Rises whenever the rank registers its memory anew; 0 where that is unknown.
    """

    wire: tuple[int, int]
    factors: msgspec.Raw
    body: bytes
    engine_id: str = ""
    incarnation: str = ""
    generation: int = 0


def seal(
    factors: Factors,
    body: RankPayload,
    *,
    engine_id: str = "",
    incarnation: str = "",
    generation: int = 0,
) -> bytes:
    """Wrap a rank's body in an envelope with its factors."""
    raw = msgspec.Raw(encode(dict(factors)))
    return encode(Envelope(WIRE, raw, encode(body), engine_id, incarnation, generation))


def open_envelope(payload: Payload) -> Envelope:
    """Return the envelope of a payload.

    Raises:
        HandshakeError: It cannot be read, or is of another major version.
    """
    if not isinstance(payload, bytes):
        raise HandshakeError(
            f"the rank publishes {len(payload)} payloads, one for each child of a MultiConnector; "
            "use a MultiConnector here too, or one connector there"
        )
    envelope = decode(payload, Envelope, "envelope")
    common_version(envelope.wire)
    return envelope


def decode_factors(payload: Payload) -> dict[str, Any]:
    """Return the named factors of a payload without looking at its body.

    Raises:
        HandshakeError: Envelope or factors cannot be read, or it is of another major version.
    """
    raw = bytes(open_envelope(payload).factors)
    return decode(raw, dict[str, Fact], "factors", limit=FACTORS_MAX_BYTES)


def decode_body(payload: Payload) -> RankPayload:
    """Return the body of a payload; compare the factors first.

    Raises:
        HandshakeError: The body cannot be read, or describes an impossible cache.
    """
    return decode(open_envelope(payload).body, RankPayload, "rank description")
