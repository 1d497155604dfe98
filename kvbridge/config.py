"""Typed configuration: plain mappings in, checked values out.

Every configurable thing of KVBridge, transports of third parties included, declares a subclass
of :class:`Config`. Unknown keys and wrong types are refused with the name of the key, before
anything is opened.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect, structs

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
    for field in structs.fields(kind):
        nested = field.type
        value = given.get(field.name)
        if isinstance(nested, type) and issubclass(nested, Config) and isinstance(value, Mapping):
            given[field.name] = parse_config(nested, value, where=f"{where}, {field.name}")
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {_plain(str(error), kind, given)}") from error


def _plain(message: str, kind: type[Config], given: Mapping[str, Any]) -> str:
    """Say in words which option a message is about, what it was given, and what it may be."""
    said, at, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    if not at:
        return message
    said = said[0].lower() + said[1:].replace("`", "")
    steps = re.findall(r"[\w-]+|\.{3}", path)  # of "faults[0].what", or "names[...]"
    if allowed := list(_allowed(inspect.type_info(kind), steps)):
        said += f"; allowed: {', '.join(map(repr, allowed))}"
    value = _at(given, path.split("."))
    given_as = "" if value is _MISSING else f" is {value!r:.80}"
    return f"option {path!r}{given_as}: {said}"


_MISSING = object()


def _at(given: object, path: Sequence[str]) -> object:
    """Return what was given at the end of a path of names, if there is such a path."""
    for step in path:
        if not isinstance(given, Mapping) or step not in given:
            return _MISSING
        given = given[step]
    return given


def _allowed(node: inspect.Type, path: Sequence[str]) -> Iterator[Any]:
    """Yield the values of an enumeration that lies at the end of a path within a type."""
    match node:
        case inspect.Metadata():
            yield from _allowed(node.type, path)
        case inspect.UnionType():
            for one in node.types:
                yield from _allowed(one, path)
        case inspect.LiteralType() if not path:
            yield from node.values
        case inspect.EnumType() if not path:
            yield from (member.value for member in node.cls)
        case inspect.StructType() if path:
            for field in node.fields:
                if field.encode_name == path[0]:
                    yield from _allowed(field.type, path[1:])
        case inspect.CollectionType() | inspect.VarTupleType() | inspect.DictType() if path:
            inner = node.value_type if isinstance(node, inspect.DictType) else node.item_type
            yield from _allowed(inner, path[1:])


def check_timeout(timeout_s: float, what: str, *, or_zero: bool = False) -> float:
    """Refuse waits that are no time: negative, endless, or not a number.

    Args:
        timeout_s: How long to wait.
        what: What it is, for the error message.
        or_zero: Whether 0 is fine, which does not wait.

    Raises:
        ConfigError: It is not between 0 and a day.
    """
    given: object = timeout_s
    is_time = isinstance(given, int | float) and 0 <= given <= TIMEOUT_MAX_S
    if not is_time or (not given and not or_zero):
        least = "at least" if or_zero else "above"
        raise ConfigError(
            f"{what} {timeout_s} must be {least} 0 and at most {TIMEOUT_MAX_S:g} seconds"
        )
    return timeout_s


def check_writable(path: Path, what: str) -> None:
    """Refuse a file that could not be written later, before minutes are spent on what goes into it.

    Args:
        path: The file; it need not exist.
        what: What it is, for the error message, such as ``"--report"``.

    Raises:
        ConfigError: It cannot be written; the message says why.
    """
    why = ""
    if not path.name or path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this user may not"
    if why:
        raise ConfigError(
            f"{what} {path} cannot be written: {why}; name a file in a folder of yours"
        )


def _suggest(key: str, known: tuple[str, ...]) -> str:
    if not known:
        return "it takes no options"
    close = difflib.get_close_matches(key, known, n=1)
    listed = ", ".join(sorted(known))
    return f"did you mean {close[0]!r}? known: {listed}" if close else f"known: {listed}"
