"""Under which ids a registry has the connectors of engines."""

from kvbridge.handshake import EngineRecord, Registry


def entry_id(engine_id: str, name: str) -> str:
    """Return under which id a registry has an engine's connector; each has a port of its own."""
    return f"{engine_id}~{name}"


def look_up(registry: Registry, name: str, engine_id: str) -> EngineRecord | None:
    """Return where an engine's connector of this name is."""
    return registry.find(entry_id(engine_id, name))
