"""Each library driven directly, as tersely as it can be: what a transport is measured against."""

from benchmarks.libraries.kernel import Kernel
from benchmarks.libraries.library import Library
from benchmarks.libraries.mooncake import Mooncake
from benchmarks.libraries.nixl import Nixl
from benchmarks.libraries.ucx import Ucx

LIBRARIES: dict[str, type[Library]] = {
    "local": Kernel,
    "nixl": Nixl,
    "mooncake": Mooncake,
    "ucx": Ucx,
}

__all__ = ["LIBRARIES", "Library"]
