"""A network namespace for tests of transports that listen to everybody.

The calling thread enters it, and so do all threads and processes that it starts from then on;
what was running stays where it is.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvbridge.errors import TransportUnavailableError
from kvbridge.testing.network import Namespace


@contextmanager
def private_network() -> Iterator[None]:
    """Be in a network namespace of one's own, with nothing but a loopback device.

    Raises:
        TransportUnavailableError: Only root can enter one from a process that runs.
    """
    if os.geteuid() != 0:
        raise TransportUnavailableError("only root can enter a network namespace,", "Be root.")
    namespace = Namespace()
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(namespace.descriptors[-1])
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)
        namespace.close()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter the network namespace: {os.strerror(number)}")
