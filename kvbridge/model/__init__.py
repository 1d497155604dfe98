"""Values: what an engine is made of and what its ranks hold."""

from kvbridge.model.arrays import memory_region
from kvbridge.model.cache import CacheComponent, CacheGroup, LayerCache, LayerKey, Rank, RankCache
from kvbridge.model.engine import transfer_infos
from kvbridge.model.layers import attention_layer
from kvbridge.model.memory import Region
from kvbridge.model.topology import EngineId, EngineTransferInfo, TransferTopology

__all__ = [
    "CacheComponent",
    "CacheGroup",
    "EngineId",
    "EngineTransferInfo",
    "LayerCache",
    "LayerKey",
    "Rank",
    "RankCache",
    "Region",
    "TransferTopology",
    "attention_layer",
    "memory_region",
    "transfer_infos",
]
