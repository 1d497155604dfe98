"""The options of a transport in words, from the class that declares them."""

import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from msgspec import NODEFAULT, structs
from msgspec import inspect as types

from kvbridge.config import Config

_NAMES: dict[type[types.Type], str] = {
    types.BoolType: "true or false",
    types.IntType: "whole number",
    types.FloatType: "number",
    types.StrType: "text",
    types.NoneType: "null",
    types.DictType: "mapping",
    types.StructType: "mapping",
}
_ENTRY = re.compile(r"^(\w+): ", re.MULTILINE)
_ROLE = re.compile(r":\w+(?::\w+)?:`~?(?:[\w.]*\.)?(\w+)`")


class Option(NamedTuple):
    """One option.

    Attributes:
        name: Its name.
        kind: What it may be.
        default: What it is if it is not given, as JSON; empty where it must be given.
        text: What it means, as its class describes it; empty if that does not.
    """

    name: str
    kind: str
    default: str
    text: str


def options_of(kind: type[Config]) -> list[Option]:
    """Return the options that a configuration class declares, and its bases."""
    texts = _texts(kind)
    return [
        Option(field.name, _kind(types.type_info(field.type)), _default(field), texts[field.name])
        for field in structs.fields(kind)
    ]


def _default(field: structs.FieldInfo) -> str:
    default = field.default
    if default is NODEFAULT and field.default_factory is not NODEFAULT:
        default = field.default_factory()
    return "" if default is NODEFAULT else msgspec.json.encode(default).decode()


def _kind(node: types.Type) -> str:
    match node:
        case types.Metadata():
            return _kind(node.type)
        case types.UnionType():
            return " or ".join(_kind(one) for one in node.types)
        case types.LiteralType():
            return ", ".join(map(str, node.values[:-1])) + f" or {node.values[-1]}"
        case types.IntType() | types.FloatType():
            return _NAMES[type(node)] + "".join(_bounds(node))
        case types.CollectionType() | types.VarTupleType():
            return f"list, each a {_kind(node.item_type)}"
    return _NAMES.get(type(node), "value")


def _bounds(node: types.IntType | types.FloatType) -> Iterator[str]:
    for bound, words in (
        (node.ge, "from"),
        (node.gt, "above"),
        (node.le, "to"),
        (node.lt, "below"),
    ):
        if bound is not None:
            yield f" {words} {bound:g}" if isinstance(bound, float) else f" {words} {bound}"


def _texts(kind: type[Config]) -> dict[str, str]:
    """Return what docstrings of Google's style say of each option."""
    texts = dict.fromkeys(kind.__struct_fields__, "")
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")
        # What follows the section is not indented.
        lines = inspect.cleandoc(re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0])
        _, *found = _ENTRY.split(lines)
        for name, text in zip(found[::2], found[1::2], strict=True):
            if name in texts:
                texts[name] = _ROLE.sub(r"\1", " ".join(text.split()))
    return texts
