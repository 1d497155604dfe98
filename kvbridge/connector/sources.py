"""Where the blocks of requests are, as far as their params make sense to a connector."""

import logging
from collections.abc import Mapping

from kvbridge.connector import params
from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.params import RemoteRequest
from kvbridge.connector.series import PARAMS_REFUSED
from kvbridge.connector.stats import Meter
from kvbridge.connector.values import Request
from kvbridge.errors import ConfigError
from kvbridge.session.tokens import digest_of_tokens

_log = logging.getLogger(__name__)


class Sources:
    """Reads what came with requests; what is of no use is said and counted once for each.

    The engine can compute what it cannot load: a stranger's mistake is not its end.
    """

    def __init__(self, config: ConnectorConfig, name: str, meter: Meter) -> None:
        """Read for one connector.

        Args:
            config: The connector.
            name: Its name.
            meter: Counts what is refused.
        """
        self._name, self._role, self._meter = name, config.role, meter
        self._refused: set[str] = set()  # requests whose params are of no use here
        self._own: set[str] = set()  # those whose blocks hold their own tokens
        self._said: set[str] = set()  # reasons that hold for every request alike

    def of(self, request: Request) -> RemoteRequest | None:
        """Return where a request's blocks are, if they are anywhere, and we take blocks."""
        given: object = request.params
        if given is not None and not isinstance(given, Mapping):
            self.refuse(request, "loaded", f"its params are a {type(given).__name__}, no mapping")
            return None
        if not params.wants_remote_prefill(request.params) or request.params is None:
            return None
        if self._role == "producer":
            if self._is_new(request, "role"):
                level, why = self.level_of("role"), self.one_way
                _log.log(level, "request %s is not loaded: %s", request.request_id, why)
            return None
        try:
            remote = params.remote_request(request.params, self._name)
        except ConfigError as error:
            self.refuse(request, "loaded", str(error))
            return None
        if remote is None and self._is_new(request, "unmatched"):
            _log.log(
                self.level_of("unmatched"),
                "request %s is offered by connectors %s and not by %r; connectors are paired "
                "by their names, so give them the same on both engines (said once)",
                request.request_id,
                params.offered_by(request.params),
                self._name,
            )
        return remote if remote is None or self._is_own(request, remote) else None

    def _is_own(self, request: Request, remote: RemoteRequest) -> bool:
        """Whether blocks hold a request's own tokens, as far as both engines say what those are."""
        if request.tokens is None or not remote.tokens_digest or request.request_id in self._own:
            return True
        count, here = remote.num_tokens, len(request.tokens)
        if count > here:
            why = f"the blocks hold {count} tokens, it has {here}"
        elif digest_of_tokens(request.tokens, count) != remote.tokens_digest:
            why = f"the first {count} tokens of it are others than those that the blocks hold"
        else:
            self._own.add(request.request_id)
            return True
        self.refuse(request, "loaded", f"{why}; the router gives it another one's params")
        return False

    def refuse(self, request: Request, what: str, why: str) -> None:
        """Say that something cannot be done with a request, such as "loaded", and why."""
        if self._is_new(request, "malformed"):
            _log.warning("request %s cannot be %s: %s", request.request_id, what, why)

    def forget(self, request: Request) -> None:
        """Take note that a request has finished; its id may come again."""
        self._refused.discard(request.request_id)
        self._own.discard(request.request_id)

    @property
    def one_way(self) -> str:
        """Why a connector that only gives, or only takes, does not do the other."""
        does = "gives" if self._role == "producer" else "takes"
        return (
            f"connector {self._name!r} has the role {self._role!r}, so its engine only "
            f"{does}; where blocks go both ways, give it the role 'both' (of vLLM: the kv_role "
            "'kv_both'; said once)"
        )

    def level_of(self, reason: str) -> int:
        """Return how loud to say what holds for every request alike: the first time, aloud."""
        level = logging.INFO if reason in self._said else logging.WARNING
        self._said.add(reason)
        return level

    def _is_new(self, request: Request, reason: str) -> bool:
        """Count a request whose params are of no use, once, however often it is looked at."""
        if request.request_id in self._refused:
            return False
        self._refused.add(request.request_id)
        self._meter.count(PARAMS_REFUSED, reason)
        return True
