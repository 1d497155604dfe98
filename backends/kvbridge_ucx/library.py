"""The one place that loads UCX."""

import ctypes
import ctypes.util
import importlib.util
import logging
import os
import sys
import threading
from pathlib import Path

from kvbridge.errors import TransportUnavailableError
from kvbridge.transport import UCX_VARIABLES, Availability, ucx_environment
from kvbridge_ucx.config import INFINIBAND
from kvbridge_ucx.ucp import API_VERSION, Ucp

HINT = (
    "Install it with: pip install 'kvbridge[ucx]' (CUDA 13: 'kvbridge[ucx-cu13]'); these have no "
    f"RDMA, which needs UCX {API_VERSION[0]}.{API_VERSION[1]} or newer on the system, as with: "
    "apt-get install libucx0"
)

# What UCX is told for this agent alone. The environment of the process is left as it is: other
# users of UCX in it have other needs, and each variable would silently change them.
SETTINGS = {
    # Within a host UCX copies by CMA, if peers can be lost, only where it never uses rendezvous.
    "RNDV_THRESH": "inf",
    # Without these protocols there are no one-sided operations over TCP.
    "PROTO_ENABLE": "y",
}

# The same, unless the user has said otherwise in the environment.
DEFAULTS = {
    # Pieces copied by CMA in one call of progress; one would cost a call for every piece.
    "CMA_TX_QUOTA": "8",
    **{
        name: UCX_VARIABLES[f"UCX_{name}"]
        for name in ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "TCP_CONN_NB", "WARN_UNUSED_ENV_VARS")
    },
}

# Our logging level, and UCX's word for it. All of its errors reach us as codes, so it need not
# print them as well: to stdout, and even where a peer has merely ended.
_LEVELS = ((logging.DEBUG, "info"), (logging.INFO, "warn"))
_QUIET = "fatal"

_loading = threading.Lock()
_loaded: dict[str, Ucp] = {}


def availability() -> Availability:
    """Say whether a UCX can be found, without loading it."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"UCX runs on Linux only, this is {sys.platform}")
    if not (_wheel() or _system()):
        return Availability(
            False, "neither the package libucx nor a libucp of the system is installed", HINT
        )
    return Availability(True)


def load(chosen: str | None, device: str) -> Ucp:
    """Load UCX, once for each file.

    Args:
        chosen: The option ``library``.
        device: The network device that it will use.

    Raises:
        TransportUnavailableError: It is missing, too old, or cannot be loaded.
    """
    path = _path(chosen, device)
    with _loading:
        if path not in _loaded:
            _loaded[path] = _open(path)
        return _loaded[path]


def settings(device: str, tls: str | None) -> dict[str, str]:
    """Return what UCX is to be told, by its names without the prefix ``UCX_``."""
    level = logging.getLogger("kvbridge_ucx").getEffectiveLevel()
    words = next((word for limit, word in _LEVELS if level <= limit), _QUIET)
    defaults = {**DEFAULTS, "LOG_LEVEL": words}
    ours = {k: v for k, v in defaults.items() if f"UCX_{k}" not in os.environ}
    return {**SETTINGS, **ours, "NET_DEVICES": device, **({"TLS": tls} if tls else {})}


def _path(chosen: str | None, device: str) -> str:
    if chosen is None:
        rdma = (INFINIBAND / device.partition(":")[0]).exists()
        found = (_system() or _wheel()) if rdma else (_wheel() or _system())
    else:
        found = {"wheel": _wheel, "system": _system}.get(chosen, lambda: chosen)()
    if not found:
        raise TransportUnavailableError(f"UCX is not installed (option library={chosen!r}).", HINT)
    return found


def _wheel() -> str:
    try:
        spec = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):  # half imported, or somebody's import hook refuses it
        return ""
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "lib" / "libucp.so.0"
        if file.is_file():
            return str(file)
    return ""


def _system() -> str:
    # Costs 0.1 s: it asks the system's compiler.
    return ctypes.util.find_library("ucp") or ""


def _open(path: str) -> Ucp:
    try:
        with ucx_environment():  # some of it is read once, while the library is being loaded
            library = Ucp(path)
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        raise TransportUnavailableError(
            f"UCX at {path} cannot be loaded: {error}.",
            f"UCX {API_VERSION[0]}.{API_VERSION[1]} or newer is needed. {HINT}",
        ) from error
    if library.version < API_VERSION:
        found = ".".join(map(str, library.version))
        raise TransportUnavailableError(
            f"UCX at {path} has version {found}, and {API_VERSION[0]}.{API_VERSION[1]} or newer "
            "is needed.",
            HINT,
        )
    return library
