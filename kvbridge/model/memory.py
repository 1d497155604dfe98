"""Memory as a transport sees it: ranges to register."""

from dataclasses import dataclass

from kvbridge.errors import UnsupportedLayoutError

ADDRESS_LIMIT = 1 << 64


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous range of memory to register with a transport.

    Attributes:
        address: First byte.
        nbytes: Length of the range in bytes.
        memory_kind: Where the memory lives: ``"dram"``, ``"cuda"``, ...
        device: Device index within that kind.

    Raises:
        UnsupportedLayoutError: The range is empty or wraps around the address space.
    """

    address: int
    nbytes: int
    memory_kind: str = "dram"
    device: int = 0

    def __post_init__(self) -> None:
        """Refuse ranges that no memory can have."""
        if self.address < 0 or self.nbytes <= 0 or self.end > ADDRESS_LIMIT:
            raise UnsupportedLayoutError(
                f"region at {self.address:#x} of {self.nbytes} bytes is no range of memory; "
                "address must be >= 0, nbytes > 0, and the end within 64 bits"
            )

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes
