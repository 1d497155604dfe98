"""The producer's side: which requests' blocks are still needed by whom."""

import time
from collections import OrderedDict
from collections.abc import Callable

from kvbridge.handshake.messages import Release
from kvbridge.model import Rank

Engine = tuple[str, str]
"""Id and incarnation."""

READERS_MAX = 4096
"""So many ranks may report on one request; no engine has more."""
EARLY_MAX = 4096
EXPIRED_MAX = 4096
"""So many requests are known to be over, to tell readers that come late from early ones."""
EARLY_S = 600.0
"""A request that is not held for so long after a reader's report was never to be, or is over."""


class ReleaseBook:
    """Counts, for every request held, the distinct readers that are done with it.

    How many ranks of an engine must report is in their plan and travels with each report; what
    ranks of another engine, or of another start of it, say does not add up with that. Reports that
    come before the request is held are kept, for a time and up to a bound (report B27); repeated
    ones change nothing.

    Attributes:
        duplicates: Reports by a reader that had reported already, or by more than there can be.
        forgotten: Requests that were reported on and have not been held since.
        late: Reports on requests that had been kept for as long as they were to be.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing held; ``clock`` never runs backwards."""
        self._clock = clock
        self._held: set[str] = set()
        self._reports: dict[str, dict[Engine, dict[Rank, int]]] = {}
        self._early: OrderedDict[str, float] = OrderedDict()  # when those not held were reported
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.duplicates = 0
        self.forgotten = 0
        self.late = 0

    @property
    def held(self) -> frozenset[str]:
        """Requests whose blocks must stay as they are."""
        return frozenset(self._held)

    def hold(self, request_id: str) -> bool:
        """Keep a request's blocks for its readers.

        Returns:
            Whether all readers had reported already, so that the blocks are free at once.
        """
        self._held.add(request_id)
        self._early.pop(request_id, None)
        self._expired.pop(request_id, None)
        self._ended.pop(request_id, None)
        return self._settle(request_id)

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self._held.discard(request_id)
        self._early.pop(request_id, None)
        self._reports.pop(request_id, None)
        self._expired[request_id] = None
        if len(self._expired) > EXPIRED_MAX:
            self._expired.popitem(last=False)

    def is_over(self, request_id: str) -> bool:
        """Whether a request was kept, and is so no longer; after thousands of others, unknown."""
        return request_id in self._expired or request_id in self._ended

    def report(self, release: Release) -> bool:
        """Note that a reader is done.

        Returns:
            Whether the request is held and this was the last reader, so that its blocks are free.
        """
        if release.request_id in self._expired:
            self.late += 1
            return False
        engines = self._reports.setdefault(release.request_id, {})
        engine = (release.engine_id, release.incarnation)
        known = release.rank in engines.get(engine, {})
        if known or sum(map(len, engines.values())) >= READERS_MAX:
            self.duplicates += 1
            return False
        engines.setdefault(engine, {})[release.rank] = release.readers
        if self._settle(release.request_id):
            return True
        if release.request_id not in self._held:
            self._early.setdefault(release.request_id, self._clock())
            self._forget()
        return False

    def _forget(self) -> None:
        oldest_s = self._clock() - EARLY_S
        while self._early:
            request_id, since_s = next(iter(self._early.items()))
            if len(self._early) <= EARLY_MAX and since_s >= oldest_s:
                return
            del self._early[request_id], self._reports[request_id]
            self.forgotten += 1

    def _settle(self, request_id: str) -> bool:
        if request_id not in self._held:
            return False
        engines = self._reports.get(request_id, {})
        if not any(len(ranks) >= max(ranks.values()) for ranks in engines.values()):
            return False
        self._held.remove(request_id)
        del self._reports[request_id]
        self._ended[request_id] = None
        if len(self._ended) > EXPIRED_MAX:
            self._ended.popitem(last=False)
        return True
