"""The processes of the agents: ``python -m kvbridge.testing.peer CONTROL_DESCRIPTOR``.

Started by the suite only, as a server that loads what every agent needs, and forks a process for
each. No transport and no vendor library is loaded before that. The process then makes itself what
a new interpreter would be, and ends like one: with all that runs at an interpreter's end.
"""

import faulthandler
import gc
import importlib
import json
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import current_process

from kvbridge.namespaces import enter

_REQUEST_NBYTES = 1 << 20
_DESCRIPTORS_MAX = 16
_SHIFT_NBYTES_MAX = 1 << 35
_REAP_S = 0.01
"""Linux tells of an end while it still clears up after the last thread. Who takes the process away
at once makes it do so once more at the same time, and spins in the kernel: for seconds where many
processes want the processor."""


def main() -> None:
    """Serve until the suite says exit, or has ended."""
    with socket.socket(fileno=int(sys.argv[1])) as control:
        path = control.recv(_REQUEST_NBYTES)
        if not path:
            return  # the suite has ended
        sys.path[:] = json.loads(path)
        from kvbridge.testing.serve import serve

        gc.collect()
        gc.freeze()  # the collectors of all children would copy what is shared with them
        descriptors = _fork_on_request(control)
    if not descriptors:
        return
    pipe_descriptor, memory_descriptor, *namespaces = _inherit(*descriptors)
    with Connection(pipe_descriptor) as pipe:
        environment, sys.path[:], source = pipe.recv()
        _begin_anew(environment)
        _shift = mmap.mmap(-1, _random_nbytes(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        enter(namespaces)
        serve(pipe, source, memory_descriptor)


def _fork_on_request(control: socket.socket) -> list[int]:
    """Fork for each request; returns in the children, with what they are given, and at the end."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ended, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    lives: dict[int, Connection] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _tell_ends(lives)
        if control.fileno() not in ready:
            continue
        _, given, _, _ = socket.recv_fds(
            control, _REQUEST_NBYTES, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not given:
            return []
        life = Connection(given.pop(0))
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (ended, note):
                os.close(descriptor)
            for other in (life, *lives.values()):
                other.close()
            return given
        for descriptor in given:
            os.close(descriptor)
        lives[pid] = life
        _tell(life, pid)


def _tell_ends(lives: dict[int, Connection]) -> None:
    """Tell how processes have ended, and close their pipes when nothing is left of them."""
    ended = []
    for pid, life in lives.items():
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            exited = end.si_code == os.CLD_EXITED
            _tell(life, end.si_status if exited else -end.si_status)
            ended.append(pid)
    if ended:
        time.sleep(_REAP_S)
    for pid in ended:
        os.waitpid(pid, 0)
        lives.pop(pid).close()


def _tell(life: Connection, number: int) -> None:
    try:
        life.send(number)
    except BrokenPipeError:
        return  # nobody asks any more


def _inherit(out: int, error: int, home: int, *others: int) -> tuple[int, ...]:
    """Take over standard output and error, and the directory; returns the other descriptors."""
    os.dup2(out, 1)
    os.dup2(error, 2)
    os.fchdir(home)
    for descriptor in (out, error, home):
        os.close(descriptor)
    return others


def _begin_anew(environment: dict[str, str]) -> None:
    """Undo what a server hands down that an interpreter finds out, or draws, when it starts."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    importlib.invalidate_caches()
    current_process().authkey = secrets.token_bytes(32)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the suite asks a process that hangs where it is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _random_nbytes() -> int:
    """Return by how much to shift all later mappings, so that siblings have them elsewhere."""
    return (1 + secrets.randbelow(_SHIFT_NBYTES_MAX // mmap.PAGESIZE)) * mmap.PAGESIZE


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError, EOFError):
        os._exit(1)  # the suite was interrupted, or has ended
