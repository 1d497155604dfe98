"""What is refused before any registry is asked, and what is believed of what one holds."""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import ConfigError, HandshakeError
from kvbridge.handshake.discovery import EngineRecord, RedisOptions, open_registry
from kvbridge.handshake.discovery.base import RECORD_MAX_BYTES, decode_record, encode_record

RECORD = {"engine_id": "p0", "incarnation": "1", "host": "10.0.0.1", "port": 7000}
WRONG = [
    {"engine_id": ""},
    {"engine_id": "p" * 257},
    {"engine_id": "p\n0"},
    {"incarnation": "\x1b[2J"},
    {"host": ""},
    {"host": "a b"},
    {"host": "tcp://a"},
    {"host": "a;b"},
    {"host": "h" * 257},
    {"port": 0},
    {"port": 65536},
    {"labels": {"": "x"}},
    {"labels": {"role": "x" * 257}},
    {"labels": {"role": "\0"}},
]


def record(**changes: Any) -> EngineRecord:
    return EngineRecord(**{**RECORD, **changes})


@pytest.mark.parametrize("changes", WRONG)
def test_impossible_records_can_neither_be_made_nor_read(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        record(**changes)
    with pytest.raises(HandshakeError):
        decode_record(msgspec.json.encode({**RECORD, **changes}))


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1%eth0", "[::1]", "p0.fleet.example"])
def test_records_come_back_as_they_went(host: str) -> None:
    sent = record(host=host, labels={"role": "prefill", "model": "é/中", "empty": ""})
    assert decode_record(encode_record(sent)) == sent


def test_what_a_newer_version_adds_is_no_garbage() -> None:
    assert decode_record(msgspec.json.encode({**RECORD, "shards": [1, 2]})) == record()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b'{"port": "7000"}',
        b"[" * RECORD_MAX_BYTES,
        b" " * RECORD_MAX_BYTES + msgspec.json.encode(RECORD),
        msgspec.json.encode({**RECORD, "port": "7000"}),
        msgspec.json.encode({**RECORD, "port": 10**30}),
        msgspec.json.encode({**RECORD, "labels": {"a": 1}}),
    ],
)
def test_garbage_is_one_kind_of_error(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        decode_record(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_that_error(data: bytes) -> None:
    try:
        decode_record(data)
    except HandshakeError:
        return


def test_a_record_that_no_reader_would_take_is_not_sent() -> None:
    labels = {str(number): "x" * 250 for number in range(40)}
    with pytest.raises(ConfigError, match="fewer or shorter labels"):
        encode_record(record(labels=labels))


def test_the_static_registry_knows_its_list() -> None:
    engines = {"p1": "[::1]:7001", "p0": "10.0.0.1:7000"}
    with open_registry({"options": {"engines": engines}}) as registry:
        registry.announce(record(engine_id="d0"))
        registry.withdraw("p0")
        assert registry.find("p0") == record(incarnation="")
        assert registry.find("d0") is None
        assert [(one.engine_id, one.host, one.port) for one in registry.engines()] == [
            ("p0", "10.0.0.1", 7000),
            ("p1", "::1", 7001),
        ]


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "h:", "h:x", "h:0", "h:65536", "::1:80", "h:²"]
)
def test_a_static_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match="options of registry 'static'"):
        open_registry({"registry": "static", "options": {"engines": {"p0": address}}})


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"registry": "consul"}, "allowed: .*'etcd'.*'redis'|allowed: .*'redis'.*'etcd'"),
        ({"kind": "redis"}, "unknown option 'kind'"),
        ({"registry": "static", "options": {"url": "x"}}, "unknown option 'url'"),
        ({"registry": "redis", "options": {"timeout": 1}}, "did you mean 'timeout_s'"),
    ],
)
def test_unknown_kinds_and_keys_are_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_registry(choice)


@pytest.mark.parametrize("kind", ["redis", "etcd"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"prefix": "kvbridge"}, "end with '/'"),
        ({"prefix": "é/"}, "ASCII"),
        ({"url": "ftp://host"}, "url must be .*//host:port"),
        ({"url": "127.0.0.1:80"}, "url must be"),
        ({"password_file": "a", "password_env": "B"}, "keep one"),
        ({"password_file": "/nowhere/secret"}, "/nowhere/secret"),
        ({"password_env": "KVBRIDGE_TEST_NOT_SET"}, "KVBRIDGE_TEST_NOT_SET"),
        ({"cert_file": "/nowhere/cert.pem"}, "belong together"),
        ({"ca_file": "/nowhere/ca.pem"}, "for TLS"),
    ],
)
def test_options_that_cannot_work_are_refused(
    kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_registry({"registry": kind, "options": options})


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("redis", "redis://:hunter2@host:6379"),
        ("redis", "redis://host:6379?password=hunter2"),
        ("redis", "redis://host:hunter2"),
        ("redis", "redis://host/hunter2"),
        ("redis", "redis://user:hunter2#x@host"),
        ("redis", "redis://user:hunter2/x@host"),
        ("redis", "unix://"),
        ("etcd", "http://root:hunter2@host:2379"),
        ("etcd", "http://host:2379/v3"),
        ("etcd", "https://"),
    ],
)
def test_a_url_holds_an_address_alone(kind: str, url: str) -> None:
    with pytest.raises(ConfigError, match="url") as caught:
        open_registry({"registry": kind, "options": {"url": url}})
    assert "hunter2" not in str(caught.value)


def test_tls_files_must_exist(tmp_path: Path) -> None:
    options = {"url": "https://host:2379", "ca_file": str(tmp_path / "ca.pem")}
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "ca.pem"))):
        open_registry({"registry": "etcd", "options": options})


def test_a_password_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    monkeypatch.setenv("KVBRIDGE_TEST_PASSWORD", "s3cret")
    file = str(tmp_path / "password")
    assert RedisOptions().password() is None
    assert RedisOptions(password_file=file).password() == "s3cret"
    assert RedisOptions(password_env="KVBRIDGE_TEST_PASSWORD").password() == "s3cret"


@pytest.mark.parametrize(("kind", "library"), [("redis", "redis"), ("etcd", "etcd3gw")])
def test_a_missing_client_comes_with_the_line_that_installs_it(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=re.escape(f"pip install 'kvbridge[{kind}]'")):
        open_registry({"registry": kind})
