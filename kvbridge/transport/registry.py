"""Finding transports by name, through the entry-point group ``kvbridge.transports``.

stevedore reads the entry points; it neither notices every duplicate nor keeps quiet about a
driver that cannot be imported, so both are handled here.
"""

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from stevedore import NamedExtensionManager

from kvbridge.config import Config, parse_config
from kvbridge.errors import ConfigError, TransportUnavailableError, UnknownTransportError
from kvbridge.transport.base import (
    TRANSPORT_API_VERSION,
    Availability,
    Transport,
    TransportConfig,
)

ENTRY_POINT_GROUP = "kvbridge.transports"


class TransportChoice(Config, frozen=True):
    """The two keys that choose a transport, the same in every configuration.

    Attributes:
        transport: Name of the transport.
        options: The transport's own options.
    """

    transport: str = "local"
    options: dict[str, Any] = {}


def transport_entry_points() -> dict[str, list[EntryPoint]]:
    """Return every entry point of the group by name; a sound name has exactly one."""
    # Asked for no name, the manager scans without importing a single driver.
    manager: NamedExtensionManager[Transport] = NamedExtensionManager(ENTRY_POINT_GROUP, names=[])
    found: dict[str, list[EntryPoint]] = {}
    for entry_point in manager.list_entry_points():
        # One distribution may be seen twice, through two paths; that is no conflict.
        same = found.setdefault(entry_point.name, [])
        if all(entry_point.value != other.value for other in same):
            same.append(entry_point)
    return dict(sorted(found.items()))


def get_transport(name: str) -> type[Transport]:
    """Return the class of a transport, without needing its vendor library.

    Raises:
        UnknownTransportError: Nobody offers that name; the message lists those that exist.
        ConfigError: Two distributions offer the name.
        TransportUnavailableError: The driver cannot be imported, or was written for another
            version of the transport contract.
    """
    found = transport_entry_points()
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownTransportError(
            f"no transport named {name!r}{meant} found: {', '.join(found) or 'none'}"
        )
    if len(found[name]) > 1:
        values = " and ".join(f"{e.value} ({_owner(e)})" for e in found[name])
        raise ConfigError(f"transport {name!r} is offered twice, by {values}; uninstall one")
    return _load(found[name][0])


def available_transports() -> dict[str, Availability]:
    """Return every transport found, with whether it can run here.

    A driver that cannot even be imported is listed with the reason; nothing is raised for it.
    """
    result: dict[str, Availability] = {}
    for name in transport_entry_points():
        try:
            result[name] = get_transport(name).probe()
        except (TransportUnavailableError, ConfigError) as error:
            result[name] = Availability(False, str(error), getattr(error, "hint", ""))
    return result


def open_transport(choice: Mapping[str, Any] | TransportChoice) -> Transport:
    """Make and open the transport that a configuration chooses.

    Args:
        choice: ``{"transport": name, "options": {...}}``; both keys have defaults.

    Raises:
        ConfigError: A key or an option is unknown or wrong.
        UnknownTransportError: Nobody offers that name.
        TransportUnavailableError: It cannot run here; ``hint`` says what would change that.
    """
    kind, options = check_transport(choice)
    transport = kind()
    transport.open(options)
    return transport


def check_transport(
    choice: Mapping[str, Any] | TransportChoice,
) -> tuple[type[Transport], TransportConfig]:
    """Find out all that can be wrong with a choice, without opening anything.

    Returns:
        The transport's class and its checked options.

    Raises:
        ConfigError: A key or an option is unknown or wrong.
        UnknownTransportError: Nobody offers that name.
        TransportUnavailableError: It cannot run here; ``hint`` says what would change that.
    """
    kind, options = check_choice(choice)
    availability = kind.probe()
    if not availability.ok:
        raise TransportUnavailableError(
            f"transport {kind.name!r} cannot run here: {availability.reason}.", availability.hint
        )
    return kind, options


def check_choice(
    choice: Mapping[str, Any] | TransportChoice,
) -> tuple[type[Transport], TransportConfig]:
    """Find out what is wrong with a choice wherever it is made; no vendor library is loaded.

    Returns:
        The transport's class and its checked options.

    Raises:
        ConfigError: A key or an option is unknown or wrong.
        UnknownTransportError: Nobody offers that name.
        TransportUnavailableError: Its driver cannot be imported.
    """
    chosen = parse_config(TransportChoice, choice, where="transport choice")
    kind = get_transport(chosen.transport)
    where = f"options of transport {kind.name!r}"
    return kind, parse_config(kind.config_type, chosen.options, where=where)


def _owner(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "unknown distribution"


def _load(entry_point: EntryPoint) -> type[Transport]:
    try:
        kind = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise TransportUnavailableError(
            f"transport {entry_point.name!r} ({entry_point.value}) cannot be imported: {error}."
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Transport)):
        raise TransportUnavailableError(
            f"entry point {entry_point.value} of transport {entry_point.name!r} is no Transport."
        )
    if kind.api_version != TRANSPORT_API_VERSION:
        raise TransportUnavailableError(
            f"transport {entry_point.name!r} was written for transport contract "
            f"{kind.api_version}, this KVBridge has {TRANSPORT_API_VERSION}.",
            f"Install a matching version of {_owner(entry_point)}.",
        )
    return kind
