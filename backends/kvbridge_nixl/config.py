"""Options of the NIXL transport."""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvbridge.errors import ConfigError
from kvbridge.transport import TransportConfig

LOOPBACK = "lo"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_DEVICE_FOLDERS = (Path("/sys/class/net"), _RDMA_DEVICES)


class NixlConfig(TransportConfig, frozen=True):
    """Options of the NIXL transport.

    Attributes:
        device: The one network device that UCX may use and listen on, such as ``eth0`` or
            ``mlx5_0:1``. None means ``UCX_NET_DEVICES`` where that is set, else ``lo``: UCX
            would listen on every interface, and whoever reaches its port may read and write
            all registered memory. Between two hosts this option is needed, on both.
        read_mode: How to read. ``served`` asks the owner to write, ``native`` lets the reader fetch
            the bytes alone. ``auto`` reads natively where the kernel copies within a host or RDMA
            carries the bytes, and is served otherwise: over TCP a reader that is killed in the
            middle of a native read may take the owner's process with it.
        num_threads: Threads that NIXL posts large operations from; 0 posts them from one.
    """

    device: Annotated[str, Meta(pattern=r"^[\w.@-]+(:\d+)?$")] | None = None
    read_mode: Literal["auto", "native", "served"] = "auto"
    num_threads: Annotated[int, Meta(ge=0, le=64)] = 0

    def chosen_device(self) -> str:
        """Return the network device to use, without overruling the environment silently.

        Raises:
            ConfigError: The option names no device of this host, or contradicts the environment.
        """
        variable = os.environ.get("UCX_NET_DEVICES")
        if self.device is None:
            return variable or LOOPBACK
        if variable not in (None, self.device):
            raise ConfigError(
                f"option device={self.device!r} contradicts UCX_NET_DEVICES={variable!r}, which "
                "UCX obeys; unset one of them"
            )
        known = sorted(d.name for f in _DEVICE_FOLDERS if f.is_dir() for d in f.iterdir())
        if self.device.partition(":")[0] not in known:
            raise ConfigError(f"option device={self.device!r}: this host has {', '.join(known)}")
        return self.device


def is_rdma(devices: str) -> bool:
    """Whether devices, as UCX names them, are all for RDMA."""
    names = (device.partition(":")[0] for device in devices.split(","))
    return all(name and (_RDMA_DEVICES / name).is_dir() for name in names)
