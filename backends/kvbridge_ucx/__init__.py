"""KVBridge transport over UCX (not built yet)."""
