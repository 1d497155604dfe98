"""What a scheduler half tells the workers, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.connector.params import RemoteRequest
from kvbridge.connector.values import BlockIds
from kvbridge.handshake import EngineAddress, HandshakeMetadata
from kvbridge.model import Rank
from kvbridge.session import Lease


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens to read from another engine.

    Attributes:
        request_id: Our engine's name for the request.
        remote: Where the blocks are.
        block_ids: Where they go: all blocks of the request.
        start_token: First token to read.
        end_token: One past the last one; where both are the same, the other engine is only told
            that we need nothing.
        address: Where our engine's handshake server listens, for engines that write.
        tokens_digest: What tells the request's tokens up to the last one to read from others, where
            it is the other engine that has to compare them; empty where that is not known.
    """

    request_id: str
    remote: RemoteRequest
    block_ids: BlockIds
    start_token: int
    end_token: int
    address: EngineAddress | None = None
    tokens_digest: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be read."""
        return self.start_token == self.end_token

    def emptied(self) -> "Load":
        """Return what tells the other engine that nothing is needed."""
        return Load(self.request_id, self.remote, self.block_ids, 0, 0)


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks to keep for readers.

    Attributes:
        request_id: Our engine's name for the request.
        transfer_id: What readers call it; no two holds have the same.
        lease: How readers see that the blocks are kept.
        block_ids: The blocks, for readers that want them written.
        num_tokens: Tokens that they hold.
        ids: Those of the tokens, see :func:`~kvbridge.session.ids_of_tokens`; empty where
            readers know from the offer which ones they are, or nobody does.
    """

    request_id: str
    transfer_id: str
    lease: Lease
    block_ids: BlockIds = ()
    num_tokens: int = 0
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is there of a request that has not finished.

    Attributes:
        transfer_id: What readers call it.
        block_ids: Its blocks; none if it has lost them.
        num_tokens: Tokens that they hold.
    """

    transfer_id: str
    block_ids: BlockIds = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """What the workers of an engine must know of one step.

    Attributes:
        loads: What to read.
        engine: What the ranks of this engine have published, once that is new.
        holds: What to keep.
        over: Transfer ids of what is to be kept no longer, whoever has not reported.
        progress: What of requests was computed in steps before this one, and what was lost.
        never: Transfer ids that others may have asked for, of which nothing will ever be kept.
        aborted: Our engine's names of requests whose loads nobody wants any more.
    """

    loads: tuple[Load, ...] = ()
    engine: Mapping[Rank, HandshakeMetadata] | None = None
    holds: tuple[Hold, ...] = ()
    over: tuple[str, ...] = ()
    progress: tuple[Progress, ...] = ()
    never: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
