"""The library libucp, loaded."""

import ctypes as c

from kvbridge_ucx.abi import PROTOTYPES
from kvbridge_ucx.translate import OK, UcxError

# Measured: 1.13 and 1.15 abort the process where a peer is killed, from 1.17 on it survives.
API_VERSION = (1, 17)


class Ucp:
    """A loaded libucp: one attribute for each function, and which version it is.

    Attributes:
        short: The same functions, called without giving the interpreter's lock away.
        version: Major and minor.
    """

    def __init__(self, path: str) -> None:
        """Load the file and declare the functions."""
        self.path = path
        self.calls, self.short = c.CDLL(path), c.PyDLL(path)
        for library in (self.calls, self.short):
            for name, (result, arguments) in PROTOTYPES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        numbers = (c.c_uint * 3)()
        at = c.addressof(numbers)
        self.calls.ucp_get_version(at, at + 4, at + 8)
        self.version = (int(numbers[0]), int(numbers[1]))

    def check(self, status: int, call: str) -> None:
        """Raise :class:`UcxError` unless the status is OK."""
        if status != OK:
            raise UcxError(status, self.text(status), call)

    def text(self, status: int) -> str:
        """Return UCX's own words for a status."""
        words: bytes = self.calls.ucs_status_string(status)
        return words.decode()
