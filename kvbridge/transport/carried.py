"""Finding out whether bytes went over TCP, for libraries that do not say what carries them."""

import errno
import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = struct.Struct("@120xQ")  # of the kernel's struct tcp_info
_CLOSED = {errno.EBADF, errno.ENOENT}
_NO_TCP = {errno.ENOPROTOOPT, errno.ENOTSOCK, errno.EOPNOTSUPP}


def tcp_nbytes_sent() -> int:
    """Return how many bytes this process has sent over the TCP sockets that it has open.

    Only what the other side has acknowledged; by the time it answers, that is all. Whoever opened
    a socket, it counts, so the number may grow by more than what was sent on purpose.

    Raises:
        OSError: The kernel does not tell.
    """
    return sum(_sent(int(entry.name)) for entry in Path("/proc/self/fd").iterdir())


def _sent(descriptor: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):  # noqa: PTH115
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    except OSError as error:
        if error.errno in _CLOSED | _NO_TCP:
            return 0
        raise
    if len(info) < _BYTES_ACKED.size:
        raise OSError(errno.ENOSYS, "the kernel does not count the bytes of a TCP socket")
    return int(_BYTES_ACKED.unpack(info)[0])
