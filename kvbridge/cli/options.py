"""Words of a command line that several commands share."""

import json
import re
from collections.abc import Iterable
from typing import Any

from kvbridge.errors import ConfigError

_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30}
_SIZE = re.compile(r"(\d{1,15})\s*(?:([KMG])(?:I?B)?|B)?", re.IGNORECASE)


def transport_options(texts: Iterable[str]) -> dict[str, Any]:
    """Read KEY=VALUE of every ``--option``; a value that is JSON (a number, true) counts as such.

    Raises:
        ConfigError: A text is none.
    """
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {text!r} must be KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def size(text: str) -> int:
    """Read a number of bytes such as ``4096``, ``64KiB`` or ``1M``; units are powers of 1024.

    Raises:
        ConfigError: It is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no number of bytes; write it as in 4096, 64KiB or 1MiB")
    return int(match[1]) << _SHIFTS[(match[2] or "").lower()]


def size_words(nbytes: int) -> str:
    """Write a number of bytes, in the largest unit that divides it."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
