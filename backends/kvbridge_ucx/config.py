"""Options of the UCX transport."""

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from kvbridge.errors import ConfigError
from kvbridge.transport import TransportConfig

LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")
_DEVICE_FOLDERS = (Path("/sys/class/net"), INFINIBAND)

ReadMode = Literal["auto", "served", "native"]


class UcxConfig(TransportConfig, frozen=True):
    """Options of the UCX transport.

    Attributes:
        device: The one network device that UCX may use and listen on, such as ``eth0`` or
            ``mlx5_0:1``. None means ``UCX_NET_DEVICES`` where that is set, else ``lo``: UCX
            would listen on every interface, and whoever reaches its port may read and write
            all registered memory. Between two hosts this option is needed, on both.
        tls: The transports of UCX to choose from, such as ``"tcp"``. None means ``UCX_TLS``
            where that is set, else all.
        library: Which UCX to load: ``"wheel"`` is the package libucx, which has no RDMA,
            ``"system"`` is the one that the dynamic linker finds; else a path to ``libucp.so``.
            None means the wheel, and the system's for an RDMA device or without the wheel.
        read_mode: How reads are done: ``"native"``, or ``"served"`` by the owner, who writes on
            request. Over TCP a native reader that is killed may take the owner with it, so
            ``"auto"`` means served there, and native elsewhere.
    """

    device: Annotated[str, Meta(pattern=r"^[\w.@-]+(:\d+)?$")] | None = None
    tls: Annotated[str, Meta(pattern=r"^\^?\w+(,\w+)*$")] | None = None
    library: Annotated[str, Meta(pattern=r"^(wheel|system|.*/.*)$")] | None = None
    read_mode: ReadMode = "auto"

    def chosen_device(self) -> str:
        """Return the network device to use.

        Raises:
            ConfigError: The option names no device of this host.
        """
        if self.device is None:
            return os.environ.get("UCX_NET_DEVICES") or LOOPBACK
        known = sorted(d.name for f in _DEVICE_FOLDERS if f.is_dir() for d in f.iterdir())
        if self.device.partition(":")[0] not in known:
            raise ConfigError(f"option device={self.device!r}: this host has {', '.join(known)}")
        return self.device
