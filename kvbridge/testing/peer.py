"""The process of an agent: ``python -m kvbridge.testing.peer CONTROL_DESCRIPTOR``.

Started by the suite only. What must happen before any library is loaded happens here.
"""

import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

from kvbridge.namespaces import enter


def main() -> None:
    """Serve until the suite says exit, or has ended."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the suite asks a process that hangs where it is
    with Connection(int(sys.argv[1])) as pipe:
        sys.path[:], source, memory_descriptor, namespace_descriptors = pipe.recv()
        enter(namespace_descriptors)
        from kvbridge.testing.serve import serve

        serve(pipe, source, memory_descriptor)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError, EOFError):
        os._exit(1)  # the suite was interrupted, or has ended
