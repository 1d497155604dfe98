"""Transports by name: what is found, and what is said about what is not right."""

from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from kvbridge.errors import ConfigError, TransportUnavailableError, UnknownTransportError
from kvbridge.transport import (
    Availability,
    Transport,
    available_transports,
    get_transport,
    open_transport,
    registry,
)
from kvbridge.transport.local import LocalTransport


class Old(LocalTransport):
    api_version: ClassVar[int] = 99


class Absent(LocalTransport):
    @classmethod
    def probe(cls) -> Availability:
        return Availability(False, "libabsent is missing", "pip install absent")


class NoTransport:
    pass


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[EntryPoint]]:
    """What the environment offers, for a test to add to."""
    entry_points: dict[str, list[EntryPoint]] = {}
    monkeypatch.setattr(registry, "transport_entry_points", lambda: entry_points)

    def offer(name: str, *values: str) -> None:
        entry_points[name] = [
            EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for value in values
        ]

    local = "kvbridge.transport.local:LocalTransport"
    offer("local", local)
    offer("twice", local, "elsewhere:Other")
    offer("broken", "no_such_package:Driver")
    offer("misspelt", "kvbridge.transport.local:LocalTransprt")
    return entry_points


def offer_class(
    found: dict[str, list[EntryPoint]], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint(kind.__name__.lower(), f"fake:{kind.__name__}", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        EntryPoint,
        "load",
        lambda self, load=EntryPoint.load: kind if self.value == entry.value else load(self),
    )
    found[entry.name] = [entry]


def test_the_real_environment_offers_local() -> None:
    entries = registry.transport_entry_points()
    assert [entry.value for entry in entries["local"]] == [
        "kvbridge.transport.local:LocalTransport"
    ]
    assert get_transport("local") is LocalTransport


def test_an_unknown_name_lists_those_found(found: dict[str, list[EntryPoint]]) -> None:
    with pytest.raises(UnknownTransportError, match=r"'loacl'; did you mean 'local'\?.*broken"):
        get_transport("loacl")
    with pytest.raises(UnknownTransportError, match="local, twice"):
        open_transport({"transport": "zzz"})
    found.clear()
    with pytest.raises(UnknownTransportError, match="found: none"):
        get_transport("local")


def test_a_name_offered_twice_is_refused(found: dict[str, list[EntryPoint]]) -> None:
    with pytest.raises(ConfigError, match=r"'twice'.*LocalTransport.*elsewhere:Other"):
        get_transport("twice")


@pytest.mark.parametrize(
    ("name", "said"), [("broken", "no_such_package"), ("misspelt", "LocalTransprt")]
)
def test_a_driver_that_cannot_be_imported(
    found: dict[str, list[EntryPoint]], name: str, said: str
) -> None:
    with pytest.raises(TransportUnavailableError, match=said):
        get_transport(name)


@pytest.mark.parametrize(
    ("kind", "said"), [(Old, "contract 99, this KVBridge has 1"), (NoTransport, "is no Transport")]
)
def test_a_driver_that_does_not_fit(
    found: dict[str, list[EntryPoint]],
    kind: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer_class(found, kind, monkeypatch)
    with pytest.raises(TransportUnavailableError, match=said):
        get_transport(kind.__name__.lower())


def test_everything_is_listed_and_nothing_raised(
    found: dict[str, list[EntryPoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_class(found, Absent, monkeypatch)
    listed = available_transports()
    assert list(listed) == list(found)
    assert [name for name, available in listed.items() if available.ok] == ["local"]
    assert "no_such_package" in listed["broken"].reason
    assert "twice" in listed["twice"].reason
    assert listed["absent"] == (False, "libabsent is missing", "pip install absent")


def test_opening_what_cannot_run_says_what_to_install(
    found: dict[str, list[EntryPoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_class(found, Absent, monkeypatch)
    with pytest.raises(TransportUnavailableError, match=r"libabsent.*pip install absent") as caught:
        open_transport({"transport": "absent"})
    assert caught.value.hint == "pip install absent"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"transprot": "local"}, "unknown option 'transprot'.*'transport'"),
        ({"transport": 5}, "transport choice"),
        ({"transport": "local", "options": {"slice_byte": 1}}, "did you mean 'slice_bytes'"),
        ({"transport": "local", "options": {"slice_bytes": "x"}}, "options of transport 'local'"),
        ({"transport": "local", "options": {"slice_bytes": 1}}, "slice_bytes"),
        ({"transport": "local", "options": []}, "options"),
    ],
)
def test_a_wrong_configuration_is_refused(choice: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_transport(choice)


def test_the_default_choice_opens_local() -> None:
    transport: Transport = open_transport({})
    try:
        assert isinstance(transport, LocalTransport)
    finally:
        transport.close()
