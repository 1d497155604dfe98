"""The side channel: who may talk, what may be dialled, and many peers at once."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from kvbridge.errors import (
    AuthenticationError,
    ConfigError,
    HandshakeError,
    HandshakeTimeoutError,
    IncompatibleError,
)
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    Keys,
    Networks,
    SecurityConfig,
    fetch_metadata,
    keys_of_secret,
    load_keys,
)
from kvbridge.handshake.dialer import Pauses
from kvbridge.handshake.messages import MetadataRequest
from kvbridge.handshake.wire import encode
from tests.unit.test_handshake import metadata, payload

SECRET, OTHER = b"sixteen bytes at least", b"another secret, long enough"


@pytest.fixture(scope="module")
def keys() -> Keys:
    return keys_of_secret(SECRET)


@contextlib.contextmanager
def serving(data: HandshakeMetadata | None = None, **options: Any) -> Iterator[HandshakeServer]:
    server = HandshakeServer(**options)
    try:
        server.set_xfer_handshake_metadata({0: data or metadata(0, 0)})
        yield server
    finally:
        server.close()


def ask(server: HandshakeServer, **options: Any) -> str:
    """Return the payload's engine, or the class of what was raised."""
    try:
        reply = fetch_metadata(server.host, server.port, timeout_s=5, **options)
    except HandshakeError as error:
        return type(error).__name__
    return reply.ranks[0].engine_id


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("port", [5600, 5600.0, "5600", "5600.0"], ids=repr)
def test_b64_a_port_that_became_a_float_or_text_is_still_that_port(port: object) -> None:
    assert EngineAddress.of("h", port).port == 5600


@pytest.mark.parametrize(
    "port",
    ["5600.5", 5600.5, 70000, -1, None, "", "x", True, float("nan"), 10**400, "1e400"],
    ids=lambda port: repr(port)[:12],
)
def test_b64_what_is_no_port_is_refused_by_its_name(port: object) -> None:
    with pytest.raises(ConfigError, match=r"remote_port.*must be a whole number"):
        EngineAddress.of("h", port, where="remote_port")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("[::1]:5600", "::1", 5600),
        ("localhost:5600", "localhost", 5600),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("node-7.cluster.local:65535", "node-7.cluster.local", 65535),
    ],
)
def test_b65_addresses_are_read_whole(text: str, host: str, port: int) -> None:
    assert EngineAddress.parse(text) == EngineAddress(host, port)
    assert str(EngineAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["::1:5600", "localhost", "[::1]", ":5", "a b:5", "h;tcp://x:5", "0:5", "127.1:5", "0x7f.1:5"],
)
def test_b65_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EngineAddress.parse(text)


def test_only_configured_networks_are_dialled() -> None:
    inside = Networks(["10.0.0.0/8", "::1"])
    assert inside.resolve(EngineAddress("10.1.2.3", 5)) == [EngineAddress("10.1.2.3", 5)]
    for host in ("127.0.0.1", "169.254.169.254", "11.0.0.1", "::ffff:11.0.0.1"):
        with pytest.raises(HandshakeError, match=r"outside of the networks.*10\.0\.0\.0/8"):
            inside.resolve(EngineAddress.of(host, 5))
    assert inside.resolve(EngineAddress.of("::ffff:10.0.0.1", 5))
    with pytest.raises(ConfigError, match=r"10\.0\.0\.0/8 or"):
        Networks(["ten"])


def test_an_address_outside_is_refused_before_a_packet_is_sent() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Dialer(networks=Networks(["10.0.0.0/8"])) as dialer,
    ):
        asked = dialer.fetch(EngineAddress("127.0.0.1", listener.getsockname()[1]), timeout_s=5)
        with pytest.raises(HandshakeError, match="outside of the networks"):
            asked.result()
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(HandshakeError, match=r"no-such-host\.invalid.*cannot be found"):
        fetch_metadata("no-such-host.invalid", 1, timeout_s=20)


