"""The suite's side of the servers that fork the agents' processes.

What every agent needs is loaded once: a new process then costs a few milliseconds instead of the
start of an interpreter. What happens on the other side is in :mod:`kvbridge.testing.peer`.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from kvbridge.processes import uninterrupted

START_S = 60.0

_HEEDED_AT_START = ("GLIBC_TUNABLES", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")
"""Variables that a running interpreter heeds no more, or the beginnings of their names."""

_IN_TURN = 2
"""Siblings have much in common: the seed of their hashes, and where their libraries are mapped.
With more than one server, two agents that are started one after the other are no siblings."""

_Key = tuple[object, ...]
_servers: dict[_Key, list["ForkServer"]] = defaultdict(list)
_lock = threading.Lock()


class ForkedProcess:
    """A process that a server has forked for us: not our child, so the server tells its end."""

    def __init__(self, life: Connection) -> None:
        """Take the pipe through which the server tells its number and, later, how it ended."""
        self._life = life
        self._pid: int | None = None
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """Its number; waits until it is there."""
        if self._pid is None:
            self._pid = self._told(START_S)
            if self._pid is None:
                raise ChildProcessError(f"no process was forked within {START_S:g} s")
        return self._pid

    def wait(self, timeout_s: float) -> int | None:
        """Return how it ended, negative for a signal, or None if it is there after that time."""
        _ = self.pid
        if self._exit_code is None:
            deadline = time.monotonic() + timeout_s
            self._exit_code = self._told(timeout_s)
            if self._exit_code is not None:
                self._life.poll(max(0.0, deadline - time.monotonic()))  # its number is free again
                self._life.close()
        return self._exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if self.wait(0) is None:
            with contextlib.suppress(ProcessLookupError):  # its end is about to be told
                os.kill(self.pid, number)

    def _told(self, timeout_s: float) -> int | None:
        try:
            return int(self._life.recv()) if self._life.poll(timeout_s) else None
        except (EOFError, ConnectionResetError):
            raise ChildProcessError(
                "the server that forks the agents' processes has ended; its standard error says why"
            ) from None


class ForkServer:
    """A process that has loaded what every agent needs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; returns at once."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvbridge.testing.peer", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                # No thread but the first may be there when it forks.
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control.send(json.dumps(import_path()).encode())

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is of no use any more."""
        return self._process.poll() is not None

    def fork(self, *descriptors: int) -> ForkedProcess:
        """Have it fork a process with our standard output and error, our directory, and these."""
        life, theirs = Pipe(duplex=False)
        home = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            given = (theirs.fileno(), 1, 2, home, *descriptors)
            socket.send_fds(self._control, [b"fork"], given)
        finally:
            os.close(home)
            theirs.close()
        return ForkedProcess(life)

    def close(self) -> None:
        """End it; it has nothing to clean up."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return a server whose children can become what a new interpreter would be here and now."""
    with _lock:
        servers = _servers[_key(environment)]
        server = servers.pop(0) if len(servers) == _IN_TURN else ForkServer(environment)
        if server.has_ended:
            server.close()
            server = ForkServer(environment)
        servers.append(server)
        return server


def import_path() -> list[str]:
    """Return where modules are looked for, in words that are the same for every process."""
    return [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109  (a string is wanted)


def _key(environment: Mapping[str, str]) -> _Key:
    # A network namespace is handed down, too, and not everyone may enter another one.
    network = Path("/proc/thread-self/ns/net").stat().st_ino
    heeded = (item for item in environment.items() if item[0].startswith(_HEEDED_AT_START))
    return os.getpid(), network, *sorted(heeded)


@atexit.register
def _end_servers() -> None:
    for key, servers in _servers.items():
        if key[0] == os.getpid():  # those of a parent are not ours to end
            for server in servers:
                server.close()
