"""Values: what an engine is made of and what its ranks hold."""

from kvbridge.model.arrays import ArrayView, memory_region, view_of
from kvbridge.model.cache import (
    CacheComponent,
    CacheGroup,
    Geometry,
    LayerCache,
    LayerKey,
    Rank,
    RankCache,
)
from kvbridge.model.engine import transfer_infos
from kvbridge.model.layers import attention_layer, mla_layer, opaque_layer
from kvbridge.model.memory import Region
from kvbridge.model.state import (
    MambaConvSplitInfo,
    StatePiece,
    compute_physical_blocks_per_logical,
    mamba_layer,
)
from kvbridge.model.topology import EngineId, EngineTransferInfo, TransferTopology

__all__ = [
    "ArrayView",
    "CacheComponent",
    "CacheGroup",
    "EngineId",
    "EngineTransferInfo",
    "Geometry",
    "LayerCache",
    "LayerKey",
    "MambaConvSplitInfo",
    "Rank",
    "RankCache",
    "Region",
    "StatePiece",
    "TransferTopology",
    "attention_layer",
    "compute_physical_blocks_per_logical",
    "mamba_layer",
    "memory_region",
    "mla_layer",
    "opaque_layer",
    "transfer_infos",
    "view_of",
]
