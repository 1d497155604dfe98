"""Options of the transport ``local``."""

from typing import Annotated

from msgspec import Meta

from kvbridge.transport import TransportConfig


class LocalConfig(TransportConfig, frozen=True):
    """Options of :class:`~kvbridge.transport.local.LocalTransport`.

    Attributes:
        slice_bytes: Bytes copied between two looks at whether to go on: whether the peer lives,
            and whether the operation was abandoned or the transport closed.
        send_timeout_s: How long a notification may wait for room once 64 MiB of them are queued
            for a peer that does not take them; after that the peer counts as lost.
        permit_same_user: Where the Yama module lets a process touch only its descendants
            (``ptrace_scope`` is 1, as on Ubuntu), let processes of the same user reach this one.
    """

    slice_bytes: Annotated[int, Meta(ge=4096)] = 64 << 20
    send_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    permit_same_user: bool = True
