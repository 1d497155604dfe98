"""KVBridge transport over the Mooncake transfer engine (not built yet)."""
