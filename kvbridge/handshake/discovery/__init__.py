"""Finding engines: who is there, and at which address its handshake is served."""

from kvbridge.handshake.discovery.base import EngineRecord, Registry
from kvbridge.handshake.discovery.choice import RegistryChoice, open_registry
from kvbridge.handshake.discovery.etcd import EtcdOptions
from kvbridge.handshake.discovery.options import ServerOptions
from kvbridge.handshake.discovery.redis import RedisOptions
from kvbridge.handshake.discovery.static import StaticOptions

__all__ = [
    "EngineRecord",
    "EtcdOptions",
    "RedisOptions",
    "Registry",
    "RegistryChoice",
    "ServerOptions",
    "StaticOptions",
    "open_registry",
]
