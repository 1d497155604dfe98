"""What every library can do here: let memory be reached, meet an owner, and move."""

from abc import ABC, abstractmethod
from typing import Any

from kvbridge.transport import Descriptors, Op, Region

WAIT_S = 60.0


class Library(ABC):
    """One agent of a library; no checks, no states, no thread of ours."""

    @abstractmethod
    def __init__(self, region: Region, options: dict[str, Any]) -> None:
        """Start it and register memory. Options are those of the transport, as far as they fit."""

    @abstractmethod
    def card(self) -> Any:
        """Return what the other side needs."""

    @abstractmethod
    def meet(self, card: Any) -> None:
        """Connect to an owner."""

    @abstractmethod
    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        """Move pieces, and return when they are there."""

    def progress(self) -> int:
        """Let an owner do what it must while others move; return how much there was."""
        return 0  # most need not do anything
