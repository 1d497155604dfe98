"""The one place that imports Mooncake, and what must be so before it is imported."""

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import sys
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from kvbridge.errors import TransportUnavailableError
from kvbridge.transport import Availability

PACKAGE = "mooncake"
DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
PIP_HINT = (
    "Install it with: pip install 'kvbridge[mooncake]' (CUDA 12: 'kvbridge[mooncake-cuda12]', "
    "CUDA 13: 'kvbridge[mooncake-cuda13]'; one of them only, and on Debian also: "
    "apt-get install --no-install-recommends libibverbs1 libnuma1 libcurl4)"
)

# What the wheel needs from the system, and the Debian package that has it.
SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}

# Sockets that Mooncake opens to each peer: its default, and the most that it can be told.
LANES, LANES_MAX = 4, 16

# A day: nothing that runs into it is still of use to anybody.
_NEVER_S = "86400"

# Each is set only if unset, so that the user has the last word.
ENVIRONMENT = {
    # Otherwise it takes whatever RDMA device it finds, whichever protocol it is told to use.
    "MC_FORCE_TCP": "1",
    # An operation with a peer that is merely stopped stays what it is, pending, instead of being
    # called failed after 30 s while its bytes still wait in the peer's sockets.
    "MC_TCP_STATUS_TIMEOUT_SEC": _NEVER_S,
    "MC_TCP_PROGRESS_TIMEOUT_SEC": _NEVER_S,
    # Beyond 1024 queued copies and another 1024 waiting for a second, it would fail them.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}

# Our logging level, Mooncake's word for it, and its logging library's number. What goes wrong
# reaches us as a number, so it need not be printed as well.
_LEVELS = ((logging.DEBUG, "INFO", 0), (logging.INFO, "WARNING", 1))
_QUIET = ("ERROR", 3)
_LEVEL_SYMBOL = "_ZN3fLI17FLAGS_minloglevelE"

_loading = threading.Lock()


class Engine(Protocol):
    """What we use of ``TransferEngine``. All numbers but 0 and the good status are errors.

    All of it crashes before ``initialize``, so :func:`Library.make_engine` is the only way to
    one. There is no call to cancel, to forget a peer or to shut down.
    """

    def get_rpc_port(self) -> int:
        """Return the port under which peers find it; the data port is another one."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Let peers read and write this memory."""

    def unregister_memory(self, buffer_addr: int) -> int:
        """Take memory back."""

    def send_probe(self, peer_server_name: str) -> int:
        """Ask a peer whether it is there. A silent one blocks this, and only this, for 61 s."""

    def batch_transfer_async_read(
        self, target_hostname: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> int:
        """Start to read; returns an id, 0 where nothing was started.

        The first call for a name asks that peer for its data port, and all other calls of the
        engine wait meanwhile, whatever their peer.
        """

    def transfer_submit_write(
        self, target_hostname: str, local: int, remote: int, length: int
    ) -> int:
        """Start to write, in the same manner; for reads there is no such call without lists."""

    def transfer_check_status(self, batch_id: int) -> int:
        """Return the status of the *first* copy of a batch: so ours have only one."""


class Library(NamedTuple):
    """Mooncake, loaded."""

    bindings: ModuleType
    version: str

    def make_engine(self, address: str) -> Engine | None:
        """Start an engine; None if it does not start."""
        engine = self.bindings.TransferEngine()
        failed = engine.initialize(address, "P2PHANDSHAKE", "tcp", "")
        return None if failed else engine

    @property
    def lanes(self) -> int:
        """How many sockets an engine opens to each peer."""
        asked = os.environ.get("MC_TCP_LANES_PER_PEER", "")
        return min(int(asked), LANES_MAX) if asked.isdigit() and int(asked) else LANES


def availability() -> Availability:
    """Say whether Mooncake can be found, without loading it."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"Mooncake runs on Linux only, this is {sys.platform}")
    if not _can_be_found():
        return Availability(False, f"none of {', '.join(DISTRIBUTIONS)} is installed", PIP_HINT)
    missing = [name for name in SYSTEM_LIBRARIES if not _on_this_system(name)]
    if missing:
        return Availability(False, f"Mooncake needs {', '.join(missing)}", _apt_hint(missing))
    return Availability(True)


def load() -> Library:
    """Prepare the environment and import Mooncake.

    Raises:
        TransportUnavailableError: It is missing or cannot be loaded.
    """
    found = availability()
    if not found.ok:
        raise TransportUnavailableError(f"{found.reason}.", found.hint)
    with _loading:
        level = logging.getLogger("kvbridge_mooncake").getEffectiveLevel()
        word, number = next((words[1:] for words in _LEVELS if level <= words[0]), _QUIET)
        ours_to_quieten = "MC_LOG_LEVEL" not in os.environ
        for name, value in {**ENVIRONMENT, "MC_LOG_LEVEL": word}.items():
            os.environ.setdefault(name, value)
        try:
            bindings = importlib.import_module(f"{PACKAGE}.engine")
        except (ImportError, OSError) as error:
            missing = [name for name in SYSTEM_LIBRARIES if name in str(error)]
            raise TransportUnavailableError(
                f"Mooncake is installed but cannot be loaded: {error}.",
                _apt_hint(missing) if missing else f"Install it anew. {PIP_HINT}",
            ) from error
        finally:
            if ours_to_quieten:  # it is read once; processes that we start choose for themselves
                del os.environ["MC_LOG_LEVEL"]
        if ours_to_quieten:
            _set_level(bindings, number)
    return Library(bindings, _version())


def _can_be_found() -> bool:
    try:
        found = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # half imported, or somebody's import hook refuses it
        return False
    folders = (found.submodule_search_locations if found else None) or ()
    return any(any(Path(folder).glob("engine*.so")) for folder in folders)


def _on_this_system(library: str) -> bool:
    """Look where the loader will look; dlopen would have to load it, and all that it needs."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(folder and (Path(folder) / library).exists() for folder in folders):
        return True
    try:
        return f"{library}\0".encode() in Path("/etc/ld.so.cache").read_bytes()
    except OSError:  # no such cache on this system: loading will tell
        return True


def _apt_hint(libraries: list[str]) -> str:
    packages = " ".join(SYSTEM_LIBRARIES[name] for name in libraries)
    return f"Install what is missing with: apt-get install --no-install-recommends {packages}"


def _set_level(bindings: ModuleType, number: int) -> None:
    """Set the level of Mooncake's logging library: its own variable knows none above ERROR."""
    with contextlib.suppress(OSError, ValueError):  # another build may lack the symbol
        ctypes.c_int.in_dll(ctypes.CDLL(bindings.__file__), _LEVEL_SYMBOL).value = number


def _version() -> str:
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return "unknown"
