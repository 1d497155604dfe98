"""NIXL's exceptions, and what each means here."""

from types import ModuleType

from kvbridge.errors import KVBridgeError, NotSupportedError, PeerLostError, TransportError

# They have no base class of their own, so each is listed.
MEANING: dict[str, type[KVBridgeError]] = {
    "nixlBackendError": TransportError,
    "nixlCancelledError": TransportError,
    "nixlInvalidParamError": TransportError,
    "nixlMismatchError": TransportError,
    "nixlNoTelemetryError": TransportError,
    "nixlNotAllowedError": TransportError,
    "nixlNotFoundError": TransportError,
    "nixlNotPostedError": TransportError,
    "nixlNotSupportedError": NotSupportedError,
    "nixlRemoteDisconnectError": PeerLostError,
    "nixlRepostActiveError": TransportError,
    "nixlUnknownError": TransportError,
}


def vendor_errors(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """Return the classes that this version of NIXL raises, for an ``except`` clause."""
    found = (getattr(bindings, name, None) for name in MEANING)
    # The last is what its bindings make of all other C++ exceptions.
    return (*(kind for kind in found if isinstance(kind, type)), RuntimeError)


def is_disconnect(error: Exception) -> bool:
    """Whether NIXL says that the connection is gone for good."""
    return MEANING.get(type(error).__name__) is PeerLostError


def translate(error: Exception, doing: str) -> KVBridgeError:
    """Make our error out of theirs.

    Args:
        error: One of :func:`vendor_errors`.
        doing: What failed, for the message.
    """
    name = type(error).__name__
    return MEANING.get(name, TransportError)(f"{doing}: NIXL says {name} ({error})")
