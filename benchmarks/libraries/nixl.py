"""NIXL with its UCX backend."""

import time
from typing import Any

import numpy as np

from benchmarks.libraries.library import WAIT_S, Library
from kvbridge.transport import Descriptors, Op, Region
from kvbridge_nixl import library


class Nixl(Library):
    """Builds a list, posts it, and spins until it is done."""

    def __init__(self, region: Region, options: dict[str, Any]) -> None:
        # With the transport's settings: by default NIXL's own thread never sleeps, and on a small
        # machine that of this agent would take a core from whoever is measured.
        self._agent: Any = library.load().make_agent(f"bare-{region.address:x}", "lo", 0)
        self._agent.register_memory([(region.address, region.nbytes, region.device, "")], "DRAM")
        self._peer = ""

    def card(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def meet(self, card: bytes) -> None:
        self._peer = self._agent.add_remote_agent(card).decode()

    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        lists = []
        for side in (local, remote):
            rows = np.empty((len(side), 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = side.address, side.nbytes, 0
            lists.append(self._agent.get_xfer_descs(rows, "DRAM"))
        request = self._agent.initialize_xfer(op.upper(), *lists, self._peer, b"")
        state = self._agent.transfer(request)
        deadline = time.monotonic() + WAIT_S
        while state != "DONE":
            if time.monotonic() > deadline:
                raise TimeoutError(f"pending after {WAIT_S} s")
            state = self._agent.check_xfer_state(request)
        request.release()
