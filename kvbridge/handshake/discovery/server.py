"""A registry on a server: entries that live as long as they are renewed."""

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from kvbridge.config import TIMEOUT_MAX_S
from kvbridge.errors import ConfigError, HandshakeError, KVBridgeError
from kvbridge.handshake.discovery.base import (
    TTL_S,
    EngineRecord,
    Registry,
    decode_record,
    encode_record,
)

_log = logging.getLogger(__name__)

TTL_MIN_S = 1.0
ENGINES_MAX = 10_000


class Store(ABC):
    """What a server must be able to do: keep values under names, for a time.

    Each method waits for the server no longer than its configured time for each answer, and raises
    :class:`~kvbridge.errors.HandshakeError` when it does not answer or refuses. The first three are
    called by one thread at a time, the others by any.
    """

    address: str
    """The server, for messages."""

    @abstractmethod
    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Keep a value in place of whatever is there."""

    @abstractmethod
    def renew(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Give a value its full time again, or put it where there is none.

        Returns:
            False when another value is there, which stays.
        """

    @abstractmethod
    def delete(self, key: str, value: bytes) -> None:
        """Remove the value, but no other one."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return what is there, or at least the first ``RECORD_MAX_BYTES`` + 1 bytes of it."""

    @abstractmethod
    def get_all(self, limit: int) -> Iterable[tuple[str, bytes]]:
        """Return up to so many names under the prefix, and what is there as ``get`` does."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


@dataclass
class _Announcement:
    key: str
    value: bytes
    ttl_s: float
    due_s: float = 0.0
    found: bool = True

    def put_off(self) -> None:
        """Let engines that were started together not renew together."""
        jitter = random.uniform(0.8, 1.0)  # noqa: S311  (no secret)
        self.due_s = time.monotonic() + self.ttl_s / 3 * jitter


class ServerRegistry(Registry):
    """Keeps its entries alive from a thread of its own, which starts with the first one."""

    def __init__(self, store: Store, prefix: str) -> None:
        """Use a server's entries whose names begin with a prefix."""
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._announced: dict[str, _Announcement] = {}
        # Held while the server is written to, so that no renewal brings back what was withdrawn.
        self._writing = threading.Condition()
        self._counting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answers = True
        self._closed = False

    def announce(self, record: EngineRecord, *, ttl_s: float = TTL_S) -> None:
        if not TTL_MIN_S <= ttl_s <= TIMEOUT_MAX_S:
            raise ConfigError(
                f"ttl_s {ttl_s} must be at least {TTL_MIN_S:g} and at most {TIMEOUT_MAX_S:g}"
            )
        one = _Announcement(self._key(record.engine_id), encode_record(record), ttl_s)
        with self._writing:
            self._check_open()
            self._store.put(one.key, one.value, ttl_s)
            one.put_off()
            self._announced[record.engine_id] = one
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep_renewing, name="kvbridge-registry", daemon=True
                )
                self._thread.start()
            self._writing.notify()

    def withdraw(self, engine_id: str) -> None:
        with self._writing:
            one = self._announced.pop(engine_id, None)
            if one is not None:
                self._store.delete(one.key, one.value)

    def find(self, engine_id: str) -> EngineRecord | None:
        self._check_open()
        key = self._key(engine_id)
        data = self._store.get(key)
        return None if data is None else self._decode(key, data)

    def engines(self) -> tuple[EngineRecord, ...]:
        self._check_open()
        entries = list(self._store.get_all(ENGINES_MAX + 1))
        if len(entries) > ENGINES_MAX:
            raise HandshakeError(
                f"{self._store.address} holds more than {ENGINES_MAX} entries under "
                f"{self._prefix!r}; choose a prefix that nobody else uses"
            )
        # A further slash belongs to somebody's longer prefix: ids have none in their keys.
        own = [(key, data) for key, data in entries if "/" not in key[len(self._prefix) :]]
        records = (self._decode(key, data) for key, data in own)
        return tuple(sorted(filter(None, records), key=lambda record: record.engine_id))

    def close(self) -> None:
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._writing.notify()
        if self._thread is not None:
            self._thread.join()
        try:
            for engine_id in list(self._announced):
                self.withdraw(engine_id)
        except HandshakeError as error:
            _log.warning("what was announced is left to expire: %s", error)
        finally:
            self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise HandshakeError(f"the registry on {self._store.address} is closed; open another")

    def _key(self, engine_id: str) -> str:
        return self._prefix + quote(engine_id, safe="")

    def _decode(self, key: str, data: bytes) -> EngineRecord | None:
        try:
            record = decode_record(data)
            if self._key(record.engine_id) != key:
                raise HandshakeError(f"it speaks of another engine, {record.engine_id!r}")
        except HandshakeError as error:
            with self._counting:
                self.garbage_skipped += 1
            _log.debug("skipped what is under %r on %s: %s", key, self._store.address, error)
            return None
        return record

    def _keep_renewing(self) -> None:
        with self._writing:
            while not self._closed:
                self._renew_due()
                next_s = min((one.due_s for one in self._announced.values()), default=None)
                self._writing.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))

    def _renew_due(self) -> None:
        now_s = time.monotonic()
        due = [one for one in self._announced.values() if one.due_s <= now_s]
        try:
            for one in due:
                self._renewed(one, found=self._store.renew(one.key, one.value, one.ttl_s))
        except Exception as error:  # the thread must outlive whatever a client library raises
            self.renewals_failed += 1
            if self._answers:
                self._answers = False
                _log.warning(
                    "entries are not renewed, and expire: %s; still trying",
                    error,
                    exc_info=not isinstance(error, KVBridgeError),
                )
        for one in due:
            one.put_off()

    def _renewed(self, one: _Announcement, *, found: bool) -> None:
        if not self._answers:
            self._answers = True
            _log.warning("%s answers again, entries are renewed", self._store.address)
        if found != one.found:
            one.found = found
            _log.warning(
                "under %r on %s stands %s", one.key, self._store.address,
                "this engine again" if found else "another incarnation; this one cannot be found",
            )  # fmt: skip
