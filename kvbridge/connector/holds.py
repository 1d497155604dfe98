"""What an engine keeps for readers, for how long, and who may have it kept for longer."""

import heapq
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvbridge.connector.step import Hold
from kvbridge.connector.values import BlockIds
from kvbridge.session import Lease
from kvbridge.session.leases import EPOCH_BITS, SLOTS


@dataclass(slots=True)
class _Promise:
    """What is promised of one request.

    Attributes:
        until_s: Clock until when it is kept.
        last_s: Clock when no renewal helps any more.
        is_over: Whether the workers are told to let go of it.
    """

    until_s: float
    last_s: float
    is_over: bool = False


class Holds:
    """The requests whose blocks an engine keeps.

    The workers keep the blocks until their readers have reported, or until they are told that the
    lease is over. It is decided here alone, where readers are also told that blocks are kept for
    longer: a rank that hears of that late, since its engine was at one long step, keeps them too.

    :meth:`keep` may be called from any thread, everything else comes from one.
    """

    def __init__(
        self,
        lease_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        most: int = SLOTS,
    ) -> None:
        """Keep nothing yet.

        Args:
            lease_s: How long blocks are kept from the last renewal on.
            longest_s: How long they are kept in all.
            clock: Seconds that never run backwards.
            most: So many requests at once.
        """
        self._lease_s, self._longest_s, self._clock = lease_s, longest_s, clock
        self._slots = deque(range(most))
        self._held: dict[str, Hold] = {}  # by our name for the request
        self._new: list[Hold] = []
        self._lock = threading.Lock()  # guards what follows
        self._promises: dict[str, _Promise] = {}  # by transfer id
        self._ends: list[tuple[float, str]] = []  # a heap; renewed ones are put back when due
        self._draining = False

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's blocks are kept, by our name for it."""
        return request_id in self._held

    def __len__(self) -> int:
        """How many requests' blocks are kept."""
        return len(self._held)

    @property
    def draining(self) -> bool:
        """Whether nothing new is kept."""
        return self._draining

    def grant(
        self,
        request_id: str,
        transfer_id: str,
        block_ids: BlockIds = (),
        num_tokens: int = 0,
        ids: bytes = b"",
    ) -> Lease | None:
        """Keep a request's blocks; None if there is no room for a promise.

        Args:
            request_id: Our engine's name for the request.
            transfer_id: What readers call it.
            block_ids: The blocks.
            num_tokens: Tokens that they hold.
            ids: Those of the tokens, where readers do not know yet which ones they are.
        """
        if not self._slots:
            return None
        lease = Lease(self._slots.popleft(), 1 + secrets.randbelow((1 << EPOCH_BITS) - 1))
        hold = Hold(request_id, transfer_id, lease, block_ids, num_tokens, ids)
        self._held[request_id] = hold
        self._new.append(hold)
        now_s = self._clock()
        promise = _Promise(now_s + self._lease_s, now_s + self._longest_s)
        with self._lock:
            self._promises[transfer_id] = promise
            heapq.heappush(self._ends, (promise.until_s, transfer_id))
        return lease

    def keep(self, transfer_ids: Sequence[str]) -> tuple[list[bool], float]:
        """Keep requests for longer.

        Returns:
            Which are kept, and for how many seconds from now on, at least.
        """
        now_s = self._clock()
        kept, until_s = [], now_s + self._lease_s
        with self._lock:
            for transfer_id in transfer_ids:
                promise = self._promises.get(transfer_id)
                if promise is None or promise.is_over or promise.last_s <= now_s:
                    kept.append(False)
                    continue
                kept.append(True)
                promise.until_s = min(now_s + self._lease_s, promise.last_s)
                until_s = min(until_s, promise.until_s)
        return kept, until_s - now_s

    def sent(self, request_ids: Iterable[str]) -> None:
        """Forget requests whose blocks no worker keeps any more."""
        gone = [self._held.pop(request_id) for request_id in request_ids if request_id in self]
        self._slots.extend(hold.lease.slot for hold in gone)
        with self._lock:
            for hold in gone:
                self._promises.pop(hold.transfer_id, None)

    def drain(self, within_s: float) -> None:
        """Keep nothing new, and nothing for longer than so many seconds."""
        with self._lock:
            self._draining, end_s = True, self._clock() + within_s
            for promise in self._promises.values():
                promise.until_s = min(promise.until_s, end_s)
                promise.last_s = min(promise.last_s, end_s)
            self._ends = [(promise.until_s, each) for each, promise in self._promises.items()]
            heapq.heapify(self._ends)

    def take(self) -> tuple[tuple[Hold, ...], tuple[str, ...]]:
        """Return what the workers do not know yet: new holds, and transfer ids that are over."""
        now_s = self._clock()
        new, self._new = tuple(self._new), []
        with self._lock:
            return new, tuple(self._take_over(now_s))

    def _take_over(self, now_s: float) -> Iterator[str]:
        """End the promises whose time has come."""
        while self._ends and self._ends[0][0] <= now_s:
            _, transfer_id = heapq.heappop(self._ends)
            promise = self._promises.get(transfer_id)
            if promise is None or promise.is_over:
                continue
            if promise.until_s > now_s:
                heapq.heappush(self._ends, (promise.until_s, transfer_id))
                continue
            promise.is_over = True
            yield transfer_id
