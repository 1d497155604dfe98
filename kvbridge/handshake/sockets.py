"""How both ends of the side channel set up their sockets."""

from typing import Any

import zmq


def channel_socket(context: "zmq.Context[Any]", kind: int, max_nbytes: int) -> Any:
    """Return a socket that closes at once, speaks IPv6, and refuses what is too large.

    Args:
        context: Where it belongs.
        kind: ZeroMQ's socket type.
        max_nbytes: Largest message that it takes.
    """
    channel = context.socket(kind)
    channel.setsockopt(zmq.MAXMSGSIZE, max_nbytes)
    channel.setsockopt(zmq.IPV6, 1)
    channel.setsockopt(zmq.LINGER, 0)
    return channel
