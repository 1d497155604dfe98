"""The one place that imports NIXL, and sees to what must be so meanwhile."""

import importlib
import importlib.util
import logging
import sys
import threading
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import TransportUnavailableError
from kvbridge.transport import Availability, Region, ucx_environment

HINT = (
    "Install it with: pip install 'kvbridge[nixl]' (CUDA 13: 'kvbridge[nixl-cu13]'; without a "
    "GPU, and without torch: pip install --no-deps nixl-cu12)"
)

# The package `nixl` only chooses between these two, and imports torch to do so.
PACKAGES = ("nixl_cu12", "nixl_cu13")

# Our logging level, and the words for it of NIXL and UCX. All of NIXL's errors reach us as
# exceptions, so it need not print them as well; UCX says why a device does not work.
_LEVELS = ((logging.DEBUG, "DEBUG", "info"), (logging.INFO, "WARN", "warn"))
_QUIET = ("FATAL", "error")

# How long NIXL's own thread sleeps when nothing moves. By default it never does, which takes a
# whole core from the engine, for each agent.
PROGRESS_DELAY_US = 100

_loading = threading.Lock()


class Request(Protocol):
    """NIXL's handle of one operation."""

    def release(self) -> None:
        """Give it back; a running operation may go on all the same."""


class Agent(Protocol):
    """What we use of ``nixl_agent``. Errors are raised, never returned."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object:
        """Return what :meth:`deregister_memory` takes."""

    def deregister_memory(self, dereg_list: object) -> None:
        """Take memory back."""

    def get_agent_metadata(self) -> bytes:
        """Return connection and memory of this agent."""

    def add_remote_agent(self, metadata: bytes) -> object:
        """Make a peer known; if this fails, the peer's name is of no use any more."""

    def remove_remote_agent(self, agent: str) -> None:
        """Disconnect; no error if it is not known."""

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object:
        """Make a list out of rows (address, length, device)."""

    def initialize_xfer(
        self, operation: str, local: object, remote: object, remote_agent: str, notif_msg: bytes
    ) -> Request:
        """Check and prepare an operation."""

    def transfer(self, handle: Request) -> str:
        """Post it; returns "DONE" or "PROC", within a host only once all is copied."""

    def check_xfer_state(self, handle: Request) -> str:
        """Return "DONE" or "PROC"; this is also what sends the notification."""

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        """Send a notification."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return the notifications that came, by sender."""


class Library(NamedTuple):
    """NIXL, loaded: its Python wrapper and the extension module that has the exceptions."""

    api: ModuleType
    bindings: ModuleType
    version: str

    def make_agent(self, name: str, device: str, num_threads: int) -> Agent:
        """Start an agent with the UCX backend on one network device."""
        # NIXL's own list of devices is for RDMA only: it appends a port to each name. This way
        # UCX_NET_DEVICES has precedence, which NixlConfig.chosen_device() takes care of.
        parameters = {"engine_config": f"NET_DEVICES={device}"}
        if num_threads:
            parameters["num_threads"] = str(num_threads)
        # NIXL's wrapper has no option for the delay, so the agent inside is replaced while it is
        # still empty.
        config = self.bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self.bindings.NIXL_THREAD_SYNC_RW
        with _environment():
            agent = self.api.nixl_agent(name, self.api.nixl_agent_config(backends=[]))
            agent.agent = self.bindings.nixlAgent(name, config)
            agent.create_backend("UCX", parameters)
        made: Agent = agent
        return made


def register(agent: Agent, region: Region, memory_type: str = "DRAM") -> object:
    """Register one region with NIXL; returns what deregisters it."""
    return agent.register_memory([(region.address, region.nbytes, region.device, "")], memory_type)


def availability() -> Availability:
    """Say whether NIXL can be found, without loading it."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"NIXL runs on Linux only, this is {sys.platform}")
    if not _installed():
        return Availability(False, f"none of {', '.join(PACKAGES)} is installed", HINT)
    return Availability(True)


def load() -> Library:
    """Prepare the environment and import NIXL.

    Raises:
        TransportUnavailableError: It is missing or cannot be loaded.
    """
    found = availability()
    if not found.ok:
        raise TransportUnavailableError(f"{found.reason}.", found.hint)
    package = _chosen(_installed())
    with _loading:
        ours_to_tame = package not in sys.modules
        raise_exceptions = logging.raiseExceptions
        try:
            with _environment():
                api = importlib.import_module(f"{package}._api")
                bindings = importlib.import_module(f"{package}._bindings")
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(
                f"{package} is installed but cannot be loaded: {error}.",
                f"Install it anew with: pip install --force-reinstall --no-deps "
                f"{package.replace('_', '-')}",
            ) from error
        if ours_to_tame:
            _tame_logging(raise_exceptions)
    return Library(api, bindings, _version(package))


def _installed() -> list[str]:
    return [name for name in PACKAGES if _can_be_found(name)]


def _can_be_found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # half imported, or somebody's import hook refuses it
        return False


def _chosen(installed: list[str]) -> str:
    """Prefer the build for the CUDA of a torch that is already loaded: two do not mix."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    wanted = f"nixl_cu{cuda.split('.')[0]}"
    return wanted if wanted in installed else installed[0]


def _environment() -> AbstractContextManager[None]:
    level = logging.getLogger("kvbridge_nixl").getEffectiveLevel()
    nixl, ucx = next((words[1:] for words in _LEVELS if level <= words[0]), _QUIET)
    return ucx_environment(NIXL_LOG_LEVEL=nixl, UCX_LOG_LEVEL=ucx)


def _tame_logging(raise_exceptions: bool) -> None:
    """Undo what importing NIXL does to the logging of the whole process."""
    logging.raiseExceptions = raise_exceptions
    logger = logging.getLogger("nixl")  # it came with a handler of its own, to stdout
    logger.handlers.clear()
    logger.propagate = True


def _version(package: str) -> str:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "unknown"
