"""What the worker works on."""

import logging
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvbridge.transport import Descriptors, Ended, Op, State
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
        local: Local pieces.
        remote: Remote pieces.
        message: What to send with it.
        served: The owner is asked to write; otherwise NIXL does it alone.
        then: Told how it ended, in the worker's thread.
        ended: Set when it has ended.
        state: How it ended.
        reason: Why it failed.
        request: NIXL's handle, once there is one.
        doubt: Why NIXL cannot tell whether it still moves; it then stays pending.
    """

    op: Op
    connection: Connection
    local: Descriptors
    remote: Descriptors
    message: bytes = b""
    served: bool = False
    then: Ended | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    state: State = State.PENDING
    reason: str = ""
    request: Request | None = None
    doubt: str = ""

    def release(self, errors: tuple[type[Exception], ...]) -> None:
        """Give NIXL's handle back. This stops no bytes."""
        request, self.request = self.request, None
        if request is not None:
            try:
                request.release()
            except errors as error:
                logger.debug("%s", translate(error, "releasing a request"))


def rows(descriptors: Descriptors) -> NDArray[np.uint64]:
    """Bring descriptors into NIXL's form, without the pieces that move nothing.

    Returns:
        Shape: [N, 3], each (address, length, device).
    """
    table = np.empty((len(descriptors), 3), np.uint64)
    table[:, 0] = descriptors.address
    table[:, 1] = descriptors.nbytes
    table[:, 2] = descriptors.device
    return table if descriptors.nbytes.all() else table[descriptors.nbytes > 0]
