"""Which finished requests an engine keeps for others, and what it tells them of it."""

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.connector import params
from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.holds import Holds
from kvbridge.connector.params import RemoteRequest
from kvbridge.connector.series import OFFERS
from kvbridge.connector.sources import Sources
from kvbridge.connector.stats import Meter
from kvbridge.connector.step import Progress
from kvbridge.connector.values import BlockIds, Request
from kvbridge.handshake import EngineAddress, HandshakeMetadata
from kvbridge.model import Rank, RankCache
from kvbridge.session.leases import SLOTS
from kvbridge.session.session import body_of, generation_of
from kvbridge.session.tokens import digest_of_ids, ids_of_tokens

_log = logging.getLogger(__name__)

CHOSEN_MAX = 4 * SLOTS
"""So many names that others chose are known, lest one of them mean two requests."""

_KEEPS_ALL = frozenset({"attention", "mla"})
"""Kinds of cache groups whose tables have an entry for every token of a request."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """What an engine says of itself in every offer.

    Attributes:
        cache: Of any rank: all have the same groups of blocks.
        incarnation: Which start of it.
        generation: Which registration of its memory.
        tp_size: Tensor-parallel ranks of a stage.
        pp_size: Stages.
    """

    cache: RankCache
    incarnation: str
    generation: int
    tp_size: int
    pp_size: int

    @classmethod
    def of(cls, metadata: Mapping[Rank, HandshakeMetadata]) -> "_Engine":
        """Gather it from what the ranks have published."""
        first = next(iter(metadata.values()))
        pp_size, tp_size = (1 + max(rank[axis] for rank in metadata) for axis in (0, 1))
        generation = generation_of(metadata)
        return cls(body_of(first).cache, first.incarnation, generation, tp_size, pp_size)


class Offers:
    """Offers finished requests to other engines, for as long as there is room to keep them."""

    def __init__(
        self,
        config: ConnectorConfig,
        name: str,
        engine_id: str,
        address: EngineAddress,
        *,
        holds: Holds,
        sources: Sources,
        meter: Meter,
    ) -> None:
        """Offer nothing before the engine is published.

        Args:
            config: The connector.
            name: Its name.
            engine_id: The engine.
            address: Where other engines reach it.
            holds: Keeps the blocks.
            sources: Says what holds for every request alike.
            meter: Counts.
        """
        self._config, self._name, self._engine_id = config, name, engine_id
        self._address, self._holds, self._sources, self._meter = address, holds, sources, meter
        self._numbers = itertools.count(1)
        self._engine: _Engine | None = None
        self._chosen: OrderedDict[str, None] = OrderedDict()  # names that others chose
        self._never: list[str] = []  # those of which nothing will be kept
        self._progress: list[Progress] = []

    def publish(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Offer what the ranks hold that have published this."""
        self._engine = _Engine.of(metadata)

    def make(
        self, request: Request, block_ids: BlockIds, chosen: str | None
    ) -> dict[str, Any] | None:
        """Keep a request's blocks, and return what it takes along; None if they are not kept.

        Args:
            request: It has finished.
            block_ids: Its blocks.
            chosen: The name under which another engine may have asked for it.
        """
        engine = self._engine
        transfer_id, lease = chosen or f"{request.request_id}#{next(self._numbers)}", None
        reason, why = self._objection(request, block_ids)
        if not reason and chosen is not None and not self._is_new(chosen):
            reason = "duplicate"
            why = f"its transfer_id {chosen!r:.200} has been another one's; give each its own"
            chosen = None
        ids = b"" if reason else _ids(request)
        if not reason:
            lease = self._holds.grant(
                request.request_id,
                transfer_id,
                block_ids,
                request.computed_tokens,
                b"" if chosen is None else ids,  # what has no chosen name takes its digest along
            )
            if lease is None:
                reason = "leases_max"
                why = f"the blocks of {len(self._holds)} others are held, and {reason} is as low"
        self._meter.count(OFFERS, "declined" if reason else "made", reason)
        if reason or engine is None:
            level = self._sources.level_of(reason) if reason == "role" else logging.WARNING
            _log.log(level, "request %s is not offered: %s", request.request_id, why)
            self.withhold(chosen)
            return None
        remote = RemoteRequest(
            self._engine_id,
            transfer_id,
            self._address,
            block_ids,
            request.computed_tokens,
            engine.incarnation,
            engine.generation,
            lease,
            self._config.lease_s,
            tokens_digest=digest_of_ids(ids, request.computed_tokens) if ids else "",
        )
        sizes = {"tp_size": engine.tp_size, "pp_size": engine.pp_size}
        return params.offer(remote, self._name, **sizes)

    def progress(self, request: Request, block_ids: BlockIds, chosen: str) -> None:
        """Let what a request has computed be written to who waits for it, while it goes on.

        Only where every group of blocks keeps every token: others hold what is of use only once all
        is computed. One that cannot be offered in the end is no better for having gone in part.

        Args:
            request: It has not finished.
            block_ids: Its blocks.
            chosen: The name under which another engine may have asked for it.
        """
        engine = self._engine
        if engine is None or not all(group.kind in _KEEPS_ALL for group in engine.cache.groups):
            return
        reason, _ = self._objection(request, block_ids)
        if not reason and chosen not in self._chosen and request.computed_tokens:
            self._progress.append(Progress(chosen, block_ids, request.computed_tokens))

    def lose(self, chosen: str) -> None:
        """Have what was written of a request written again, since it has lost its blocks."""
        self._progress.append(Progress(chosen))

    def take_progress(self) -> tuple[Progress, ...]:
        """Return what is new of requests that go on since the last call."""
        progress, self._progress = tuple(self._progress), []
        return progress

    def withhold(self, chosen: str | None) -> None:
        """Have it said that nothing will be kept under a name, to whoever waits for it."""
        self._never += filter(None, [chosen])

    def take_withheld(self) -> tuple[str, ...]:
        """Return the names of which that is to be said since the last call."""
        never, self._never = tuple(self._never), []
        return never

    def withdraw(self) -> None:
        """Offer nothing, unless something is published again."""
        self._engine = None

    def _is_new(self, chosen: str) -> bool:
        """Whether a name has not been another request's of late, which somebody may mean."""
        is_new = chosen not in self._chosen
        self._chosen[chosen] = None
        if len(self._chosen) > CHOSEN_MAX:
            self._chosen.popitem(last=False)
        return is_new

    def _objection(self, request: Request, block_ids: BlockIds) -> tuple[str, str]:
        """Return why a request's blocks cannot be kept, in a word and more; empty if they can."""
        if self._config.role == "consumer":
            return "role", self._sources.one_way
        if self._engine is None:
            return "cache", "the engine has published no cache, or has taken it back to sleep"
        if request.request_id in self._holds:
            return "duplicate", (
                "another one of that id is, since it has finished twice; give each request an id "
                "of its own"
            )
        if self._holds.draining:
            return "draining", "the engine is being drained"
        held = _tokens_in(block_ids, self._engine.cache)
        if held < request.computed_tokens:
            # Which of both is wrong cannot be told; to offer part of it could be the wrong part.
            return "blocks", (
                f"the engine has computed {request.computed_tokens} tokens of it, the blocks that "
                f"it lists hold {held}; list its blocks from the first token on"
            )
        return "", ""


def _tokens_in(block_ids: BlockIds, cache: RankCache) -> float:
    """Return how many tokens blocks can hold, by the groups that keep every token."""
    return min(
        (
            len(ids) * group.block_tokens * cache.dcp_size
            for ids, group in zip(block_ids, cache.groups, strict=False)
            if group.kind in _KEEPS_ALL
        ),
        default=math.inf,
    )


def _ids(request: Request) -> bytes:
    """Return the ids of the tokens that a request's blocks hold; nothing if they are not known."""
    tokens = request.tokens
    if tokens is None or len(tokens) < request.computed_tokens:
        return b""
    return ids_of_tokens(tokens, request.computed_tokens)
