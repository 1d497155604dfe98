"""Options of the transport ``sockets``."""

from typing import Annotated

from msgspec import Meta

from kvbridge.transport import TransportConfig


class SocketsConfig(TransportConfig, frozen=True):
    """Options of the transport ``sockets``.

    Attributes:
        host: Address of this host that peers connect to. Whoever reaches it and knows an agent's
            info may read and write what that agent has registered: keep it inside your network.
        port: Port to listen on; 0 takes a free one.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
