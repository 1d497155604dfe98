"""The transport ``sockets`` for KVBridge."""

from kvbridge_sockets.config import SocketsConfig
from kvbridge_sockets.driver import SocketsTransport

__all__ = ["SocketsConfig", "SocketsTransport"]
