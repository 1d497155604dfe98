"""Addresses, shapes and strides of anything that has them, without importing what made it."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import UnsupportedLayoutError
from kvbridge.model.memory import Region


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where a tensor's elements lie.

    Attributes:
        address: First element.
        shape: Size of each axis.
        strides: Bytes between neighbours along each axis.
        dtype: Element type, by the name that engines use (``"bfloat16"``).
        item_bytes: Bytes of one element.
        memory_kind: ``"dram"``, or the device type of a torch tensor.
        device: Device index within that kind.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    memory_kind: str = "dram"
    device: int = 0

    @property
    def region(self) -> Region:
        """The smallest range that holds every element."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return Region(self.address, last + self.item_bytes, self.memory_kind, self.device)


def view_of(tensor: Any) -> ArrayView:
    """Describe a torch tensor, a numpy array, or any object with an array interface.

    Raises:
        UnsupportedLayoutError: The object says nothing of its memory, or runs backwards in it.
    """
    if hasattr(tensor, "data_ptr"):
        view = _view_of_torch(tensor)
    elif hasattr(tensor, "__array_interface__"):
        view = _view_of_interface(tensor, tensor.__array_interface__, "dram")
    elif hasattr(tensor, "__cuda_array_interface__"):
        view = _view_of_interface(tensor, tensor.__cuda_array_interface__, "cuda")
    else:
        raise UnsupportedLayoutError(
            f"{type(tensor).__name__} has neither data_ptr() nor an array interface; "
            "pass a torch tensor, a numpy array or an object with __array_interface__"
        )
    if view.dtype == "object":
        raise UnsupportedLayoutError(
            "an array of Python objects holds pointers that mean nothing to another process; "
            "use a numeric type"
        )
    if any(stride < 0 for stride in view.strides) or 0 in view.shape:
        raise UnsupportedLayoutError(
            f"tensor of shape {view.shape} and strides {view.strides} is empty or runs backwards"
        )
    return view


def memory_region(tensor: Any) -> Region:
    """Return the range of memory that a tensor lies in, to be registered.

    Raises:
        UnsupportedLayoutError: The object says nothing of its memory.
    """
    return view_of(tensor).region


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return host memory of this process where it lies; that does not keep it mapped."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)


def _view_of_torch(tensor: Any) -> ArrayView:
    item = int(tensor.element_size())
    kind = str(tensor.device.type)
    return ArrayView(
        address=int(tensor.data_ptr()),
        shape=tuple(int(n) for n in tensor.shape),
        strides=tuple(int(n) * item for n in tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        item_bytes=item,
        memory_kind="dram" if kind == "cpu" else kind,
        device=int(tensor.device.index or 0),
    )


def _view_of_interface(tensor: Any, interface: dict[str, Any], memory_kind: str) -> ArrayView:
    dtype = np.dtype(interface["typestr"])
    # Extension types such as bfloat16 look like raw bytes in the interface; the object knows more.
    name = getattr(getattr(tensor, "dtype", None), "name", dtype.name)
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = np.cumprod((dtype.itemsize, *shape[:0:-1]))[::-1]
    return ArrayView(
        address=int(interface["data"][0]),
        shape=shape,
        strides=tuple(int(n) for n in strides),
        dtype=name,
        item_bytes=dtype.itemsize,
        memory_kind=memory_kind,
    )
