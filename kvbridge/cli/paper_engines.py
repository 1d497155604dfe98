"""Engines on paper: every rank of a shape, with invented addresses and no memory behind them."""

from dataclasses import dataclass, field

import numpy as np

from kvbridge.cli.model_files import (
    Attention,
    GatedDeltaNet,
    Latent,
    LayerKind,
    Mamba2,
    ModelFile,
    NoCache,
)
from kvbridge.cli.paper_layers import BASE, PaperRank
from kvbridge.cli.shapes import PaperShape
from kvbridge.demo.shape import layer_range
from kvbridge.errors import ConfigError
from kvbridge.model import CacheGroup, Rank, RankCache, Region, TransferTopology
from kvbridge.plan import BlockTable

RANKS_MAX = 1024

_NULL = -1


@dataclass(frozen=True)
class PaperEngine:
    """Every rank of an engine.

    Attributes:
        name: Which engine it is.
        model: What its layers cache.
        shape: How it is split and lays out its cache.
        tokens: Tokens of the longest request that it can hold.
        caches: What every rank holds.
    """

    name: str
    model: ModelFile
    shape: PaperShape
    tokens: int
    caches: dict[Rank, RankCache] = field(init=False)

    def __post_init__(self) -> None:
        """Lay out every rank.

        Raises:
            ConfigError: The model cannot be split like that.
        """
        _check(self.name, self.model, self.shape)
        ranks = [(pp, tp) for pp in range(self.shape.pp) for tp in range(self.shape.tp)]
        object.__setattr__(self, "caches", {rank: _rank_cache(self, rank) for rank in ranks})

    @property
    def blocks(self) -> int:
        """Logical blocks of the longest request."""
        return -(-self.tokens // self.shape.page)

    @property
    def group_kinds(self) -> list[str]:
        """Names of the kinds of layers that have a block table, in the order of the tables."""
        found = dict.fromkeys(self.model.kind_name(i) for i in range(self.model.layers))
        return [name for name in found if not isinstance(self.model.kinds[name], NoCache)]

    def topology(self, rank: Rank) -> TransferTopology:
        """Return the place of a rank in this engine."""
        kinds = [self.model.kinds[name] for name in self.group_kinds]
        return TransferTopology(
            tp_rank=rank[1],
            tp_size=self.shape.tp,
            block_size=self.shape.page,
            engine_id=self.name,
            is_mla=any(isinstance(kind, Latent) for kind in kinds),
            is_mamba=any(isinstance(kind, GatedDeltaNet | Mamba2) for kind in kinds),
            total_num_kv_heads=max(getattr(kind, "kv_heads", 1) for kind in kinds),
            pp_rank=rank[0],
            pp_size=self.shape.pp,
            dcp_size=self.shape.dcp,
        )

    def tables(self, only: int, *, scattered: bool) -> list[BlockTable]:
        """Return the block tables of a request.

        Args:
            only: The one cache group whose blocks are listed; those of the others are null.
            scattered: No two blocks are neighbours; otherwise all are.
        """
        step = 2 if scattered else 1
        tables = []
        for group, name in enumerate(self.group_kinds):
            count = 1 if _is_state(self.model.kinds[name]) else self.blocks
            ids = np.arange(count) * step if group == only else np.full(count, _NULL)
            tables.append(BlockTable(ids, null_block_id=_NULL))
        return tables


def _check(name: str, model: ModelFile, shape: PaperShape) -> None:
    if shape.pp * shape.tp > RANKS_MAX:
        raise ConfigError(
            f"{name}: tp={shape.tp} times pp={shape.pp} is more than {RANKS_MAX} ranks"
        )
    if shape.dcp == 1 and shape.interleave > 1:
        raise ConfigError(
            f"{name}: interleave={shape.interleave} says how dcp ranks share out the tokens, but "
            "dcp=1; leave it out, or give dcp"
        )
    if shape.pp > model.layers:
        raise ConfigError(
            f"{name}: pp={shape.pp} is more than the {model.layers} layers of {model.name}"
        )
    if shape.page % shape.pages_per_block:
        raise ConfigError(
            f"{name}: pages_per_block={shape.pages_per_block} does not divide page={shape.page}, "
            "the tokens of a block"
        )
    if shape.dcp == 1:
        return
    for kind in model.kinds.values():
        held = kind.kv_heads if isinstance(kind, Attention) else 1
        if shape.tp % (held * shape.dcp):
            raise ConfigError(
                f"{name}: dcp={shape.dcp} shares tokens among ranks that hold the same, so "
                f"tp={shape.tp} must be a multiple of {held * shape.dcp} (KV heads times dcp)"
            )


def _is_state(kind: LayerKind) -> bool:
    return isinstance(kind, GatedDeltaNet | Mamba2)


# --- one rank --------------------------------------------------------------------------------


def _rank_cache(engine: PaperEngine, rank: Rank) -> RankCache:
    model, shape = engine.model, engine.shape
    # Scattered tables list every other block.
    paper = PaperRank(shape, rank[1], model.dtype, 2 * engine.blocks)
    groups = engine.group_kinds
    layers = tuple(
        paper.layer(model.kinds[name], i, groups.index(name))
        for i in layer_range(model.layers, shape.pp, rank[0])
        if (name := model.kind_name(i)) in groups
    )
    return RankCache(
        engine.name, *rank,
        layers=layers,
        groups=tuple(_group(model.kinds[name], shape) for name in groups),
        regions=(Region(BASE, max(paper.end - BASE, 1)),),
        dcp_rank=rank[1] % shape.dcp,
        dcp_size=shape.dcp,
        dcp_interleave_tokens=shape.interleave,
    )  # fmt: skip


def _group(kind: LayerKind, shape: PaperShape) -> CacheGroup:
    if _is_state(kind):
        return CacheGroup("state", shape.page)
    word = str(kind.__struct_config__.tag)
    window = getattr(kind, "window_tokens", None)
    return CacheGroup(word, shape.page, shape.pages_per_block, window)
