"""A network namespace that only the agents of one run are in.

For transports that listen on every interface and ask nobody who he is. Works for root, and for
other users where the kernel lets them make user namespaces.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys

from kvbridge.errors import TransportUnavailableError

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_READY = b"ready\n"


class Namespace:
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
            [sys.executable, "-m", "kvbridge.testing.network"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with maker:
            if maker.stdout is None or maker.stdout.readline() != _READY:
                _, said = maker.communicate()
                raise TransportUnavailableError(
                    "this transport is only run in a network namespace of its own, and none can "
                    f"be made here: {said.decode().strip().splitlines()[-1:]}.",
                    "Run as root, or allow user namespaces (sysctl user.max_user_namespaces).",
                )
            kinds = ("net",) if os.geteuid() == 0 else ("user", "net")
            self.descriptors = tuple(
                os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in kinds
            )
            maker.communicate()

    def close(self) -> None:
        """Forget it; it ends with the last process in it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


def _make() -> None:
    """Enter a new namespace, and stay until the standard input is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET | (_CLONE_NEWUSER if user else 0)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if user:
        for file, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as map_file:  # noqa: PTH123
                map_file.write(line)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sh14x", answer)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _make()