@pytest.mark.parametrize("secret", [False, True])
def test_a_server_is_told_that_its_host_does_not_exist(secret: bool, keys: Keys) -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid.* cannot be found: .*interface"):
        HandshakeServer("no-such-host.invalid", keys=keys if secret else None)


# --- who may talk --------------------------------------------------------------------------------


def test_engines_with_one_secret_talk_and_no_others(keys: Keys) -> None:
    with serving(keys=keys) as server:
        assert ask(server, keys=keys) == "e"
        assert ask(server, keys=keys_of_secret(OTHER)) == "AuthenticationError"
        assert ask(server) == "AuthenticationError"
        assert ask(server, keys=keys) == "e"
        assert server.unauthenticated > 0
        assert server.refused == 0


def test_who_has_a_secret_does_not_talk_to_an_engine_without(keys: Keys) -> None:
    with serving() as server, pytest.raises(AuthenticationError, match="this side has a secret"):
        fetch_metadata(server.host, server.port, timeout_s=5, keys=keys)


def test_with_a_secret_other_addresses_than_loopback_are_served(keys: Keys) -> None:
    with serving(host="0.0.0.0", keys=keys) as server:
        reply = fetch_metadata("127.0.0.1", server.port, timeout_s=5, keys=keys)
        assert reply.ranks


def test_nothing_goes_over_the_wire_in_the_clear(keys: Keys) -> None:
    """A relay between both sees neither metadata nor secret."""
    seen = bytearray()
    with (
        serving(metadata(0, 0, payload(model="a-telling-name")), keys=keys) as server,
        relay(server.port, seen) as port,
    ):
        assert fetch_metadata("127.0.0.1", port, timeout_s=5, keys=keys).ranks
    assert len(seen) > 500
    assert b"a-telling-name" not in seen
    assert SECRET not in seen


def test_a_recorded_conversation_cannot_be_played_again(keys: Keys) -> None:
    sent = bytearray()
    with serving(keys=keys) as server:
        with relay(server.port, sent, only_sent=True) as port:
            assert fetch_metadata("127.0.0.1", port, timeout_s=5, keys=keys).ranks
        with socket.create_connection((server.host, server.port)) as again:
            again.sendall(sent)
            again.settimeout(1)
            heard = bytearray()
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := again.recv(4096):
                    heard += piece
        assert b"READY" not in heard
        assert len(heard) < 500  # a greeting and a welcome, and not one byte of metadata


