"""KVBridge moves KV caches between inference engines that split prefill and decode.

The public names load when they are first used, so that importing the package costs next to
nothing and never loads a vendor library.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it for true; typing's own would load all of typing
if TYPE_CHECKING:
    from typing import Any

    from kvbridge.handshake import HandshakeMetadata, PPAwareHandshake, gather_handshake_metadata
    from kvbridge.model import (
        CacheComponent,
        CacheGroup,
        EngineId,
        EngineTransferInfo,
        LayerCache,
        MambaConvSplitInfo,
        RankCache,
        Region,
        StatePiece,
        TransferTopology,
        attention_layer,
        compute_physical_blocks_per_logical,
        mamba_layer,
        memory_region,
        mla_layer,
        opaque_layer,
    )
    from kvbridge.plan import (
        BlockTable,
        EngineTransferPlan,
        PlanOptions,
        RankPlan,
        ReadSpec,
        Rearrangement,
        RegionPlan,
        StagedTransfer,
        TPMapping,
        TransferBatch,
        compute_tp_mapping,
        generate_engine_transfer_plan,
    )
    from kvbridge.transport import available_transports, get_transport, open_transport

__version__ = "0.1.0"

__all__ = [
    "BlockTable",
    "CacheComponent",
    "CacheGroup",
    "EngineId",
    "EngineTransferInfo",
    "EngineTransferPlan",
    "HandshakeMetadata",
    "LayerCache",
    "MambaConvSplitInfo",
    "PPAwareHandshake",
    "PlanOptions",
    "RankCache",
    "RankPlan",
    "ReadSpec",
    "Rearrangement",
    "Region",
    "RegionPlan",
    "StagedTransfer",
    "StatePiece",
    "TPMapping",
    "TransferBatch",
    "TransferTopology",
    "attention_layer",
    "available_transports",
    "compute_physical_blocks_per_logical",
    "compute_tp_mapping",
    "gather_handshake_metadata",
    "generate_engine_transfer_plan",
    "get_transport",
    "mamba_layer",
    "memory_region",
    "mla_layer",
    "opaque_layer",
    "open_transport",
]

_MODULES = ("kvbridge.model", "kvbridge.plan", "kvbridge.transport", "kvbridge.handshake")


def __getattr__(name: str) -> Any:
    """Load a public name from the module that has it."""
    if name in __all__:
        for module in map(import_module, _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too, before they are loaded."""
    return sorted({*globals(), *__all__})
