"""What the worker works on."""

import logging
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvbridge.transport import Descriptors, Handle, Op, State
from kvbridge_nixl.connections import Connection
from kvbridge_nixl.library import Request
from kvbridge_nixl.translate import translate

logger = logging.getLogger(__name__)

# NIXL's words for our kinds of memory.
MEMORY_TYPES = {"dram": "DRAM"}


@dataclass(slots=True, eq=False)
class Job:
    """One operation on its way.

    Attributes:
        op: What to do.
        connection: The remote agent.
        local: Local pieces. Shape: [N, 3] uint64, each (address, length, device).
        remote: Remote pieces, in the same form.
        memory_types: NIXL's words for the memory of both sides.
        notification: What to send with it.
        handle: What the caller holds; None for an operation of the driver's own.
        ended: Set when it has ended.
        state: How it ended.
        reason: Why it failed.
        request: NIXL's handle, once there is one.
        doubt: Why NIXL cannot tell whether it still moves; it then stays pending.
        at_once: It was done when the post call returned.
    """

    op: Op
    connection: Connection
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    memory_types: tuple[str, str] = ("DRAM", "DRAM")
    notification: bytes = b""
    handle: Handle | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    state: State = State.PENDING
    reason: str = ""
    request: Request | None = None
    doubt: str = ""
    at_once: bool = False

    def release(self, errors: tuple[type[Exception], ...]) -> None:
        """Give NIXL's handle back. This stops no bytes."""
        request, self.request = self.request, None
        if request is not None:
            try:
                request.release()
            except errors as error:
                logger.debug("%s", translate(error, "releasing a request"))


def rows(descriptors: Descriptors) -> NDArray[np.uint64]:
    """Copy descriptors into NIXL's form, without the pieces that move nothing.

    A copy, since the caller may change the arrays before the worker comes to post them.
    """
    table = np.empty((len(descriptors), 3), np.uint64)
    table[:, 0] = descriptors.address
    table[:, 1] = descriptors.nbytes
    table[:, 2] = descriptors.device
    return table if descriptors.nbytes.all() else table[descriptors.nbytes > 0]
