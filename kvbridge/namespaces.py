"""Network namespaces of one's own: whoever is in none of them reaches no port in there.

For processes that belong together and shall not be reached by others, and for transports that
listen on every interface and ask nobody who he is. Works for root, and for other users where the
kernel lets them make user namespaces.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


class NetworkNamespace:
    """A network namespace with nothing but a loopback device.

    Attributes:
        descriptors: What a process enters, in this order.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            TransportUnavailableError: The kernel does not let this user.
        """
        self.descriptors: tuple[int, ...] = ()
        maker = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],  # quicker than -m, and needs no path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with maker:
            kinds = maker.stdout.readline().decode().split() if maker.stdout else []
            if not kinds:
                _, said = maker.communicate()
                raise _unavailable(
                    "no network namespace of its own can be made here: "
                    f"{' '.join(said.decode().strip().splitlines()[-1:])}.",
                    "Run as root, or allow user namespaces (sysctl user.max_user_namespaces).",
                )
            self.descriptors = tuple(
                os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in kinds
            )
            maker.communicate()

    @property
    def can_be_left(self) -> bool:
        """Whether there is a way back: none leads out of a user namespace, which others need."""
        return len(self.descriptors) == 1

    def close(self) -> None:
        """Forget it; it ends with the last process in it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


def enter(descriptors: Iterable[int]) -> None:
    """Move the calling thread, and all that it starts from then on, into namespaces.

    A user namespace is entered by a process of one thread only.

    Raises:
        TransportUnavailableError: The kernel does not let it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            said = os.strerror(ctypes.get_errno())
            raise _unavailable(f"the network namespace cannot be entered: {said}.")


@contextlib.contextmanager
def private_network(*, for_good: bool = False) -> Iterator[None]:
    """Be in a new network namespace, with all threads and processes that are started within.

    What was running stays where it is.

    Args:
        for_good: Whether the process may stay in there afterwards, as others than root must.

    Raises:
        TransportUnavailableError: None can be made, or entered, or left again.
    """
    with contextlib.closing(NetworkNamespace()) as namespace:
        if not (namespace.can_be_left or for_good):
            raise _unavailable(
                "this process could not leave a network namespace again.", "Run as root."
            )
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(namespace.descriptors)
            try:
                yield
            finally:
                if namespace.can_be_left:
                    enter([home])
        finally:
            os.close(home)


def _unavailable(message: str, hint: str = "") -> Exception:
    from kvbridge.errors import TransportUnavailableError  # not found where this file runs alone

    return TransportUnavailableError(message, hint)


def _make() -> None:
    """Enter a new namespace, say which kinds it took, and stay until the input is closed."""
    kinds = _unshare()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh14x", answer)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))
    sys.stdout.write(f"{kinds}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _unshare() -> str:
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.unshare(_CLONE_NEWNET):
        return "net"
    if ctypes.get_errno() != errno.EPERM or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as map_file:  # noqa: PTH123
            map_file.write(line)
    return "user net"


if __name__ == "__main__":
    _make()
