"""How the engines of connectors are found: by an address, or by an entry in a registry."""

import logging

from kvbridge.connector.config import ConnectorConfig, HandshakeConfig
from kvbridge.errors import ConfigError, HandshakeError
from kvbridge.handshake import EngineAddress, EngineRecord, Registry

_log = logging.getLogger(__name__)


def advertised(
    handshake: HandshakeConfig, listening: EngineAddress, engine_id: str
) -> EngineAddress:
    """Return the address that requests carry (report B47).

    Args:
        handshake: Which host it shall be.
        listening: Where the engine listens.
        engine_id: The engine.

    Raises:
        ConfigError: Nobody could dial it.
    """
    host = handshake.advertise_host or handshake.host
    if host in {"0.0.0.0", "::", "[::]"}:  # noqa: S104 - nobody can dial that
        raise ConfigError(
            f"the handshake channel listens on every interface ({host}), which is no address "
            "that peers can dial; set advertise_host to the one by which they reach this engine"
        )
    address = EngineAddress.of(host, listening.port, where="advertise_host")
    if address.is_loopback and not listening.is_loopback:
        _log.warning(
            "engine %s listens on %s but advertises %s, which leads every other machine to "
            "itself; set advertise_host",
            engine_id,
            listening,
            address,
        )
    return address


class Entry:
    """A registry's entry of one engine's connector; each has a port of its own."""

    def __init__(
        self,
        registry: Registry,
        config: ConnectorConfig,
        name: str,
        engine_id: str,
        address: EngineAddress,
    ) -> None:
        """Take the registry, which is closed with it.

        Args:
            registry: Where the entry is.
            config: The connector.
            name: Its name.
            engine_id: The engine.
            address: Where other engines reach it.
        """
        self._registry, self._config, self._engine_id = registry, config, engine_id
        self._id, self._address = _entry_id(engine_id, name), address

    def announce(self, incarnation: str) -> None:
        """Make the entry, of this start of the engine.

        Raises:
            HandshakeError: The registry does not answer.
        """
        record = EngineRecord(
            engine_id=self._id,
            incarnation=incarnation,
            host=self._address.host,
            port=self._address.port,
            labels={"transport": self._config.transport, "role": self._config.role},
        )
        self._registry.announce(record, ttl_s=self._config.handshake.ttl_s)

    def withdraw(self) -> None:
        """Take the entry back; where that fails, it ends by itself."""
        try:
            self._registry.withdraw(self._id)
        except HandshakeError as error:
            _log.warning("the entry of engine %s ends by itself: %s", self._engine_id, error)

    def close(self) -> None:
        """Take leave of the registry."""
        self._registry.close()


def look_up(registry: Registry, name: str, engine_id: str) -> EngineRecord | None:
    """Return where an engine's connector of this name is."""
    return registry.find(_entry_id(engine_id, name))


def _entry_id(engine_id: str, name: str) -> str:
    return f"{engine_id}~{name}"
