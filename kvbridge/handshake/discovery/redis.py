"""A registry on Redis: a key with a time to live for each engine, and an index of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from kvbridge.errors import ConfigError, HandshakeError, HandshakeTimeoutError
from kvbridge.handshake.discovery.base import RECORD_MAX_BYTES
from kvbridge.handshake.discovery.options import ServerOptions
from kvbridge.handshake.discovery.server import Store

# Looking for keys by their prefix would go through the whole database, which may be anybody's.
# The index knows when each key will have expired, by the server's clock; no key's name, which
# holds no "!", collides with its own. pcall: a key of another type is an error, equal to nothing.
_INDEX = "!engines"
_ENTER = """
local key, index, value, ttl_ms, again = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local held = redis.pcall('GET', key)
if again == '1' and held and held ~= value then return 0 end
local now_s = tonumber(redis.call('TIME')[1])
redis.call('SET', key, value, 'PX', ttl_ms)
if redis.call('TYPE', index).ok ~= 'zset' then redis.call('DEL', index) end
redis.call('ZADD', index, now_s + math.ceil(ttl_ms / 1000) + 1, key)
redis.call('ZREMRANGEBYSCORE', index, '-inf', '(' .. now_s)
return 1
"""
_DELETE = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
    redis.call('DEL', KEYS[1])
    redis.pcall('ZREM', KEYS[2], KEYS[1])
end
"""


class RedisOptions(ServerOptions, frozen=True):
    """Options of the registry ``redis``: ``redis://``, ``rediss://`` (TLS) or ``unix://``.

    A number after the host selects a database: ``redis://host:6379/3``.
    """

    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss", "unix")
    paths: ClassVar[str] = r"/?|/[0-9]+"
    written: ClassVar[str] = "redis://host:port, rediss://host:port or unix:///path"

    url: str = "redis://127.0.0.1:6379"


class RedisStore(Store):
    """Keeps values in Redis through redis-py."""

    def __init__(self, options: RedisOptions) -> None:
        """Prepare to connect; the first command connects.

        Raises:
            ConfigError: redis-py is not installed, or the password is not where it should be.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(
                f"registry 'redis' cannot be used: {error}. Install its client with: "
                "pip install 'kvbridge[redis]'"
            ) from error
        self.address = options.url
        self._index = options.prefix + _INDEX
        self._options = options
        self._errors = redis.RedisError
        self._timeouts = redis.TimeoutError
        self._response_error = redis.ResponseError
        tls = {"ssl_ca_certs": options.ca_file, "ssl_certfile": options.cert_file,
               "ssl_keyfile": options.key_file}  # fmt: skip
        self._client: Any = redis.Redis.from_url(
            options.url,
            username=options.username or None,
            password=options.password(),
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            # By default a call is tried ten times more, each with the full time-out.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **{name: file for name, file in tls.items() if file},
        )

    def put(self, key: str, value: bytes, ttl_s: float) -> None:
        self._enter(key, value, ttl_s, again=False)

    def renew(self, key: str, value: bytes, ttl_s: float) -> bool:
        return self._enter(key, value, ttl_s, again=True)

    def _enter(self, key: str, value: bytes, ttl_s: float, *, again: bool) -> bool:
        ttl_ms = int(ttl_s * 1000)
        with self._answering():
            done = self._client.eval(_ENTER, 2, key, self._index, value, ttl_ms, int(again))
        return bool(done)

    def delete(self, key: str, value: bytes) -> None:
        with self._answering():
            self._client.eval(_DELETE, 2, key, self._index, value)

    def get(self, key: str) -> bytes | None:
        with self._answering():
            return self._read([key])[0] or None

    def get_all(self, limit: int) -> Iterable[tuple[str, bytes]]:
        with self._answering():
            keys = self._client.zrange(self._index, 0, limit - 1)
            values = self._read(keys)
        return [
            (key.decode(errors="replace"), value)
            for key, value in zip(keys, values, strict=True)
            if value  # else it has expired
        ]

    def close(self) -> None:
        self._client.close()

    def _read(self, keys: Iterable[str | bytes]) -> list[bytes]:
        """Return the start of each value; what is no text at all reads as one wrong byte."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(key, 0, RECORD_MAX_BYTES)
        values = pipeline.execute(raise_on_error=False)
        for index, value in enumerate(values):
            if isinstance(value, self._response_error) and str(value).startswith("WRONGTYPE"):
                values[index] = b"?"
            elif isinstance(value, Exception):
                raise value
        return list(values)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self._timeouts as error:
            raise HandshakeTimeoutError(
                f"registry {self.address} did not answer within {self._options.timeout_s:g} s; "
                "check that Redis runs there"
            ) from error
        except self._errors as error:
            raise HandshakeError(
                f"registry {self.address}: {error}; check that Redis runs there, and the user and "
                "password given for it"
            ) from error
