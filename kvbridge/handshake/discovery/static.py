"""Engines that a configuration lists."""

from kvbridge.config import Config
from kvbridge.errors import ConfigError
from kvbridge.handshake.discovery.base import TTL_S, EngineRecord, Registry


class StaticOptions(Config, frozen=True):
    """Options of the registry ``static``.

    Attributes:
        engines: ``"host:port"`` of every engine, by its id; an IPv6 address stands in brackets.
    """

    engines: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Refuse an address that is none.

        Raises:
            ConfigError: It is not ``host:port``.
        """
        self.records()

    def records(self) -> dict[str, EngineRecord]:
        """Return the engines' records by engine id."""
        return {name: _record(name, address) for name, address in self.engines.items()}


def _record(engine_id: str, address: str) -> EngineRecord:
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or (":" in bare and bare == host):
        raise ConfigError(
            f"engine {engine_id!r} is listed at {address!r}; write 'host:port', an IPv6 address "
            "in brackets"
        )
    return EngineRecord(engine_id=engine_id, incarnation="", host=bare, port=int(port))


class StaticRegistry(Registry):
    """Knows the engines of its configuration, and no incarnation of any.

    Announcing and withdrawing change nothing: the list says where the engines are.
    """

    def __init__(self, options: StaticOptions) -> None:
        """Take the list."""
        super().__init__()
        self._records = options.records()

    def announce(self, record: EngineRecord, *, ttl_s: float = TTL_S) -> None: ...

    def withdraw(self, engine_id: str) -> None: ...

    def find(self, engine_id: str) -> EngineRecord | None:
        return self._records.get(engine_id)

    def engines(self) -> tuple[EngineRecord, ...]:
        return tuple(record for _, record in sorted(self._records.items()))

    def close(self) -> None: ...
