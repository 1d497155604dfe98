"""What a registry holds, the one place where it is decoded, and what every registry does."""

import re
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import msgspec

from kvbridge.errors import ConfigError, HandshakeError

TTL_S = 15.0
RECORD_MAX_BYTES = 8192
_TEXT_MAX_CHARS = 256
_HOST = re.compile(r"[0-9A-Za-z._:%\[\]-]+")


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's handshake is served.

    Attributes:
        engine_id: The engine.
        incarnation: Fresh at every start of the engine; empty where nobody knows it.
        host: Name or address, as its peers reach it.
        port: Port of its handshake server.
        labels: A few words for people and routers, such as its role and model.
    """

    engine_id: str
    incarnation: str
    host: str
    port: int
    labels: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Refuse what no engine can be found by.

        Raises:
            ConfigError: An id, the host, the port or a label is impossible.
        """
        _check_text("engine_id", self.engine_id)
        _check_text("host", self.host)
        if self.incarnation:
            _check_text("incarnation", self.incarnation)
        if not _HOST.fullmatch(self.host):
            raise ConfigError(f"host {self.host!r} must be a plain host name or an IP address")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} of host {self.host!r} must be in [1, 65535]")
        for name, value in self.labels.items():
            _check_text("label", name)
            if value:
                _check_text(f"label {name!r}", value)


def _check_text(what: str, text: str) -> None:
    if not 1 <= len(text) <= _TEXT_MAX_CHARS or not text.isprintable():
        raise ConfigError(
            f"{what} {text[:40]!r} of {len(text)} characters must be 1 to {_TEXT_MAX_CHARS} "
            "printable characters"
        )


def encode_record(record: EngineRecord) -> bytes:
    """Return what a registry stores: JSON, which an operator can read.

    Raises:
        ConfigError: It would be larger than any reader accepts.
    """
    data = msgspec.json.encode(record)
    if len(data) > RECORD_MAX_BYTES:
        raise ConfigError(
            f"the record of engine {record.engine_id!r} takes {len(data)} bytes, "
            f"{RECORD_MAX_BYTES} are allowed; give it fewer or shorter labels"
        )
    return data


def decode_record(data: bytes) -> EngineRecord:
    """Return the record in what a registry stores, which anybody may have written.

    Raises:
        HandshakeError: It is none.
    """
    if len(data) > RECORD_MAX_BYTES:
        raise HandshakeError(f"engine record is larger than {RECORD_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=EngineRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError(f"engine record of {len(data)} bytes: {error}") from error


class Registry(ABC):
    """Tells engines where the others are.

    It tells addresses and proves nothing: who answers there is for the handshake to find out.
    Any thread may call any method. What is announced is withdrawn by :meth:`close`, and vanishes by
    itself when the process dies.

    Attributes:
        renewals_failed: Attempts to renew an entry that the server did not answer, or refused.
        garbage_skipped: Entries read so far that were no engine's record.
    """

    def __init__(self) -> None:
        """Start counting."""
        self.renewals_failed = 0
        self.garbage_skipped = 0

    @abstractmethod
    def announce(self, record: EngineRecord, *, ttl_s: float = TTL_S) -> None:
        """Enter an engine, in place of whatever stands under its id, and keep it entered.

        Announce it again when something about it has changed. Of several live incarnations the
        one that was announced last is found; an older one comes back if that one goes first.

        Args:
            record: The engine.
            ttl_s: How long the entry outlives the process.

        Raises:
            ConfigError: The record is too large, or the time impossible.
            HandshakeError: The server did not take it; nothing is kept up, so try again.
        """

    @abstractmethod
    def withdraw(self, engine_id: str) -> None:
        """Remove what was announced here for an engine; a newer incarnation's entry stays.

        Nothing happens for an engine that was not announced here.

        Raises:
            HandshakeError: The server did not answer; the entry expires by itself.
        """

    @abstractmethod
    def find(self, engine_id: str) -> EngineRecord | None:
        """Return an engine's record, or None when there is none.

        Raises:
            HandshakeError: The server did not answer.
        """

    @abstractmethod
    def engines(self) -> tuple[EngineRecord, ...]:
        """Return every engine's record, by engine id.

        Raises:
            HandshakeError: The server did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Withdraw what was announced, as far as the server answers. Idempotent, never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
