"""What is said of a transport's options comes from the class that declares them."""

from typing import Annotated, Literal

import pytest
from msgspec import Meta

from kvbridge.cli.option_words import Option, options_of
from kvbridge.transport import TransportConfig, get_transport
from kvbridge.transport.registry import transport_entry_points


class Base(TransportConfig, frozen=True):
    """Options of all of them.

    Attributes:
        lanes: How many lanes there are, on
            each side.
    """

    lanes: Annotated[int, Meta(ge=1, le=8)] = 2


class Deep(Base, frozen=True, kw_only=True):
    """Options of one.

    Attributes:
        mode: ``fast`` or not, see :class:`~kvbridge.transport.Transport`.
        pause_s: Seconds: as many as it takes.

    What follows is about something else: nothing.
    """

    mode: Literal["fast", "slow", "off"]
    pause_s: Annotated[float, Meta(gt=0)] | None = None
    names: list[str] = []
    silent: bool = False


def test_kinds_defaults_and_words_are_those_of_the_class() -> None:
    assert options_of(Deep) == [
        Option("lanes", "whole number from 1 to 8", "2", "How many lanes there are, on each side."),
        Option("mode", "fast, off or slow", "", "``fast`` or not, see Transport."),
        Option("pause_s", "number above 0 or null", "null", "Seconds: as many as it takes."),
        Option("names", "list, each a text", "[]", ""),
        Option("silent", "true or false", "false", ""),
    ]


def test_a_class_without_options_has_none() -> None:
    assert options_of(TransportConfig) == []


@pytest.mark.parametrize("name", transport_entry_points())
def test_every_option_of_ours_is_described(name: str) -> None:
    for option in options_of(get_transport(name).config_type):
        assert option.text, f"{name}: {option.name}"
        assert option.kind != "value", f"{name}: {option.name}"
