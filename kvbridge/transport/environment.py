"""Environment variables that UCX has to see, whoever brings it and whatever was loaded before.

UCX takes most of its configuration from the environment, and several copies of it may live in one
process: NIXL's own, that of ``ucxx``, the system's. Each is told here what it needs, for as long as
it is loaded or an agent is opened; afterwards the environment of the process is as it was, since
what one library needs would change another silently.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# Each is set only if unset, so that the user has the last word.
UCX_VARIABLES = {
    # The EFA module brings the system's libefa and with it a second libnl, which crashes the
    # process when it exits. On a machine with EFA set UCX_MODULES=all.
    "UCX_MODULES": "^efa",
    # UCX copies within a host by CMA only if it never switches to rendezvous.
    "UCX_RNDV_THRESH": "inf",
    # The default of 8 KiB halves the speed of reads over TCP.
    "UCX_TCP_TX_SEG_SIZE": "64k",
    "UCX_TCP_RX_SEG_SIZE": "64k",
    # By default UCX waits in connect(): two minutes for a host that has vanished, and everything
    # else that the agent does, with whomever, waits behind it.
    "UCX_TCP_CONN_NB": "y",
    # UCX would rewrite mmap, munmap and others in the running process, to learn which memory is
    # given back, for caches of registered memory that nothing here uses. That takes 100 ms for each
    # agent, and with NIXL a reader loses about 1.7 KB of memory with each request.
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    # UCX would warn about variables that are meant for another copy of it.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # By default UCX takes the signals of a crash, and SIGHUP, away from whoever handles them.
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
}

# What importing ucxx, or ucx-py, sets for its own use; nobody has asked for that here.
_SET_BY_UCXX = {
    "UCX_MAX_RNDV_RAILS": "1",
    "UCX_MEMTYPE_CACHE": "n",
    "UCX_PROTO_ENABLE": "n",
    "UCX_RNDV_FRAG_MEM_TYPE": "cuda",
    "UCX_RNDV_THRESH": "8192",
}
_UCXX_MODULES = ("ucxx", "ucp")

_changing = threading.RLock()


@contextlib.contextmanager
def ucx_environment(**more: str) -> Iterator[None]:
    """Hold the environment as a copy of UCX needs it, while that is loaded or opens an agent.

    Args:
        more: Variables beside :data:`UCX_VARIABLES`, each also set only if unset.
    """
    ours = {**UCX_VARIABLES, **more}
    with _changing:
        before = {name: os.environ.get(name) for name in (*ours, *_SET_BY_UCXX)}
        for name in _set_by_ucxx():
            del os.environ[name]
        for name, value in ours.items():
            os.environ.setdefault(name, value)
        try:
            yield
        finally:
            for name, old in before.items():
                if old is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = old


def _set_by_ucxx() -> list[str]:
    if not any(module in sys.modules for module in _UCXX_MODULES):
        return []
    given = _given_at_start()
    return [
        name
        for name, value in _SET_BY_UCXX.items()
        if os.environ.get(name) == value and name not in given
    ]


def _given_at_start() -> set[str]:
    """Return the variables that the process was started with: those are the user's."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return set()
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries}
