"""The reference transport: processes of one Linux host, no package but the kernel."""

from kvbridge.transport.local.driver import LocalTransport

__all__ = ["LocalTransport"]
