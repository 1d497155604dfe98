"""Tokens of requests that have not finished, but whose readers are waiting already.

What is computed may go before the rest is. Until a request has finished its blocks are no reader's:
they may be taken away from it, computed anew in other ones, or never be finished. So what was taken
away is given again from the first token on, once nothing that was written from it is on its way.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from kvbridge.plan import BlockTable

COMPUTED_MAX = 4096
"""So many requests are known; one that is forgotten is written again once it has finished."""


class Event(Protocol):
    """Something that a device has done or not, such as a ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has; never waits."""


class Ready(NamedTuple):
    """What of a request can be written now.

    Attributes:
        tables: Its blocks.
        end_token: One past the last token that is there.
        attempt: What they were filled in; another one since its blocks have been taken away.
        is_all: Whether that is all that was wanted.
    """

    tables: Sequence[BlockTable]
    end_token: int
    attempt: int
    is_all: bool


@dataclass(slots=True)
class _Part:
    """What is known of one request.

    Attributes:
        attempt: No two have the same.
        tables: Its blocks.
        num_tokens: Tokens that are there, from the first one on.
        coming: Those that will be as soon as an event has come, in their order.
    """

    attempt: int
    tables: Sequence[BlockTable] = ()
    num_tokens: int = 0
    coming: tuple[tuple[Event, int], ...] = ()


class Computed:
    """What is there of requests that have not finished, by our names for them."""

    def __init__(self) -> None:
        """Know of none."""
        self._attempts = itertools.count(1)
        self._parts: dict[str, _Part] = {}

    def grow(
        self,
        request_id: str,
        tables: Sequence[BlockTable],
        num_tokens: int,
        event: Event | None = None,
    ) -> None:
        """Take note of tokens that are there, or will be once an event has come."""
        part = self._parts.get(request_id)
        if part is None or not _goes_on(part, tables, num_tokens):
            part = self._begin(request_id)
        part.tables = tables
        if event is None:
            part.num_tokens, part.coming = num_tokens, ()
        else:
            part.coming = (*part.coming, (event, num_tokens))

    def take_away(self, request_id: str) -> None:
        """Take note that a request has lost its blocks."""
        self._begin(request_id)

    def finish(self, request_id: str, tables: Sequence[BlockTable], num_tokens: int) -> int:
        """Forget a request that has finished; return in which attempt."""
        part = self._parts.pop(request_id, None)
        if part is None or not _goes_on(part, tables, num_tokens):
            return next(self._attempts)
        return part.attempt

    def _begin(self, request_id: str) -> _Part:
        self._parts.pop(request_id, None)
        self._parts[request_id] = part = _Part(next(self._attempts))
        if len(self._parts) > COMPUTED_MAX:
            del self._parts[next(iter(self._parts))]
        return part

    def forget(self, request_id: str) -> None:
        """Forget a request that will never finish."""
        self._parts.pop(request_id, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._parts.clear()

    def ready(self, request_id: str, end_token: int) -> Ready | None:
        """Return what is there of the first so many tokens of a request; None if nothing is."""
        part = self._parts.get(request_id)
        if part is None:
            return None
        while part.coming and part.coming[0][0].query():
            (_, part.num_tokens), *rest = part.coming
            part.coming = tuple(rest)
        # That it has finished is still to be said: only then are its blocks kept.
        return Ready(part.tables, min(part.num_tokens, end_token), part.attempt, is_all=False)


def _goes_on(part: _Part, tables: Sequence[BlockTable], num_tokens: int) -> bool:
    """Whether what was there before is still there, as far as its blocks tell."""
    known = part.coming[-1][1] if part.coming else part.num_tokens
    if not part.tables:  # it has none since they were taken away
        return True
    return num_tokens >= known and all(
        _begins_with(table, before) for table, before in zip(tables, part.tables, strict=True)
    )


def _begins_with(table: BlockTable, before: BlockTable) -> bool:
    """Whether a table lists the blocks that it listed before, and then perhaps more.

    Those that a window has left behind are listed no more, and are needed no more either.
    """
    then, now = np.asarray(before.block_ids), np.asarray(table.block_ids)
    if now.size < then.size:
        return False
    now = now[: then.size]
    is_same = now == then
    if table.null_block_id is not None:
        is_same |= now == table.null_block_id
    return bool(is_same.all())
