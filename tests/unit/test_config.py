"""What the messages of a configuration say."""

import os
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from kvbridge.config import Config, check_writable, parse_config
from kvbridge.errors import ConfigError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(Config, frozen=True):
    what: Literal["fail", "drop"] = "fail"


class Sample(Config, frozen=True):
    mode: Literal["auto", "native"] = "auto"
    maybe: Literal["a", "b"] | None = None
    colour: Colour = Colour.RED
    many: tuple[Literal["x", "y"], ...] = ()
    named: dict[str, Literal["p", "q"]] = {}
    parts: tuple[Part, ...] = ()
    count: int = 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "FOO"}, "option 'mode' is 'FOO': invalid enum value 'FOO'; allowed: 'auto'"),
        ({"mode": 3}, "option 'mode' is 3: expected str, got int; allowed: 'auto', 'native'"),
        ({"maybe": "c"}, "option 'maybe' is 'c': invalid enum value 'c'; allowed: 'a', 'b'"),
        ({"colour": "green"}, "invalid enum value 'green'; allowed: 'red', 'blue'"),
        ({"many": ["x", "z"]}, "option 'many[1]': invalid enum value 'z'; allowed: 'x', 'y'"),
        ({"named": {"k": "r"}}, "option 'named[...]': invalid enum value 'r'; allowed: 'p', 'q'"),
        ({"parts": [{"what": "x"}]}, "option 'parts[0].what': invalid enum value 'x'; allowed: "),
        ({"count": "many"}, "option 'count' is 'many': expected int, got str"),
    ],
)
def test_a_wrong_value_names_those_that_are_right(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(Sample, given, where="sample")
    assert str(raised.value).startswith("sample: ")
    assert said in str(raised.value)


def test_what_is_no_enumeration_lists_nothing() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(Sample, {"count": "many"}, where="sample")
    assert "allowed" not in str(raised.value)


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "new.json", "--report")
    assert not list(tmp_path.iterdir())
    for path, why in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "x.json", f"there is no folder {tmp_path / 'no'}"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_writable(path, "--report")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"--report .* cannot be written: this user may not"):
        check_writable(tmp_path / "new.json", "--report")
