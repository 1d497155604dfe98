"""KVBridge over Mooncake's transfer engine. Importable without it: ``open`` loads the library."""

from kvbridge_mooncake.config import MooncakeConfig
from kvbridge_mooncake.driver import MooncakeTransport

__all__ = ["MooncakeConfig", "MooncakeTransport"]
