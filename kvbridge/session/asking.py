"""What this rank asks of a producer's ranks, and block tables as they are sent for that."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvbridge.errors import BlockTableError, ConfigError
from kvbridge.handshake import EngineAddress
from kvbridge.handshake.digests import DigestRequest
from kvbridge.handshake.messages import Blocks, Want
from kvbridge.plan import BlockTable
from kvbridge.session.leases import Lease
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.questions import CheckMode, PayloadCheck
from kvbridge.session.transfer import Transfer


class Portion(NamedTuple):
    """What of a request comes here.

    Attributes:
        tables: Where the tokens go.
        start_token: First token.
        end_token: One past the last token.
        lease: The remote engine's promise to keep the blocks that they come from.
        tokens_digest: What tells the request's tokens, from the first one on, from others.
    """

    tables: Sequence[BlockTable] = ()
    start_token: int = 0
    end_token: int = 0
    lease: Lease | None = None
    tokens_digest: str = ""

    @property
    def epoch(self) -> int | None:
        """That of the lease."""
        return None if self.lease is None else self.lease.epoch


def want_of(
    local: LocalRank, number: int, transfer: Transfer, address: EngineAddress, portion: Portion
) -> Want:
    """Return what one rank is asked to write; nothing, if no tokens are to come.

    Args:
        local: Who asks.
        number: That of the want.
        transfer: What it is for.
        address: Where our engine's handshake server listens.
        portion: What is to come.

    Raises:
        BlockTableError: An id is no number of a block.
    """
    return Want(
        number,
        transfer.request_id,
        *local.named(address),
        portion.epoch,
        blocks=blocks_of(portion.tables),
        start_token=portion.start_token,
        end_token=portion.end_token,
        timeout_s=transfer.deadline_s - transfer.started_s,
        tokens_digest=portion.tokens_digest,
    )


def check_of(
    local: LocalRank,
    transfer: Transfer,
    mode: CheckMode | None,
    address: EngineAddress | None,
    portion: Portion,
) -> PayloadCheck | None:
    """Return what a transfer is to be checked for.

    Args:
        local: Who asks.
        transfer: The transfer.
        mode: How much is compared; None for nothing.
        address: Where our engine's handshake server listens.
        portion: What is to come.

    Raises:
        ConfigError: Nobody could say where the answer goes.
    """
    if mode is None:
        return None
    if address is None:
        raise ConfigError(
            "a payload check needs the address at which other engines meet this one; pass it, "
            "or set payload_check to 'off'"
        )
    asks = DigestRequest(0, transfer.request_id, *local.named(address), portion.epoch)
    return PayloadCheck(mode, portion.tables, portion.start_token, portion.end_token, asks)


def blocks_of(tables: Sequence[BlockTable]) -> tuple[Blocks, ...]:
    """Return block tables as they are sent.

    Raises:
        BlockTableError: An id is no number of a block.
    """
    return tuple(
        Blocks(_packed(table), int(table.start_token), table.null_block_id) for table in tables
    )


def _packed(table: BlockTable) -> bytes:
    ids = np.asarray(table.block_ids)
    if not ids.size:
        return b""
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 1 << 32:
        raise BlockTableError(
            f"a block table lists {ids.tolist()[:8]}...; ids of blocks are whole numbers from 0 on"
        )
    return ids.astype("<u4").tobytes()


def tables_of(blocks: Sequence[Blocks]) -> list[BlockTable]:
    """Return block tables as they were sent."""
    return [
        BlockTable(
            np.frombuffer(each.ids, "<u4").astype(np.int64), each.start_token, each.null_block_id
        )
        for each in blocks
    ]
