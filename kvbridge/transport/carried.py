"""Finding out whether bytes went over TCP, for libraries that do not say what carries them."""

import errno
import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = struct.Struct("@120xQ")  # of the kernel's struct tcp_info
_CLOSED = {errno.EBADF, errno.ENOENT}
_NO_TCP = {errno.ENOPROTOOPT, errno.ENOTSOCK, errno.EOPNOTSUPP}


def tcp_nbytes_sent() -> dict[int, int]:
    """Return how many bytes this process has sent over each TCP socket that it has open.

    Only what the other side has acknowledged; by the time it answers, that is all. Whoever opened
    a socket, it is there: compare socket by socket, for others come, go and send meanwhile.

    Returns:
        The bytes by the inode of the socket, which may have several descriptors.

    Raises:
        OSError: The kernel does not tell.
    """
    sent = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if entry.readlink().name.startswith("socket:"):
                inode, nbytes = _sent(int(entry.name))
                sent[inode] = nbytes
        except OSError as error:
            if error.errno not in _CLOSED | _NO_TCP:
                raise
    return sent


def _sent(descriptor: int) -> tuple[int, int]:
    # Asked of one copy: the descriptor's number may mean another socket from one call to the next.
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        inode = os.fstat(copy.fileno()).st_ino
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    if len(info) < _BYTES_ACKED.size:
        raise OSError(errno.ENOSYS, "the kernel does not count the bytes of a TCP socket")
    return inode, int(_BYTES_ACKED.unpack(info)[0])
