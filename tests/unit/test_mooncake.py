"""The parts of the Mooncake transport that need no Mooncake."""

import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from kvbridge.errors import ConfigError, OutOfBoundsError, PeerLostError, TransportError
from kvbridge.transport import open_agent_info
from kvbridge_mooncake import MooncakeConfig
from kvbridge_mooncake.peering import EngineNames
from kvbridge_mooncake.sockets import listening_ports, winding_up
from kvbridge_mooncake.translate import translate
from kvbridge_mooncake.wire import (
    HELLO,
    NOTIFICATION,
    NOTIFY_MAX_BYTES,
    AgentCard,
    decode_hello,
    encode,
    encode_hello,
    take_messages,
)

CARD = AgentCard(1, "mooncake-1", bytes(32), "10.0.0.7", 5000, 15001, 4096)


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_connection_closed_there_is_winding_up_until_it_is_closed_here(reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ports = frozenset({port})
        assert port in listening_ports()
        assert not winding_up(ports)
        there = socket.create_connection(("127.0.0.1", port))
        here, _ = server.accept()
        with closing(here):
            there.sendall(b"bytes that nobody has read yet")
            assert not winding_up(ports)
            if reset:
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            there.close()
            assert eventually(lambda: winding_up(ports))
            assert not winding_up(frozenset({port + 1}))
        assert eventually(lambda: not winding_up(ports))
    assert port not in listening_ports()


def test_messages_come_out_whole_however_they_arrive() -> None:
    said = [(HELLO, b""), (NOTIFICATION, b"x" * 3000), (NOTIFICATION, bytes(range(256)))]
    stream = b"".join(encode(*message) for message in said)
    for step in (1, 7, 5000):
        buffer = bytearray()
        heard: list[tuple[bytes, bytes]] = []
        for at in range(0, len(stream), step):
            buffer += stream[at : at + step]
            heard += take_messages(buffer)
        assert heard == said
        assert not buffer


def test_a_message_that_is_too_long_is_refused_before_it_has_come() -> None:
    head = encode(NOTIFICATION, bytes(NOTIFY_MAX_BYTES))[:5]
    assert list(take_messages(bytearray(head))) == []
    longer = struct.pack("<Ic", NOTIFY_MAX_BYTES + 1, NOTIFICATION)
    with pytest.raises(TransportError, match="65537 bytes, at most 65536"):
        list(take_messages(bytearray(longer)))


def test_a_hello_needs_the_token() -> None:
    [(kind, body)] = take_messages(bytearray(encode_hello("me", CARD.token)))
    assert decode_hello(kind, body, CARD.token) == "me"
    for kind_, body_, token in (
        (kind, body, b"\1" * 32),
        (NOTIFICATION, body, CARD.token),
        (kind, body[:-1], CARD.token),
        (kind, b"", CARD.token),
    ):
        with pytest.raises(TransportError):
            decode_hello(kind_, body_, token)


def test_a_card_survives_the_way_and_other_versions_are_refused() -> None:
    assert AgentCard.unseal("mooncake", CARD.seal("mooncake")) == CARD
    newer = AgentCard(2, *(getattr(CARD, name) for name in CARD.__struct_fields__[1:]))
    with pytest.raises(TransportError, match="speaks version 2"):
        AgentCard.unseal("mooncake", newer.seal("mooncake"))
    assert open_agent_info("mooncake", CARD.seal("mooncake"))
    with pytest.raises(TransportError, match="same transport"):
        AgentCard.unseal("mooncake", CARD.seal("nixl"))


def test_each_agent_of_one_address_has_a_name_of_its_own() -> None:
    names = EngineNames()
    agents = [
        AgentCard(1, agent, *(getattr(CARD, n) for n in CARD.__struct_fields__[2:]))
        for agent in ("a", "b", "a", "c", "b")
    ]
    assert [names.name(card) for card in agents] == [
        "10.0.0.7:15001",
        "0x0a000007:15001",
        "10.0.0.7:15001",
        "0x00a000007:15001",
        "0x0a000007:15001",
    ]
    assert socket.gethostbyname("0x00a000007") == "10.0.0.7"


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (-7, OutOfBoundsError, "overlaps"),
        (-102, PeerLostError, "cannot be connected"),
        (-12345, TransportError, "unknown"),
    ],
)
def test_numbers_become_our_errors(code: int, kind: type[Exception], words: str) -> None:
    error = translate(code, "trying")
    assert type(error) is kind
    assert f"trying: Mooncake says {code}" in str(error)
    assert words in str(error)


@pytest.mark.parametrize("others", [("eth0",), ("tunl0",), ("eth0", "eth1")])
def test_consent_is_asked_for(others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(("lo", *others), 1)))
    with pytest.raises(ConfigError, match="allow_open_data_port=true"):
        MooncakeConfig().address()
    assert MooncakeConfig(allow_open_data_port=True).address() == "127.0.0.1"
    assert MooncakeConfig(host="localhost", allow_open_data_port=True).address() == "127.0.0.1"


def test_where_nothing_but_loopback_is_nobody_need_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    assert MooncakeConfig().address() == "127.0.0.1"
