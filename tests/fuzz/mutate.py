"""Changing real messages so that they stay nearly real: what random bits hardly ever reach."""

import json
import math
import re
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

HEADERS = tuple(
    bytes([kind]) + b"\xff" * (4 if wide else 2) + tail
    for kind, wide, tail in [
        (0xC6, True, b""),  # bytes
        (0xDB, True, b""),  # text
        (0xDD, True, b"\xc0"),  # list
        (0xDF, True, b"\xa1a"),  # table
        (0xC9, True, b"\x05"),  # extension
        (0xC5, False, b""),
        (0xDA, False, b""),
        (0xDC, False, b"\x90"),
        (0xDE, False, b"\xa0"),
    ]
)
"""Headers that promise gigabytes, or 65,535 entries, and do not bring them."""

ODDITIES = tuple(
    bytes.fromhex(each)
    for each in [
        "c1",  # no type at all
        "d6ff00000001",  # time stamps: of 32, 64 and 96 bits, and impossible ones
        "d7ffffffffffffffffff",
        "c70cff000000007fffffffffffffff",
        "c705ff0000000000",
        "d40500",  # an unknown extension
        "c70005",
        "a2fffe",  # what is no UTF-8, and half a surrogate pair
        "a3eda080",
        "8191c0c0",  # tables with lists, tables and numbers as keys
        "818081c0c0",
        "81cb7ff8000000000000c0",
        "80045d942e",  # a pickle
    ]
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    1e300,
    math.nan,
    math.inf,
    "",
    "\0",
    "x" * 300,
    "state",
    b"",
    b"\xc1",
    b"\x81\xa1a\xc0",
    [],
    {},
    [[]],
    {"": {}},
    [None] * 20,
)


Place = tuple[Any, int | None]
"""A container in a message, and an index in it; None where it has only one entry."""


class Pairs(list[tuple[Any, Any]]):
    """A table whose keys may come twice, and be anything."""


class Inside:
    """A message within bytes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Written:
    """A value as it is on the wire."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def parse(data: bytes) -> Any:
    """Return a message as something that can be changed anywhere."""
    return _open(msgspec.msgpack.decode(data))


def _open(value: Any) -> Any:
    if isinstance(value, dict):
        return Pairs((key, _open(each)) for key, each in value.items())
    if isinstance(value, list):
        return [_open(each) for each in value]
    if isinstance(value, bytes) and value[:1] and value[0] >> 4 in {8, 13}:
        try:
            return Inside(parse(value))
        except (msgspec.MsgspecError, RecursionError):
            return value
    return value


def write(value: Any) -> bytes:
    """Write what :func:`parse` has read, and what became of it."""
    if isinstance(value, Written):
        return value.data
    if isinstance(value, Inside):
        return msgspec.msgpack.encode(write(value.value))
    if isinstance(value, Pairs):
        return struct.pack(">BI", 0xDF, len(value)) + b"".join(
            write(key) + write(each) for key, each in value
        )
    if isinstance(value, list):
        return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(write, value))
    return msgspec.msgpack.encode(value)


def mutated(data: bytes, seed: int, most: int = 3) -> bytes:
    """Return a message with a few changes in its structure, and now and then in its bytes."""
    random = Random(seed)
    try:
        value: Any = [parse(data)]
    except (msgspec.MsgspecError, RecursionError):
        return flipped(data, random)
    for _ in range(random.randint(1, most)):
        places = list(_places(value))
        _change(random.choice(places), places, random)
    written = write(value[0])
    return flipped(written, random) if random.random() < 0.1 else written


JSON_VALUES = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "5600.0",
        "1e400",
        "NaN",
        "Infinity",
        "-0.0",
        "9" * 25,
        "9" * 4300,
    ),
    *('""', '"\\ud800"', '"\\u0000"', '"5600"', '"::1"', '"a;tcp://b"', '"' + "x" * 2000 + '"'),
    *("[]", "{}", "[[]]", "[1]", "[true]", '{"a":{}}', "[" * 900 + "]" * 900),
)


def mutated_json(data: bytes, seed: int) -> bytes:
    """Return JSON with another value in the place of one or two."""
    random = Random(seed)
    try:
        text = json.dumps(json.loads(data))
    except (ValueError, RecursionError):
        return flipped(data, random)
    for _ in range(random.randint(1, 2)):
        values = list(re.finditer(r'(?<=: )("[^"]*"|[^][{},"]+)|(?<=\[)[0-9]+|\[.*?\]', text))
        if values:
            old = random.choice(values)
            text = text[: old.start()] + random.choice(JSON_VALUES) + text[old.end() :]
    written = text.encode()
    return flipped(written, random) if random.random() < 0.1 else written


def flipped(data: bytes, random: Random) -> bytes:
    """Return a message with a bit flipped, cut short, or with something in front or behind."""
    if not data:
        return random.randbytes(8)
    at = random.randrange(len(data))
    match random.randrange(4):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data + random.randbytes(random.randrange(1, 9))
        case _:
            return data[:at] + random.choice((*HEADERS, *ODDITIES)) + data[at:]


def _places(value: Any) -> Iterator[Place]:
    """Yield every container in a message with each index in it."""
    if isinstance(value, Inside):
        yield value, None
        yield from _places(value.value)
    elif isinstance(value, Pairs):
        for i, (_, each) in enumerate(value):
            yield value, i
            yield from _places(each)
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield value, i
            yield from _places(each)


def _get(holder: Any, at: int | None) -> Any:
    if isinstance(holder, Inside):
        return holder.value
    if isinstance(holder, Pairs) and at is not None:
        return holder[at][1]
    return holder[at]


def _put(holder: Any, at: int | None, value: Any) -> None:
    if isinstance(holder, Inside):
        holder.value = value
    elif at is not None:
        holder[at] = (holder[at][0], value) if isinstance(holder, Pairs) else value


def _change(place: Place, places: list[Place], random: Random) -> None:
    holder, at = place
    old = _get(holder, at)
    many = isinstance(holder, list)
    match random.randrange(9):
        case 0 if many and at is not None and len(holder) > 1:
            del holder[at]
        case 1 if many and at is not None:
            holder.insert(at, holder[at])  # in a table: a key that comes twice
        case 2:
            other = Written(write(_get(*random.choice(places))))
            _put(holder, at, other if random.random() < 0.5 else [old])
        case 3 | 4 if isinstance(old, int):
            _put(holder, at, random.choice([old + 1, old - 1, -old, 2 * old, old << 32]) % 2**63)
        case 5 if isinstance(holder, Pairs) and at is not None:
            key = random.choice(["type", "wire", "new", 7, None, b"k", Written(b"\x91\xc0")])
            holder[at] = (key, old)
        case 6:
            _put(holder, at, Written(random.choice((*HEADERS, *ODDITIES))))
        case 7:
            deep = random.choice([4, 5, 40, 330, 990, 5000])
            unit = random.choice([b"\x91", b"\x81\xa1a"])
            _put(holder, at, Written(unit * deep + b"\xc0"))
        case _:
            _put(holder, at, Written(msgspec.msgpack.encode(random.choice(VALUES))))
