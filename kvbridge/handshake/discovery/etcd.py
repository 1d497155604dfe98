"""A registry on etcd: one key on a lease of its own for each announcement."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from kvbridge.errors import ConfigError, HandshakeError, HandshakeTimeoutError
from kvbridge.handshake.discovery.options import ServerOptions
from kvbridge.handshake.discovery.server import Store

_NO_LEASE = "requested lease not found"
# What etcd says to a token that has expired, or was given before a restart or a change of users.
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")

AnswerT = TypeVar("AnswerT")


def _words(told: str) -> str:
    """Return the reason in etcd's JSON, or in what the HTTP library wraps around it."""
    message = re.search(r'"message":"([^"]+)"', told)
    return message[1] if message else told.rpartition("Caused by ")[2]


class EtcdOptions(ServerOptions, frozen=True):
    """Options of the registry ``etcd``: ``http://`` or ``https://``."""

    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    written: ClassVar[str] = "http://host:port or https://host:port"

    url: str = "http://127.0.0.1:2379"


class EtcdStore(Store):
    """Keeps values in etcd (3.3 or later) through etcd3gw, the client of its JSON gateway.

    Leases count whole seconds, and etcd makes short ones a little longer.
    """

    def __init__(self, options: EtcdOptions) -> None:
        """Prepare to connect; the first request connects.

        Raises:
            ConfigError: etcd3gw is not installed, or the password is not where it should be.
        """
        try:
            import etcd3gw
            import requests
        except ImportError as error:
            raise ConfigError(
                f"registry 'etcd' cannot be used: {error}. Install its client with: "
                "pip install 'kvbridge[etcd]'"
            ) from error
        self.address = options.url
        self._options = options
        self._failure = etcd3gw.exceptions.Etcd3Exception
        self._timeout = etcd3gw.exceptions.ConnectionTimeoutError
        self._password = options.password()
        self._logged_in = not options.username
        self._leases: dict[str, Any] = {}
        self._session = requests.Session()
        # Otherwise HTTP_PROXY would be asked for it, and ~/.netrc replace its token.
        self._session.trust_env = False
        self._session.verify = options.ca_file or True
        if options.cert_file:
            self._session.cert = (options.cert_file, options.key_file)
        parts = urlsplit(options.url)
        self._client: Any = etcd3gw.Etcd3Client(
            host=parts.hostname or "",
            port=parts.port or 2379,
            protocol=parts.scheme,
            timeout=options.timeout_s,
            session=self._session,
        )

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        def put() -> None:
            lease = self._client.lease(math.ceil(ttl_s))
            self._client.put(key, value, lease)
            self._leases[key] = lease

        self._ask(put)

    def renew(self, key: str, value: bytes, ttl_s: float) -> bool:
        return self._ask(lambda: self._extend(key) or self._create(key, value, ttl_s))

    def _extend(self, key: str) -> bool:
        """Renew the lease; say whether the key still hangs on it."""
        lease = self._leases.get(key)
        if lease is None or lease.refresh() < 0:
            return False
        held = self._client.get(key.encode(), metadata=True)
        return bool(held) and held[0][1].get("lease") == str(lease.id)

    def _create(self, key: str, value: bytes, ttl_s: float) -> bool:
        lease = self._client.lease(math.ceil(ttl_s))
        if self._client.create(key.encode(), value, lease):
            self._leases[key] = lease
            return True
        lease.revoke()
        return False

    def delete(self, key: str, value: bytes) -> None:
        """Revoke the lease: a key that another incarnation has put hangs on another one."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return

        def revoke() -> None:
            try:
                lease.revoke()
            except self._failure as error:
                if _NO_LEASE not in (error.detail_text or ""):
                    raise

        self._ask(revoke)

    def get(self, key: str) -> bytes | None:
        found: list[bytes] = self._ask(lambda: self._client.get(key.encode()))
        return found[0] if found else None

    def get_all(self, limit: int) -> Iterable[tuple[str, bytes]]:
        prefix = self._options.prefix
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self._ask(
            lambda: self._client.get(prefix.encode(), metadata=True, range_end=end, limit=limit)
        )
        return [(meta["key"].decode(errors="replace"), value) for value, meta in found]

    def close(self) -> None:
        self._session.close()

    def _ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Ask the server, logged in where that is needed, and put failures in our words."""
        try:
            if not self._logged_in:
                self._log_in()
            try:
                return question()
            except self._failure as error:
                told = error.detail_text or ""
                if not self._options.username or not any(words in told for words in _OLD_TOKEN):
                    raise
            self._log_in()
            return question()
        except self._timeout as error:
            raise HandshakeTimeoutError(
                f"registry {self.address} did not answer within {self._options.timeout_s:g} s; "
                "check that etcd runs there"
            ) from error
        except self._failure as error:
            raise HandshakeError(
                f"registry {self.address}: {_words(error.detail_text or str(error))}; check that "
                "etcd runs there, and the user and password given for it"
            ) from error
        # Other failures of the HTTP library, and answers that are not etcd's.
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise HandshakeError(
                f"registry {self.address} cannot be used: {error!r}; check that it is etcd's "
                "client port"
            ) from error

    def _log_in(self) -> None:
        self._session.headers.pop("Authorization", None)
        answer = self._client.post(
            self._client.get_url("/auth/authenticate"),
            json={"name": self._options.username, "password": self._password or ""},
        )
        self._session.headers["Authorization"] = answer["token"]
        self._logged_in = True
