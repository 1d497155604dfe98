"""Typed configuration: plain mappings in, checked values out.

Every configurable thing of KVBridge, transports of third parties included, declares a subclass
of :class:`Config`. Unknown keys and wrong types are refused with the name of the key, before
anything is opened.
"""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvbridge.errors import ConfigError


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration values: frozen, named fields only, unknown keys refused."""


TIMEOUT_MAX_S = 86_400.0

ConfigT = TypeVar("ConfigT", bound=Config)


def parse_config(
    kind: type[ConfigT], values: Mapping[str, Any] | Config | None, *, where: str
) -> ConfigT:
    """Turn a plain mapping into a checked configuration value.

    Args:
        kind: The configuration class to make.
        values: Keys and values as a user wrote them; None means all defaults; a ready value of
            ``kind`` is returned as it is.
        where: What is configured, for the error message, such as ``"transport 'nixl'"``.

    Raises:
        ConfigError: An unknown key, a wrong type, or a value out of its range.
    """
    if isinstance(values, kind):
        return values
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(
            f"{where}: options must be a mapping of names to values, got {type(values).__name__}"
        )
    given = dict(values or {})
    known = kind.__struct_fields__
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown option {key!r}; {_suggest(str(key), known)}")
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {_plain(str(error), given)}") from error


def _plain(message: str, given: Mapping[str, Any]) -> str:
    """Say in words which option a message is about, and what it was given."""
    said, at, path = message.partition(" - at `$.")
    key = path.rstrip("`")
    if not at or key not in given:
        return message
    return f"option {key!r} is {given[key]!r}: {said.replace('`', '').lower()}"


def check_timeout(timeout_s: float, what: str) -> float:
    """Refuse waits that are no time: negative, endless, or not a number.

    Args:
        timeout_s: How long to wait.
        what: What it is, for the error message.

    Raises:
        ConfigError: It is not between 0 and a day.
    """
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise ConfigError(
            f"{what} {timeout_s:g} must be above 0 and at most {TIMEOUT_MAX_S:g} seconds"
        )
    return timeout_s


def _suggest(key: str, known: tuple[str, ...]) -> str:
    if not known:
        return "it takes no options"
    close = difflib.get_close_matches(key, known, n=1)
    listed = ", ".join(sorted(known))
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
