"""How two engines learn of each other: metadata, compatibility, side channel."""

from kvbridge.handshake.address import EngineAddress, Networks
from kvbridge.handshake.base import PPAwareHandshake, gather_handshake_metadata, hand_over
from kvbridge.handshake.compatibility import (
    Difference,
    check_compatible,
    compare,
    engine_factors,
    factors_of,
)
from kvbridge.handshake.dialer import Dialer, fetch_metadata
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.handshake.discovery import EngineRecord, Registry, open_registry
from kvbridge.handshake.messages import (
    Blocks,
    Given,
    MetadataReply,
    Packed,
    Release,
    RenewalReply,
    RenewalRequest,
    Want,
    Withdrawal,
)
from kvbridge.handshake.metadata import HandshakeMetadata, RankPayload
from kvbridge.handshake.reader_note import ReaderNote
from kvbridge.handshake.security import Keys, SecurityConfig, keys_of_secret, load_keys
from kvbridge.handshake.server import HandshakeServer

__all__ = [
    "Blocks",
    "Dialer",
    "Difference",
    "DigestRequest",
    "Digests",
    "EngineAddress",
    "EngineRecord",
    "Given",
    "HandshakeMetadata",
    "HandshakeServer",
    "Keys",
    "MetadataReply",
    "Networks",
    "PPAwareHandshake",
    "Packed",
    "RankPayload",
    "ReaderNote",
    "Registry",
    "Release",
    "RenewalReply",
    "RenewalRequest",
    "SecurityConfig",
    "Want",
    "Withdrawal",
    "check_compatible",
    "compare",
    "engine_factors",
    "factors_of",
    "fetch_metadata",
    "gather_handshake_metadata",
    "hand_over",
    "keys_of_secret",
    "load_keys",
    "open_registry",
]
