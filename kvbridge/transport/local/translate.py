"""What the kernel's errors mean here: the one table."""

import errno
from typing import NamedTuple

from kvbridge.errors import PeerLostError, TransportError, TransportUnavailableError

PERMISSION_HINT = (
    "Run both processes as the same user; in a container: docker run --cap-add=SYS_PTRACE; "
    "where Yama is on: sysctl kernel.yama.ptrace_scope=0"
)


class _Meaning(NamedTuple):
    reason: str
    error: type[TransportError] = PeerLostError


_FORBIDDEN = _Meaning(
    "the kernel forbids this process to touch the peer's memory", TransportUnavailableError
)
_GONE = _Meaning("peer gone: its process, or its agent, has ended")
_SILENT = _Meaning("the peer did not answer in time")

_MEANINGS: dict[int, _Meaning] = {
    errno.EPERM: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
    errno.ENOSYS: _Meaning("the kernel has no cross-memory calls", TransportUnavailableError),
    errno.EFAULT: _Meaning("memory of one side is not mapped, or may not be written"),
    errno.ENOMEM: _Meaning("the kernel has no memory for the copy", TransportError),
    errno.EMFILE: _Meaning("this process has no file descriptors left", TransportError),
    errno.ENFILE: _Meaning("this host has no file descriptors left", TransportError),
    errno.ESRCH: _GONE,
    errno.EPIPE: _GONE,
    errno.ECONNRESET: _GONE,
    errno.ECONNREFUSED: _Meaning(
        "nobody listens under its name: it has ended, or is in another network namespace"
    ),
    errno.ETIMEDOUT: _SILENT,
    errno.EAGAIN: _SILENT,
}


def _meaning(error: OSError) -> _Meaning:
    # A time-out of Python's own carries no number.
    number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or 0
    return _MEANINGS.get(number, _Meaning(f"the kernel says: {error.strerror or error}"))


def reason(error: OSError) -> str:
    """Return why an operation failed, for its handle."""
    return _meaning(error).reason


def peer_error(error: OSError, agent: str) -> TransportError:
    """Return what to raise when a peer cannot be reached."""
    meaning = _meaning(error)
    text = f"peer {agent} cannot be reached: {meaning.reason}"
    if meaning.error is TransportUnavailableError:
        return TransportUnavailableError(f"{text}.", PERMISSION_HINT)
    return meaning.error(f"{text}; fetch its agent info again")
