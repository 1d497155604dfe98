"""KVBridge over UCX. Importable without UCX: the library is loaded by ``open``."""

from kvbridge_ucx.config import UcxConfig
from kvbridge_ucx.driver import UcxTransport

__all__ = ["UcxConfig", "UcxTransport"]
