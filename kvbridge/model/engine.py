"""From every rank's cache to what is remembered of an engine."""

from collections.abc import Mapping

from kvbridge.model.cache import Rank, RankCache
from kvbridge.model.topology import EngineTransferInfo


def transfer_infos(caches: Mapping[Rank, RankCache]) -> list[EngineTransferInfo]:
    """Return the info of every pipeline stage of an engine.

    Args:
        caches: Every rank of the engine; stages without layers are left out.
    """
    infos = []
    for stage in sorted({pp for pp, _ in caches}):
        ranks = sorted(tp for pp, tp in caches if pp == stage)
        first = caches[stage, ranks[0]]
        if not first.layers:
            continue
        layer = min(first.layers, key=lambda layer: layer.layer)
        group = first.groups[layer.group]
        page_nbytes = sum(c.unit_count * c.token_count * c.cell_bytes for c in layer.components)
        infos.append(
            EngineTransferInfo(
                remote_tp_size=len(ranks),
                remote_block_len=page_nbytes * group.pages_per_block,
                remote_block_size=group.block_tokens,
                remote_physical_blocks_per_logical=group.pages_per_block,
                remote_pp_rank=stage,
                start_layer=layer.layer,
                end_layer=1 + max(layer.layer for layer in first.layers),
                remote_dcp_size=first.dcp_size,
            )
        )
    return infos
