"""Pure arithmetic: which bytes of one engine's cache land where in another's."""

from kvbridge.plan.generate import generate_engine_transfer_plan
from kvbridge.plan.mapping import compute_tp_mapping
from kvbridge.plan.plan import EngineTransferPlan
from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.shares import TokenShare
from kvbridge.plan.staged import StagedTransfer
from kvbridge.plan.values import (
    BlockTable,
    Grid,
    Need,
    Paging,
    PlanOptions,
    RankPlan,
    ReadSpec,
    RegionPlan,
    TPMapping,
    TransferBatch,
)

__all__ = [
    "BlockTable",
    "EngineTransferPlan",
    "Grid",
    "Need",
    "Paging",
    "PlanOptions",
    "RankPlan",
    "ReadSpec",
    "Rearrangement",
    "RegionPlan",
    "StagedTransfer",
    "TPMapping",
    "TokenShare",
    "TransferBatch",
    "compute_tp_mapping",
    "generate_engine_transfer_plan",
]
