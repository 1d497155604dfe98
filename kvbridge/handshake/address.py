"""Where an engine answers, and which addresses may be dialled at all.

Hosts and ports come from configuration, from registries and, through a proxy, from requests of
strangers. They are read here, once, into values that hold nothing but a host and a port.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

from kvbridge.errors import ConfigError, HandshakeError, UnknownHostError

PORT_MAX = 65535
_HOST_MAX_LENGTH = 253
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?\Z")
_NUMERIC = re.compile(r"(0[xX][0-9a-fA-F]*|[0-9]+)(\.(0[xX][0-9a-fA-F]*|[0-9]+))*\.?\Z")

_Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]  # noqa: UP007 - an alias of 3.11
_Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]  # noqa: UP007


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A host and a port.

    Attributes:
        host: Name or address, IPv6 without brackets.
        port: Port; 0 stands for a free one, to listen on.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """Write it as it is dialled."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, host: object, port: object, *, where: str = "address") -> "EngineAddress":
        """Return an address from whatever a config, a registry or a proxy made of it (report B64).

        Args:
            host: Name or address, with or without brackets.
            port: A whole number, also where something on the way made a float or text of it.
            where: What it is the address of, for messages.

        Raises:
            ConfigError: One of both is none.
        """
        return cls(_host(host, where), _port(port, where))

    @classmethod
    def parse(cls, text: str, *, where: str = "address") -> "EngineAddress":
        """Return an address from ``host:port`` or ``[ipv6]:port`` (report B65).

        Raises:
            ConfigError: The text is none.
        """
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not (host.startswith("[") and host.endswith("]"))):
            raise ConfigError(
                f"{where} {text!r} is no address; write host:port, or [address]:port for IPv6"
            )
        return cls.of(host, port, where=where)

    @property
    def is_loopback(self) -> bool:
        """Whether it names this machine alone."""
        literal = _literal(self.host)
        return self.host == "localhost" or (literal is not None and literal.is_loopback)

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ writes it."""
        return f"tcp://{self}"


def _host(host: object, where: str) -> str:
    bare = host[1:-1] if isinstance(host, str) and host[:1] + host[-1:] == "[]" else host
    if isinstance(bare, str) and len(bare) <= _HOST_MAX_LENGTH:
        literal = _literal(bare)
        if literal is not None:
            return str(literal)
        # Names of digits alone are read as addresses by some resolvers: "0" is every interface.
        if ":" not in bare and _HOST_NAME.match(bare) and not _NUMERIC.match(bare):
            return bare
    raise ConfigError(f"{where}: host {shown(host)} is neither a host name nor an IP address")


def _port(port: object, where: str) -> int:
    try:
        number = float(port) if isinstance(port, int | float | str) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if isinstance(port, bool) or not number.is_integer() or not 0 <= number <= PORT_MAX:
        raise ConfigError(f"{where}: port {shown(port)} must be a whole number in [0, {PORT_MAX}]")
    return int(number)


def shown(value: object) -> str:
    """Write what a stranger sent; of what is deeply nested, or has very many digits, its type."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 80 else f"{value[:80]!r}... ({len(value)} characters)"
    plain = value is None or isinstance(value, float)
    if plain or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"of type {type(value).__name__}"


def _literal(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def look_up(host: str) -> list[str]:
    """Return the IP addresses of a host; may wait for a resolver.

    Raises:
        UnknownHostError: The name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        raise UnknownHostError(f"host {host!r} cannot be found: {why}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Networks:
    """The networks that may be dialled; everything else is refused before a packet is sent.

    Requests name the engine that holds their blocks. Without this list, whoever may send a
    request could have an engine connect to any address that it can reach.
    """

    def __init__(self, networks: Iterable[str] = ("127.0.0.0/8", "::1/128")) -> None:
        """Take networks such as ``"10.0.0.0/8"`` or single addresses.

        Raises:
            ConfigError: One of them is none.
        """
        self._networks: list[_Network] = []
        for network in networks:
            try:
                self._networks.append(ipaddress.ip_network(network, strict=False))
            except ValueError as error:
                raise ConfigError(
                    f"network {network!r} is none: {error}; write it as 10.0.0.0/8 or fd00::/8"
                ) from error

    def __str__(self) -> str:
        """List them."""
        return ", ".join(map(str, self._networks)) or "none"

    def __contains__(self, address: str) -> bool:
        """Whether an IP address lies in one of them."""
        literal = ipaddress.ip_address(address)
        mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
        return any((mapped or literal) in network for network in self._networks)

    def admit(self, address: EngineAddress) -> bool:
        """Whether an address may be dialled, as far as can be told without a resolver."""
        literal = _literal(address.host)
        return literal is None or str(literal) in self

    def resolve(self, address: EngineAddress) -> Sequence[EngineAddress]:
        """Return where an address leads: IP addresses, all of them within the networks.

        What is checked here is what must be dialled, not the name once more: a name may lead
        elsewhere the next time.

        Raises:
            UnknownHostError: The name does not resolve.
            HandshakeError: It leads outside.
        """
        hosts = look_up(address.host)
        inside = [host for host in hosts if "%" not in host and host in self]
        if not inside:
            raise HandshakeError(
                f"{address} leads to {', '.join(hosts)}, outside of the networks that may be "
                f"dialled ({self}); add its network to allowed_networks if it is an engine of yours"
            )
        return [EngineAddress(host, address.port) for host in inside]
