"""Options of the Mooncake transport."""

import ipaddress
import socket
from typing import Annotated

from msgspec import Meta

from kvbridge.errors import ConfigError
from kvbridge.transport import TransportConfig


class MooncakeConfig(TransportConfig, frozen=True):
    """Options of the Mooncake transport.

    Attributes:
        host: This host's IPv4 address, or a name for it, under which peers reach it. Our own
            control connections are accepted there and nowhere else.
        allow_open_data_port: Mooncake listens on *every* interface, whatever it is told, and asks
            nobody who he is: whoever reaches its two ports (of 15000 to 17000) may read and write
            all registered memory. So this must be true, except in a network namespace that has
            nothing but a loopback device: there the ports are open to every process in that
            namespace, whoever's it is, and to nobody else. Say true only where a firewall keeps
            everybody else away, or where you trust all who share the network.
    """

    host: Annotated[str, Meta(min_length=1, max_length=253)] = "127.0.0.1"
    allow_open_data_port: bool = False

    def address(self) -> str:
        """Return the address to listen on and to publish.

        Raises:
            ConfigError: The open ports are not allowed, or the host is no address to reach.
        """
        if not self.allow_open_data_port and not _has_only_loopback():
            raise ConfigError(
                "transport 'mooncake' listens on every interface, without authentication: whoever "
                "reaches its ports may read and write all registered memory. Where a firewall "
                "keeps others away, set option allow_open_data_port=true; or run all engines in "
                "one network namespace with nothing but a loopback device, which needs no option; "
                "otherwise choose another transport"
            )
        try:
            address = socket.gethostbyname(self.host)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"option host={self.host!r} has no IPv4 address: {error}") from error
        if ipaddress.IPv4Address(address).is_unspecified:
            raise ConfigError(
                f"option host={self.host!r} is no address that peers can connect to; "
                "give the one under which they reach this host"
            )
        return address


def _has_only_loopback() -> bool:
    """Whether the calling thread's network namespace leads nowhere.

    An interface that is down counts as one: it may be up before the ports are closed.
    """
    return [name for _, name in socket.if_nameindex()] == ["lo"]
