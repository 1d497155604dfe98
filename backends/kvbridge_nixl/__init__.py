"""KVBridge over NIXL. Importable without NIXL: the library is loaded by ``open``."""

from kvbridge_nixl.config import NixlConfig
from kvbridge_nixl.driver import NixlTransport

__all__ = ["NixlConfig", "NixlTransport"]
