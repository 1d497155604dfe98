"""The kernel's cross-memory calls, which the transport ``local`` uses."""

import ctypes
import os

import numpy as np

from benchmarks.libraries.library import Library
from kvbridge.transport import Descriptors, Op, Region

IOV_MAX = 1024


class Kernel(Library):
    """process_vm_readv and process_vm_writev, with as many pieces a call as the kernel takes."""

    def __init__(self, region: Region, options: dict[str, object]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._calls = {"read": libc.process_vm_readv, "write": libc.process_vm_writev}
        for call in self._calls.values():
            call.restype = ctypes.c_ssize_t
            pair = (ctypes.c_void_p, ctypes.c_ulong)
            call.argtypes = [ctypes.c_long, *pair, *pair, ctypes.c_ulong]
        self._peer = 0

    def card(self) -> int:
        return os.getpid()

    def meet(self, card: int) -> None:
        self._peer = card

    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        here, there = (
            np.ascontiguousarray(np.stack((side.address, side.nbytes), axis=1))
            for side in (local, remote)
        )
        for start in range(0, len(local), IOV_MAX):
            ours, theirs = here[start : start + IOV_MAX], there[start : start + IOV_MAX]
            wanted = int(ours[:, 1].sum())
            done = self._calls[op](
                self._peer, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0
            )
            if done != wanted:  # a call moves 2 GiB at most
                raise OSError(ctypes.get_errno(), f"{done} of {wanted} bytes moved")
