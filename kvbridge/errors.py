"""Every error that KVBridge raises.

The tree is small on purpose: a caller tells apart what he can *do* about a failure. Each class
also derives from the built-in exception that a Python user would expect there, so that code
which knows nothing of KVBridge still catches it sensibly.

Messages say what failed, the two values that disagree, and what to do.
"""

from collections.abc import Mapping
from typing import Any


class KVBridgeError(Exception):
    """Root of all errors raised by KVBridge and its transports."""


class ConfigError(KVBridgeError, ValueError):
    """A configuration value is unknown, malformed or contradicts another one."""


class WrongHalfError(ConfigError):
    """An engine called a hook on the half of a connector that does not have it."""


class TopologyConflictError(KVBridgeError, ValueError):
    """A live engine id was registered again with different facts."""


class UnknownEngineError(KVBridgeError, KeyError):
    """An engine id (or one of its pipeline stages) was never registered."""

    def __str__(self) -> str:
        """Return the plain message; ``KeyError`` would show its ``repr``."""
        return str(self.args[0]) if self.args else ""


class UnsupportedLayoutError(KVBridgeError, ValueError):
    """Two shapes, or one cache layout, that this code cannot describe or bring together."""


class PlanError(KVBridgeError, ValueError):
    """No plan can be made from these caches, or a plan does not fit what it is used with."""


class CoverageError(PlanError):
    """Some byte that the consumer needs would be written never, twice, or out of bounds."""


class UnboundPlanError(PlanError):
    """A plan was lowered before it was bound to the addresses of two engines."""


class BlockTableError(KVBridgeError, ValueError):
    """A block table does not cover what must move, or lists impossible blocks."""


class HandshakeError(KVBridgeError):
    """Two engines could not agree to exchange caches."""


class IncompatibleError(HandshakeError):
    """Two engines differ in facts that must be equal.

    Attributes:
        differences: Every differing field with its ``(local, remote)`` values.
    """

    def __init__(self, message: str, differences: Mapping[str, tuple[Any, Any]]) -> None:
        """Keep the differing fields beside the message that names them."""
        super().__init__(message)
        self.differences: dict[str, tuple[Any, Any]] = dict(differences)


class AuthenticationError(HandshakeError):
    """A peer did not prove that it may talk to this engine."""


class HandshakeTimeoutError(HandshakeError, TimeoutError):
    """A peer did not answer in time."""


class UnknownHostError(HandshakeError, LookupError):
    """A peer's name does not resolve, or not yet."""


class TransportError(KVBridgeError):
    """A transport could not be loaded, opened or used."""


class UnknownTransportError(TransportError, LookupError):
    """No installed distribution offers a transport of that name."""


class TransportUnavailableError(TransportError):
    """A transport exists but cannot run here.

    Attributes:
        hint: The command, or the setting, that would make it available.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        """Keep the remedy beside the reason, and show both."""
        super().__init__(f"{message} {hint}".strip())
        self.hint = hint


class NotSupportedError(TransportError):
    """A transport was asked for something that it does not declare."""


class MemoryBusyError(TransportError):
    """Memory cannot be unregistered because an operation still uses it."""


class PeerLostError(TransportError, ConnectionError):
    """A peer is gone, or cannot be reached any more."""


class OutOfBoundsError(TransportError):
    """A descriptor reaches outside the registered memory."""
