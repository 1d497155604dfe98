"""Opening the registry that a configuration chooses."""

from collections.abc import Mapping
from typing import Any, Literal

from kvbridge.config import Config, parse_config
from kvbridge.handshake.discovery.base import Registry
from kvbridge.handshake.discovery.etcd import EtcdOptions, EtcdStore
from kvbridge.handshake.discovery.redis import RedisOptions, RedisStore
from kvbridge.handshake.discovery.server import ServerRegistry
from kvbridge.handshake.discovery.static import StaticOptions, StaticRegistry


class RegistryChoice(Config, frozen=True):
    """The two keys that choose a registry.

    Attributes:
        registry: Kind of the registry.
        options: The options of that kind.
    """

    registry: Literal["static", "redis", "etcd"] = "static"
    options: dict[str, Any] = {}


def open_registry(choice: Mapping[str, Any] | RegistryChoice) -> Registry:
    """Make the registry that a configuration chooses, without asking its server anything yet.

    Args:
        choice: ``{"registry": kind, "options": {...}}``; both keys have defaults.

    Raises:
        ConfigError: A key or an option is unknown or wrong, or the client of the server is not
            installed; the message has the line that installs it.
    """
    chosen = parse_config(RegistryChoice, choice, where="registry choice")
    where = f"options of registry {chosen.registry!r}"
    match chosen.registry:
        case "static":
            return StaticRegistry(parse_config(StaticOptions, chosen.options, where=where))
        case "redis":
            redis = parse_config(RedisOptions, chosen.options, where=where)
            return ServerRegistry(RedisStore(redis), redis.prefix)
        case "etcd":
            etcd = parse_config(EtcdOptions, chosen.options, where=where)
            return ServerRegistry(EtcdStore(etcd), etcd.prefix)
