"""Registries on real servers: engines come, vanish, return, and what breaks heals."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbridge.errors import HandshakeError, HandshakeTimeoutError
from kvbridge.handshake.discovery import EngineRecord, Registry, open_registry
from kvbridge.handshake.discovery.base import RECORD_MAX_BYTES, encode_record
from tests.integration.registry_servers import (
    PASSWORD,
    SERVERS,
    USER,
    EtcdServer,
    RedisServer,
    Server,
    free_port,
)

TTL_S = 1.0
# Far above what anything here takes, for a busy machine; the waits end as soon as they may.
PATIENCE_S = 15.0

CHILD = """
import sys, time
import msgspec
from kvbridge.handshake.discovery import EngineRecord, open_registry
choice, records = msgspec.json.decode(sys.argv[1]), sys.argv[2:]
registry = open_registry(choice)
for record in records:
    registry.announce(msgspec.json.decode(record, type=EngineRecord), ttl_s=2.0)
print("announced", flush=True)
time.sleep(60)
"""


def engine(engine_id: str, incarnation: str = "1", **labels: str) -> EngineRecord:
    return EngineRecord(
        engine_id=engine_id, incarnation=incarnation, host="10.0.0.1", port=7000, labels=labels
    )


def eventually(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> float:
    """Wait until something holds; return how long that took."""
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        assert waited_s < within_s, f"not within {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - start_s


@pytest.fixture(scope="module", params=sorted(SERVERS))
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server for the tests that leave it as it was, apart from their own prefix."""
    with SERVERS[request.param](tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server to be mistreated."""
    with SERVERS[request.param](tmp_path) as server:
        yield server


@pytest.fixture
def choice(shared: Server, request: pytest.FixtureRequest) -> dict[str, Any]:
    return shared.options(prefix=f"{request.node.originalname}/")


def test_announced_engines_are_found_until_withdrawn(choice: dict[str, Any]) -> None:
    odd = "rack 1/p[0]*é%2F?"
    with open_registry(choice) as one, open_registry(choice) as other:
        assert (other.engines(), other.find("p0")) == ((), None)
        one.announce(engine("p0", role="prefill"))
        one.announce(engine(odd))
        other.announce(engine("d0"))
        assert other.find("p0") == engine("p0", role="prefill")
        assert other.find(odd) == engine(odd)
        assert [record.engine_id for record in one.engines()] == ["d0", "p0", odd]
        one.announce(engine("p0", role="both"))
        assert other.find("p0") == engine("p0", role="both")
        other.withdraw("p0")  # not announced there: no business of its
        one.withdraw("p0")
        one.withdraw("p0")
        assert other.find("p0") is None
        assert [record.engine_id for record in one.engines()] == ["d0", odd]
        one.close()
        one.close()
        assert other.engines() == (engine("d0"),)
        assert (one.garbage_skipped, other.garbage_skipped, other.renewals_failed) == (0, 0, 0)
        with pytest.raises(HandshakeError, match="closed"):
            one.find("d0")


def test_a_killed_engine_vanishes_but_not_its_next_incarnation(choice: dict[str, Any]) -> None:
    records = [encode_record(engine(name)).decode() for name in ("gone", "restarted")]
    encoded = msgspec.json.encode(choice).decode()
    child = subprocess.Popen([sys.executable, "-c", CHILD, encoded, *records],
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "announced\n"
        with open_registry(choice) as registry:
            time.sleep(3)
            eventually(lambda: len(registry.engines()) == 2)  # it has renewed them
            child.send_signal(signal.SIGKILL)
            child.wait(10)
            registry.announce(engine("restarted", "2"), ttl_s=30)
            eventually(lambda: registry.find("gone") is None)
            time.sleep(0.5)
            assert registry.engines() == (engine("restarted", "2"),)
    finally:
        child.kill()
        child.wait(10)
        if child.stdout is not None:
            child.stdout.close()


def test_the_newer_incarnation_survives_the_older_one(
    choice: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with open_registry(choice) as newer:
        with open_registry(choice) as older:
            older.announce(engine("p0", "1"), ttl_s=TTL_S)
            newer.announce(engine("p0", "2"), ttl_s=30)
            eventually(lambda: "another incarnation" in caplog.text)
            time.sleep(2 * TTL_S)
            assert newer.find("p0") == engine("p0", "2")
            assert caplog.text.count("another incarnation") == 1
        assert newer.find("p0") == engine("p0", "2")
        assert newer.renewals_failed == 0


def test_an_older_incarnation_that_still_lives_is_found_again(choice: dict[str, Any]) -> None:
    with open_registry(choice) as older:
        older.announce(engine("p0", "1"), ttl_s=TTL_S)
        with open_registry(choice) as newer:
            newer.announce(engine("p0", "2"), ttl_s=30)
            time.sleep(TTL_S / 2)
        eventually(lambda: older.find("p0") == engine("p0", "1"))


def test_garbage_is_counted_and_skipped(shared: Server, choice: dict[str, Any]) -> None:
    prefix = choice["options"]["prefix"]
    garbage = {
        "p1": b"\xff\0",
        "p2": b'{"engine_id": "p2"}',
        "p3": encode_record(engine("p0")),  # speaks of another
        "p4": encode_record(engine("p4")).replace(b"7000", b"70000"),
        "p5": encode_record(engine("p5")) + b" " * RECORD_MAX_BYTES,
        "p6": b"x" * 1_000_000,
        "%2": encode_record(engine("%2")),  # a name that we would not give
    }
    for name, value in garbage.items():
        shared.put(prefix + name, value)
    count = len(garbage)
    if isinstance(shared, RedisServer):
        with shared.client() as client:
            client.hset(f"{prefix}p7", "a", "b")
            client.set(prefix.encode() + b"\xff", b"x")
            client.zadd(f"{prefix}!engines", {f"{prefix}p7": 1e12, prefix.encode() + b"\xff": 1e12})
        count += 2
    with open_registry(choice) as registry:
        registry.announce(engine("p0"))
        assert registry.engines() == (engine("p0"),)
        assert registry.garbage_skipped == count
        for name in ("p1", "p5", "p6"):
            assert registry.find(name) is None
        assert registry.garbage_skipped == count + 3
        if isinstance(shared, RedisServer):
            assert registry.find("p7") is None
        registry.announce(engine("p1"))  # an engine takes its name back
        assert registry.find("p1") == engine("p1")


def test_prefixes_do_not_see_each_other(shared: Server) -> None:
    prefixes = ["a/", "a/b/", "[ab]/", "*/", "a?/", "ab/", ""]
    registries = [open_registry(shared.options(prefix=f"isolated/{one}")) for one in prefixes]
    try:
        for number, registry in enumerate(registries):
            registry.announce(engine("p0", str(number)))
        for number, registry in enumerate(registries):
            assert registry.engines() == (engine("p0", str(number)),)
            assert registry.garbage_skipped == 0
    finally:
        for registry in registries:
            registry.close()


def test_many_threads_may_ask(choice: dict[str, Any]) -> None:
    wrong: list[Any] = []

    def ask(registry: Registry, number: int) -> None:
        mine = engine(f"p{number}")
        try:
            for _ in range(10):
                registry.announce(mine)
                if registry.find(mine.engine_id) != mine or mine not in registry.engines():
                    wrong.append(mine)
                registry.withdraw(mine.engine_id)
        except HandshakeError as error:
            wrong.append(error)

    with open_registry(choice) as registry:
        threads = [threading.Thread(target=ask, args=(registry, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert registry.engines() == ()


def test_a_server_that_comes_back_empty_is_told_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with open_registry(server.options()) as registry:
        registry.announce(engine("p0"), ttl_s=TTL_S)
        registry.announce(engine("p1"), ttl_s=PATIENCE_S * 10)
        server.stop()
        with pytest.raises(HandshakeError, match=f"127.0.0.1:{server.port}"):
            registry.find("p0")
        eventually(lambda: registry.renewals_failed >= 2)
        server.start()
        eventually(lambda: registry.find("p0") == engine("p0"))
        time.sleep(2 * TTL_S)
        eventually(lambda: registry.find("p0") == engine("p0"))
    # It was closed before its time to tell of p1 again, and there was nothing to withdraw.
    assert "left to expire" not in caplog.text
    assert caplog.text.count("are not renewed") == 1
    assert caplog.text.count("answers again") == 1
    assert server.keys() == 0


def test_a_frozen_server_holds_nobody_up(server: Server) -> None:
    def refused(call: Callable[[], object]) -> None:
        start_s = time.monotonic()
        with pytest.raises(HandshakeTimeoutError, match=r"did not answer within 0\.5 s"):
            call()
        assert time.monotonic() - start_s < 5.0

    registry = open_registry(server.options(timeout_s=0.5))
    fresh = open_registry(server.options(timeout_s=0.5))
    registry.announce(engine("p0"), ttl_s=TTL_S)
    registry.announce(engine("p1"), ttl_s=TTL_S)
    server.freeze()
    refused(lambda: registry.find("p0"))
    refused(registry.engines)
    refused(lambda: registry.announce(engine("p2"), ttl_s=TTL_S))
    refused(lambda: registry.withdraw("p1"))
    refused(lambda: fresh.find("p0"))
    eventually(lambda: registry.renewals_failed > 0)
    server.thaw()

    def only_p0() -> bool:
        try:
            return [record.engine_id for record in fresh.engines()] == ["p0"]
        except HandshakeError:
            return False

    eventually(only_p0)  # a late p2 lives for its time
    server.freeze()
    start_s = time.monotonic()
    registry.close()
    fresh.close()
    assert time.monotonic() - start_s < 5.0


def test_a_password_is_needed_and_never_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    server.want_password()
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong-one\n")
    monkeypatch.setenv("KVBRIDGE_TEST_PASSWORD", PASSWORD)
    right = {"password_env": "KVBRIDGE_TEST_PASSWORD"}
    for options in ({}, {"username": USER, "password_file": str(wrong)}):
        with open_registry(server.options(**options)) as registry:
            with pytest.raises(HandshakeError, match="user and password") as caught:
                registry.announce(engine("p0"))
            assert "wrong-one" not in repr(caught.value)
            with pytest.raises(HandshakeError):
                registry.engines()
    with open_registry(server.options(username=USER, **right)) as registry:
        registry.announce(engine("p0"), ttl_s=TTL_S)
        time.sleep(2 * TTL_S)
        eventually(lambda: registry.engines() == (engine("p0"),))
        eventually(lambda: registry.find("p0") == engine("p0"))
        assert registry.renewals_failed == 0
    assert PASSWORD not in caplog.text


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_tls_is_verified(kind: str, tmp_path: Path) -> None:
    with SERVERS[kind](tmp_path, tls=True) as server:
        assert server.certificate is not None
        cert, key = map(str, server.certificate)
        own = {"cert_file": cert, "key_file": key}
        with open_registry(server.options(ca_file=cert, **own)) as registry:
            registry.announce(engine("p0"))
            assert registry.find("p0") == engine("p0")
        # An unknown authority, no certificate of its own, and one that is none.
        for options in (
            own,
            {"ca_file": cert},
            {"ca_file": cert, "cert_file": key, "key_file": key},
        ):
            with (
                open_registry(server.options(**options)) as registry,
                pytest.raises(HandshakeError, match=f"{server.url}.*check that"),
            ):
                registry.find("p0")


@pytest.mark.parametrize(("kind", "other"), [(RedisServer, EtcdServer), (EtcdServer, RedisServer)])
def test_another_kind_of_server_is_an_error_of_ours(
    kind: type[Server], other: type[Server], tmp_path: Path
) -> None:
    with kind(tmp_path) as server:
        url = server.url.replace(kind.scheme, other.scheme, 1)
        choice = {"registry": other.kind, "options": {"url": url, "timeout_s": 1.0}}
        with open_registry(choice) as registry, pytest.raises(HandshakeError, match=url):
            registry.engines()


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_nobody_at_the_address(kind: str) -> None:
    url = f"{SERVERS[kind].scheme}://127.0.0.1:{free_port()}"
    with open_registry({"registry": kind, "options": {"url": url}}) as registry:
        with pytest.raises(HandshakeError, match=rf"{url}.*check that"):
            registry.announce(engine("p0"))
        with pytest.raises(HandshakeError, match=url):
            registry.find("p0")


def test_what_others_keep_in_redis_is_not_looked_through(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        client.mset({f"kvbridge/other{number}": "x" for number in range(1000)})
        with open_registry(server.options()) as registry:
            registry.announce(engine("p0"))
            assert registry.engines() == (engine("p0"),)
            assert registry.garbage_skipped == 0
            assert registry.find("other1") is None


def test_the_index_in_redis_forgets_the_dead_and_heals(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        with open_registry(server.options()) as registry:
            registry.announce(engine("p0"), ttl_s=TTL_S)
            client.zadd("kvbridge/!engines", {"kvbridge/dead": 1})
            eventually(lambda: client.zcard("kvbridge/!engines") == 1)
            client.set("kvbridge/!engines", "garbage")
            eventually(lambda: client.type("kvbridge/!engines") == b"zset")
            eventually(lambda: registry.engines() == (engine("p0"),))
        assert client.dbsize() == 0


def test_etcd_is_logged_in_to_again_when_a_token_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVBRIDGE_TEST_PASSWORD", PASSWORD)
    with EtcdServer(tmp_path) as server:
        server.want_password()
        options = {"username": USER, "password_env": "KVBRIDGE_TEST_PASSWORD"}
        with open_registry(server.options(**options)) as registry:
            registry.announce(engine("p0"), ttl_s=TTL_S)
            server.forget_logins()
            eventually(lambda: registry.find("p0") == engine("p0"))
            server.forget_logins()
            time.sleep(TTL_S)
            assert registry.renewals_failed == 0, caplog.text


def test_no_proxy_stands_between_us_and_etcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    with EtcdServer(tmp_path) as server, open_registry(server.options()) as registry:
        registry.announce(engine("p0"))
        assert registry.find("p0") == engine("p0")
