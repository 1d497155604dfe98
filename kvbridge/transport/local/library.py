"""The kernel's cross-memory calls: the only file that talks to libc."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.transport import Availability, Descriptors, Op
from kvbridge.transport.local.translate import PERMISSION_HINT, reason

IOVECS_MAX = 1024  # IOV_MAX of the kernel
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_CAP_SYS_PTRACE = 19
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATUS = Path("/proc/self/status")

# On 64-bit Linux a row of (address, nbytes) as uint64 *is* a `struct iovec`.
Iovecs = NDArray[np.uint64]


def _load() -> ctypes.CDLL | None:
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    # A CDLL releases the interpreter lock during each call.
    libc = ctypes.CDLL(None, use_errno=True)
    iovecs = [ctypes.c_void_p, ctypes.c_ulong]
    for name in ("process_vm_readv", "process_vm_writev"):
        function = getattr(libc, name, None)
        if function is None:
            return None
        function.argtypes = [ctypes.c_int, *iovecs, *iovecs, ctypes.c_ulong]
        function.restype = ctypes.c_ssize_t
    return libc


_libc: Any = _load()


def to_iovecs(descriptors: Descriptors) -> Iovecs:
    """Copy descriptors into an iovec array, which the caller can no longer change."""
    iovecs = np.empty((len(descriptors), 2), np.uint64)
    iovecs[:, 0] = descriptors.address
    iovecs[:, 1] = descriptors.nbytes
    return iovecs


class ScatterCopy:
    """A copy between pieces of this process and pieces of another one, done in steps.

    Both lists hold the same lengths in the same order, so one byte count is the position in both.
    """

    __slots__ = ("_call", "_ends", "_local", "_pid", "_remote", "done_nbytes", "nbytes")

    def __init__(self, op: Op, pid: int, local: Descriptors, remote: Descriptors) -> None:
        """Prepare a copy; nothing is moved yet."""
        self._call = _libc.process_vm_readv if op == "read" else _libc.process_vm_writev
        self._pid = pid
        self._local, self._remote = to_iovecs(local), to_iovecs(remote)
        self._ends = self._local[:, 1].cumsum()
        self.nbytes = int(self._ends[-1]) if len(self._ends) else 0
        self.done_nbytes = 0

    def advance(self, nbytes: int) -> None:
        """Copy the next bytes, at most that many; returns when they are where they belong.

        Raises:
            OSError: The kernel refused; :attr:`done_nbytes` says how far the copy came.
        """
        goal = min(self.done_nbytes + nbytes, self.nbytes)
        while self.done_nbytes < goal:
            self.done_nbytes += self._call_once(goal)

    def _call_once(self, goal: int) -> int:
        position = self.done_nbytes
        # The first piece that ends behind the position: skips finished and empty pieces alike.
        first = int(self._ends.searchsorted(np.uint64(position), side="right"))
        last = int(self._ends.searchsorted(np.uint64(goal), side="left")) + 1
        window = slice(first, min(last, first + IOVECS_MAX))
        local, remote = self._local[window].copy(), self._remote[window].copy()
        begun = position - (int(self._ends[first]) - int(local[0, 1]))
        beyond = max(int(self._ends[window.stop - 1]) - goal, 0)
        for iovecs in (local, remote):
            iovecs[0, 0] += np.uint64(begun)
            iovecs[0, 1] -= np.uint64(begun)
            iovecs[-1, 1] -= np.uint64(beyond)
        moved = self._call(
            self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if moved <= 0:
            # Nothing moved and no error does not happen; as an error it cannot loop for ever.
            number = ctypes.get_errno() if moved < 0 else 0
            raise OSError(number, os.strerror(number) if number else "nothing was copied")
        # Fewer bytes than asked for is no error: the call stops at 2 GiB, and before a page that
        # is missing, which the next call then reports.
        return int(moved)


def read_bytes(pid: int, address: int, nbytes: int) -> bytes:
    """Return bytes of another process.

    Raises:
        OSError: The kernel refused.
    """
    buffer = np.empty(nbytes, np.uint8)
    here = Descriptors(np.array([buffer.ctypes.data], np.uint64), np.array([nbytes], np.uint64))
    there = Descriptors(np.array([address], np.uint64), here.nbytes)
    ScatterCopy("read", pid, here, there).advance(nbytes)
    return buffer.tobytes()


def permit_same_user() -> None:
    """Let processes of this user reach this one where Yama would keep them out."""
    # Fails where there is no Yama: nothing to permit then.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def probe() -> Availability:
    """Say whether one process may copy from another one here."""
    if _libc is None:
        return Availability(
            False,
            f"it needs the cross-memory calls of 64-bit Linux, this is {sys.platform}",
            "Choose another transport.",
        )
    token = np.frombuffer(os.urandom(16), np.uint8)
    try:
        os.close(os.pidfd_open(os.getpid()))
        read_bytes(os.getpid(), token.ctypes.data, token.nbytes)
    except OSError as error:
        return Availability(
            False,
            f"the kernel refuses process_vm_readv or pidfd_open ({reason(error)})",
            "Linux 5.3 or newer is needed; in a container: docker run --cap-add=SYS_PTRACE",
        )
    return _probe_yama()


def _probe_yama() -> Availability:
    # A process may always read itself, so Yama's verdict about others has to be looked up.
    try:
        scope = int(_YAMA.read_text())
    except (OSError, ValueError):
        return Availability(True)
    # 1 is lifted by `permit_same_user`, 2 by a capability, 3 by nothing short of a reboot.
    if scope <= 1 or (scope == 2 and _may_trace()):
        return Availability(True)
    return Availability(
        False, f"Yama forbids access to other processes (ptrace_scope is {scope})", PERMISSION_HINT
    )


def _may_trace() -> bool:
    try:
        lines = _STATUS.read_text().splitlines()
        effective = next(line for line in lines if line.startswith("CapEff:"))
        return bool(int(effective.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    except (OSError, ValueError, IndexError, StopIteration):
        return False
