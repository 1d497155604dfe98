"""The reference of connectors names every key and hook there is, and none that there is not."""

import re
from typing import Any

import pytest

from kvbridge.config import Config
from kvbridge.connector import Connector, ConnectorConfig, HandshakeConfig, RemoteRequest
from kvbridge.connector.params import KEY, PARAMS_VERSION, offer
from kvbridge.handshake import EngineAddress
from tests.contract.tables import page, rows

PAGE = page("connectors.md")
OFFER = offer(RemoteRequest("e", "r", EngineAddress("h", 1), ((1,),), 4), "n", tp_size=1, pp_size=1)


def written(value: Any) -> str:
    """Write a default as the page does."""
    match value:
        case None | Config():
            return "none"
        case dict() | tuple() if not value:
            return "none"
        case tuple():
            return ", ".join(map(written, value))
        case str():
            return f"`{value}`"
        case int():
            return str(value)
    return f"{value:g}"


@pytest.mark.parametrize(
    ("heading", "config"),
    [("## Keys of a connector", ConnectorConfig), ("## Keys of `handshake`", HandshakeConfig)],
    ids=["connector", "handshake"],
)
def test_every_key_is_listed_with_its_default(heading: str, config: type[Config]) -> None:
    listed = {key.strip("`"): default for key, default, _ in rows(PAGE, heading)}
    defaults = config()
    assert listed == {name: written(getattr(defaults, name)) for name in config.__struct_fields__}


def test_every_hook_is_listed_once() -> None:
    listed = [
        re.sub(r"`(\w+)\(.*", r"\1", row[1])
        for row in rows(PAGE, "## Hooks, in the order of their calls")
    ]
    hooks = [
        name for name in dir(Connector) if callable(getattr(Connector, name)) and name[0] != "_"
    ]
    assert sorted(listed) == sorted(hooks)


@pytest.mark.parametrize(
    ("heading", "params"),
    [("### Flat keys", OFFER), ("### The part of a connector", OFFER[KEY]["children"]["n"])],
    ids=["flat", "part"],
)
def test_every_key_of_the_params_is_listed(heading: str, params: dict[str, Any]) -> None:
    assert [key.strip("`") for key, *_ in rows(PAGE, heading)] == list(params)


def test_the_version_of_the_params_is_the_one_that_is_written() -> None:
    assert f"`version`, an integer, {PARAMS_VERSION};" in PAGE
