"""Scatter lists as arrays: what one side of an operation reads or writes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbridge.errors import OutOfBoundsError

UInt64Array = NDArray[np.uint64]


def _as_uint64(values: ArrayLike, name: str) -> UInt64Array:
    array: NDArray[Any] = np.asarray(values)
    if array.ndim != 1:
        raise OutOfBoundsError(f"descriptor {name} must be a flat array, got shape {array.shape}")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise OutOfBoundsError(f"descriptor {name} must be integers >= 0, got {array.dtype}")
    if array.min() < 0:
        raise OutOfBoundsError(f"descriptor {name} must be integers >= 0, got {array.min()}")
    return array.astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Pieces of memory of one kind on one device.

    Shape: address [N] uint64, nbytes [N] uint64.

    Attributes:
        address: First byte of each piece.
        nbytes: Length of each piece in bytes; 0 is allowed and moves nothing.
        memory_kind: Kind of memory that all pieces lie in.
        device: Device index within that kind.

    Raises:
        OutOfBoundsError: The arrays are not flat, not of one length, or hold negative numbers.
    """

    address: UInt64Array
    nbytes: UInt64Array
    memory_kind: str = "dram"
    device: int = 0

    def __post_init__(self) -> None:
        """Bring both arrays into their one form."""
        object.__setattr__(self, "address", _as_uint64(self.address, "address"))
        object.__setattr__(self, "nbytes", _as_uint64(self.nbytes, "nbytes"))
        if self.address.size != self.nbytes.size:
            raise OutOfBoundsError(
                f"descriptors have {self.address.size} addresses but {self.nbytes.size} lengths; "
                "give one length per address"
            )

    def __len__(self) -> int:
        """Return the number of pieces."""
        return int(self.address.size)

    @property
    def total_nbytes(self) -> int:
        """Sum of all lengths."""
        return int(np.add.reduce(self.nbytes))
