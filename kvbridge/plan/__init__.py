"""Pure arithmetic: which bytes of one engine's cache land where in another's."""

from kvbridge.plan.digest import digests_of
from kvbridge.plan.digest_cells import CellRange
from kvbridge.plan.digest_probes import Probe, first_difference, probes_of, sample_probes
from kvbridge.plan.generate import generate_engine_transfer_plan
from kvbridge.plan.mapping import compute_tp_mapping
from kvbridge.plan.packed import PackedStream
from kvbridge.plan.plan import EngineTransferPlan
from kvbridge.plan.rearrange import Rearrangement
from kvbridge.plan.shares import TokenShare
from kvbridge.plan.staged import StagedPortion, StagedTransfer
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
    "CellRange",
    "EngineTransferPlan",
    "Grid",
    "Need",
    "PackedStream",
    "Paging",
    "PlanOptions",
    "Probe",
    "RankPlan",
    "ReadSpec",
    "Rearrangement",
    "RegionPlan",
    "StagedPortion",
    "StagedTransfer",
    "TPMapping",
    "TokenShare",
    "TransferBatch",
    "compute_tp_mapping",
    "digests_of",
    "first_difference",
    "generate_engine_transfer_plan",
    "probes_of",
    "sample_probes",
]
