"""This rank as its peers know it: what it holds, and what of that must agree with theirs."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from kvbridge.errors import ConfigError
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    RankPayload,
    engine_factors,
    factors_of,
)
from kvbridge.handshake.compatibility import LAYERED
from kvbridge.handshake.metadata import decode_factors, seal
from kvbridge.model import Rank, RankCache, Region, TransferTopology
from kvbridge.session.digesting import can_digest
from kvbridge.session.session import body_of, memory_of


class LocalRank:
    """What a rank is, in its present registration.

    Attributes:
        cache: What it holds.
        memory: The kind of memory, and the device, that this lies in.
        engine: What every rank of our engine holds; None until that is known.
        incarnation: Fresh at every start of the engine, the same for its ranks.
        generation: How often the memory has been registered.
    """

    def __init__(
        self,
        topology: TransferTopology,
        cache: RankCache,
        *,
        incarnation: str | None,
        model: str,
        revision: str | None,
        transport: str,
        draft_layers: Iterable[int],
    ) -> None:
        """Describe a rank; see :class:`RankAgent` for the arguments and for what is raised."""
        if topology.engine_id != cache.engine_id or not model:
            raise ConfigError(
                f"{cache.where} cannot be of engine {topology.engine_id!r} with model {model!r}; "
                "pass the cache of the topology's engine, and the name of its model"
            )
        self._is_staged = topology.pp_size > 1
        self._named: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "transport": transport,
            "draft_layers": tuple(draft_layers),
        }
        self.cache, self.memory = cache, memory_of(cache.regions, cache.where)
        self.engine: Mapping[Rank, RankCache] | None = None
        self.incarnation = incarnation or uuid.uuid4().hex
        self.generation = 1
        self._factors = factors_of(cache, **self._named)
        self._engine_factors: dict[str, Any] | None = None

    def metadata(
        self,
        agent_info: bytes,
        leases: Region,
        *,
        gives: bool,
        staging: Region | None = None,
        packs_nbytes: int = 0,
    ) -> HandshakeMetadata:
        """Return what this rank publishes.

        Args:
            agent_info: What its transport says.
            leases: Where its table of leases is.
            gives: Whether other ranks may ask it to write.
            staging: Where they may write what it puts in its place.
            packs_nbytes: The longest part that it packs for them.
        """
        cache = self.cache
        payload = RankPayload(
            cache, agent_info, leases, gives, can_digest(cache), staging, packs_nbytes
        )
        sealed = seal(
            self._factors,
            payload,
            engine_id=cache.engine_id,
            incarnation=self.incarnation,
            generation=self.generation,
        )
        return HandshakeMetadata(
            cache.engine_id, self.incarnation, cache.pp_rank, cache.tp_rank, sealed
        )

    def share(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Take what all ranks of our own engine published.

        Raises:
            HandshakeError: The metadata cannot be read.
        """
        self._engine_factors = engine_factors(decode_factors(d.payload) for d in metadata.values())
        self.engine = {rank: body_of(data).cache for rank, data in metadata.items()}

    @property
    def factors(self) -> dict[str, Any]:
        """What must agree with a peer; of the whole engine, once its ranks are known."""
        if self._engine_factors is not None:
            return self._engine_factors
        if not self._is_staged:
            return self._factors
        return {name: value for name, value in self._factors.items() if name not in LAYERED}

    def memory_of_next(self, cache: RankCache) -> tuple[str, int]:
        """Return the kind of memory, and the device, of what is to take the cache's place.

        Raises:
            ConfigError: The cache is of another engine or rank.
            UnsupportedLayoutError: It lies in several kinds of memory.
        """
        if (cache.engine_id, cache.rank) != (self.cache.engine_id, self.cache.rank):
            raise ConfigError(f"{cache.where} cannot take the place of {self.cache.where}")
        return memory_of(cache.regions, cache.where)

    def renew(self, cache: RankCache, memory: tuple[str, int]) -> None:
        """Be what has been registered now."""
        self.cache, self.memory = cache, memory
        self._factors = factors_of(cache, **self._named)
        self._engine_factors = self.engine = None
        self.generation += 1

    def named(self, address: EngineAddress) -> tuple[str, str, int, Rank, tuple[str, int]]:
        """Return who asks, as it stands in all that a reader asks for.

        Args:
            address: Where our engine's handshake server listens.
        """
        where = (address.host, address.port)
        cache = self.cache
        return cache.engine_id, self.incarnation, self.generation, cache.rank, where
