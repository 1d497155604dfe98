"""The TCP sockets of this process, which Mooncake opens and says nothing of.

Mooncake calls a copy failed as soon as *its* end of the connection is closed. The peer's end may
be open for longer, and hold bytes that are still to be written to the peer's memory: with a peer
that was stopped, 65281 of 65536 bytes came after the failure. So the peer itself is asked.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

_TCP_ESTABLISHED, _TCP_LISTEN = 1, 10


def listening_ports() -> frozenset[int]:
    """Return the ports that this process listens on."""
    return frozenset(port for port, state in _sockets() if state == _TCP_LISTEN)


def winding_up(ports: frozenset[int]) -> bool:
    """Whether a connection to one of these ports was closed there but is still open here."""
    return any(
        port in ports and state not in (_TCP_ESTABLISHED, _TCP_LISTEN) for port, state in _sockets()
    )


def _sockets() -> Iterator[tuple[int, int]]:
    """Local port and state of each TCP socket."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (numbers, not paths)
        with suppress(OSError):  # it was closed meanwhile, or is no socket, or not of TCP
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                    yield sock.getsockname()[1], state