@contextlib.contextmanager
def relay(port: int, seen: bytearray, *, only_sent: bool = False) -> Iterator[int]:
    """Pass one connection on, and keep what it carries."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(one: socket.socket, other: socket.socket, keep: bool) -> None:
            with contextlib.suppress(OSError):
                while piece := one.recv(65536):
                    if keep:
                        seen.extend(piece)
                    other.sendall(piece)

        def run() -> None:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            with near, far:
                back = threading.Thread(target=pump, args=(far, near, not only_sent))
                back.start()
                pump(near, far, True)
                far.shutdown(socket.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(5)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, SecurityConfig]:
    """Two engines that know each other, and a third that knows both."""
    configs = {}
    for name in ("p", "d", "stranger"):
        (tmp_path / name).mkdir()
        zmq.auth.create_certificates(str(tmp_path), name)
        configs[name] = SecurityConfig(
            key_file=str(tmp_path / f"{name}.key_secret"), peers_folder=str(tmp_path / name)
        )
    for name, known in (("p", "d"), ("d", "p"), ("stranger", "p"), ("stranger", "d")):
        public = (tmp_path / f"{known}.key").read_bytes()
        (tmp_path / name / f"{known}.key").write_bytes(public)
    return configs


def test_engines_with_keys_of_their_own_believe_those_they_know(
    certificates: dict[str, SecurityConfig],
) -> None:
    p, d, stranger = (load_keys(certificates[name]) for name in ("p", "d", "stranger"))
    with serving(keys=p) as server:
        assert ask(server, keys=d) == "e"
        assert ask(server, keys=stranger, engine_id="p") == "AuthenticationError"
    assert "secret" not in repr(p)
    assert p is not None
    assert p.secret.decode() not in repr(p)


def test_whose_key_to_expect_is_asked_for_if_several_could_be(
    certificates: dict[str, SecurityConfig],
) -> None:
    stranger = load_keys(certificates["stranger"])
    assert stranger is not None
    with pytest.raises(AuthenticationError, match=r"\['d', 'p'\].*'x' or 'h'.*x\.key"):
        stranger.of("x", "h")


def test_secrets_come_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys
) -> None:
    monkeypatch.delenv("KVBRIDGE_SECRET", raising=False)
    assert load_keys(SecurityConfig()) is None
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert load_keys(SecurityConfig(secret_file=str(tmp_path / "secret"))) == keys
    monkeypatch.setenv("KVBRIDGE_SECRET", SECRET.decode())
    assert load_keys(SecurityConfig()) == keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SecurityConfig(secret_file="/no/such/file"), "cannot be read: No such file"),
        (SecurityConfig(secret_file="/dev/zero"), "no regular file"),
        (SecurityConfig(secret_file="/tmp"), "no regular file"),
        (SecurityConfig(secret_file=""), "no regular file"),
        (SecurityConfig(secret_file="a\0b"), "cannot be read"),
        (SecurityConfig(secret_env="NO_SUCH_VARIABLE"), "'NO_SUCH_VARIABLE', which is not set"),
        (SecurityConfig(secret_env=""), "which is not set"),
        (SecurityConfig(key_file=""), "need both"),
        (SecurityConfig(key_file="/no/such/key"), "need both"),
        (SecurityConfig(key_file="/no/such/key", peers_folder="/"), "cannot be read: No such file"),
    ],
)
def test_secrets_and_keys_that_cannot_be_used_are_refused(
    config: SecurityConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_keys(config)


def test_a_secret_is_any_bytes_and_no_endless_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = b"caf\xe9 caf\xe9 caf\xe9 caf\xe9"
    (tmp_path / "secret").write_bytes(secret)
    monkeypatch.setenv("KVBRIDGE_SECRET", os.fsdecode(secret))
    assert load_keys(SecurityConfig()) == load_keys(
        SecurityConfig(secret_file=str(tmp_path / "secret"))
    )
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        load_keys(SecurityConfig(secret_file=str(tmp_path / "pipe")))
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        load_keys(SecurityConfig(secret_file=str(tmp_path / "large")))


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBRIDGE_SECRET", "too short")
    with pytest.raises(ConfigError, match="KVBRIDGE_SECRET holds 9 bytes"):
        load_keys(SecurityConfig())


# --- what is asked, and answered -----------------------------------------------------------------


def test_b50_both_sides_get_the_refusal_with_both_values() -> None:
    theirs = metadata(0, 0, payload(model="m", heads={"kv": [8]}))
    with serving(theirs) as server, Dialer() as dialer:
        asked = dialer.fetch(
            server.address, timeout_s=5, asker="d", factors={"model": "m", "heads": {"kv": [4]}}
        )
        with pytest.raises(
            IncompatibleError, match=r"heads is .*4.* here and .*8.* there"
        ) as caught:
            asked.result()
        assert caught.value.differences == {"heads": ({"kv": [4]}, {"kv": [8]})}
        assert server.refused == 1
        (reason,) = server.refusals
        assert "engine 'd' is incompatible: heads is {'kv': 8} here and {'kv': 4} there" in reason


def test_single_ranks_can_be_asked_for() -> None:
    server = HandshakeServer()
    try:
        server.set_xfer_handshake_metadata_pp_aware(
            {(pp, tp): metadata(pp, tp) for pp in range(2) for tp in range(2)}
        )
        with Dialer() as dialer:
            reply = dialer.fetch(server.address, timeout_s=5, ranks=((1, 0),)).result()
            assert sorted(reply.by_rank) == [(1, 0)]
            with pytest.raises(HandshakeError, match=r"ranks \[\(7, 0\)\] were asked for"):
                dialer.fetch(server.address, timeout_s=5, ranks=((7, 0),)).result()
    finally:
        server.close()


def test_ranks_that_contradict_each_other_are_not_served() -> None:
    server = HandshakeServer()
    try:
        with pytest.raises(HandshakeError, match="contradict each other: model is 'm' and 'n'"):
            server.set_xfer_handshake_metadata(
                {0: metadata(0, 0), 1: metadata(0, 1, payload(model="n"))}
            )
        assert server.generation == 0
    finally:
        server.close()


# --- many, slow and dead peers -------------------------------------------------------------------


def test_a_dead_peer_delays_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serving() as server, Dialer() as dialer:
        address = EngineAddress("127.0.0.1", silent.getsockname()[1])
        dead = [dialer.fetch(address, timeout_s=60) for _ in range(20)]
        late = dialer.fetch(address, timeout_s=0.5)
        assert dialer.fetch(server.address, timeout_s=20).result().ranks
        assert not any(each.done() for each in dead)
        with pytest.raises(HandshakeTimeoutError, match="no answer"):
            late.result()


def test_an_engine_that_starts_late_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Dialer() as dialer:
        asked = dialer.fetch(EngineAddress("127.0.0.1", port), timeout_s=20)
        time.sleep(0.5)
        assert not asked.done()
        with serving(port=port):
            assert asked.result().ranks


def test_what_is_no_handshake_port_is_told_apart_from_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def hang_up() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    caller, _ = listener.accept()
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    caller.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(HandshakeError, match="no handshake port"):
                fetch_metadata("127.0.0.1", listener.getsockname()[1], timeout_s=20)
        finally:
            stop.set()
            thread.join()


def test_a_closed_dialer_gives_up_what_it_was_asked_and_takes_nothing_more() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = EngineAddress("127.0.0.1", silent.getsockname()[1])
        dialer = Dialer()
        asked = dialer.fetch(address, timeout_s=60)
        dialer.close()
        dialer.close()
        with pytest.raises(HandshakeError, match="closed while"):
            asked.result(timeout=5)
        with pytest.raises(HandshakeError, match="closed"):
            dialer.fetch(address, timeout_s=1)
    assert set(threading.enumerate()) <= before


def test_pauses_grow_are_bounded_and_jittered() -> None:
    longest, shortest = Pauses(lambda _, high: high), Pauses(lambda low, _: low)
    slow = [longest.next_s() for _ in range(8)]
    assert slow == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert [shortest.next_s() for _ in range(8)] == [each / 2 for each in slow]


def test_a_process_that_forgets_its_dialer_still_ends() -> None:
    code = (
        "from kvbridge.handshake import *\n"
        "d = Dialer()\n"
        "d.fetch(EngineAddress('127.0.0.1', 9), timeout_s=60)\n"
        "HandshakeServer()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        timeout=30,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- what the network may bring ------------------------------------------------------------------


@pytest.mark.parametrize(
    "noise",
    [
        b"\x80\x04\x95.",
        os.urandom(1 << 16),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",  # half of a greeting
        b"",
    ],
)
def test_b68_noise_on_the_port_harms_nobody(noise: bytes) -> None:
    with serving() as server:
        with socket.create_connection((server.host, server.port)) as caller:
            caller.sendall(noise)
            assert ask(server) == "e"
        assert ask(server) == "e"


def test_b68_a_huge_request_is_not_taken() -> None:
    with serving() as server:
        context = zmq.Context()
        try:
            caller = context.socket(zmq.DEALER)
            caller.connect(server.address.endpoint)
            caller.send(bytes(10 << 20))
            assert ask(server) == "e"
            assert not caller.poll(200)
        finally:
            context.destroy(linger=0)


def test_an_asker_that_never_reads_costs_a_few_answers_at_most() -> None:
    big = metadata(0, 0, payload(model="m" * (100 << 10)))
    with serving(big) as server:
        context = zmq.Context()
        try:
            caller = context.socket(zmq.DEALER)
            caller.setsockopt(zmq.RCVHWM, 1)
            caller.connect(server.address.endpoint)
            for _ in range(500):
                caller.send(encode(MetadataRequest()))
            assert ask(server) == "e"
        finally:
            context.destroy(linger=0)
