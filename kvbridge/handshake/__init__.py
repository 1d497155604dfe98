"""How two engines learn of each other: metadata, compatibility, side channel."""

from kvbridge.handshake.base import PPAwareHandshake, gather_handshake_metadata
from kvbridge.handshake.channel import HandshakeServer, fetch_metadata
from kvbridge.handshake.compatibility import check_compatible, factors_of
from kvbridge.handshake.messages import HandshakeMetadata, MetadataReply, RankPayload, Release

__all__ = [
    "HandshakeMetadata",
    "HandshakeServer",
    "MetadataReply",
    "PPAwareHandshake",
    "RankPayload",
    "Release",
    "check_compatible",
    "factors_of",
    "fetch_metadata",
    "gather_handshake_metadata",
]
