"""What engines and connectors hand each other: plain values, the same for every engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvbridge.plan import BlockTable
from kvbridge.session import Cause, SourceStats

OnFailure = Literal["recompute", "fail"]
"""What is to become of a request that could not be loaded."""

BlockIds = tuple[tuple[int, ...], ...]
"""For each cache group the blocks of a request, in the order of their tokens."""

NO_BLOCK = (1 << 32) - 1
"""Keeps the place of a block that a request does not have, such as one before its window."""


def block_tables(block_ids: BlockIds) -> list[BlockTable]:
    """Return the blocks of a request as they are planned with."""
    # A table that may have gaps takes longer to plan with, and few have any.
    return [BlockTable(ids, null_block_id=NO_BLOCK if NO_BLOCK in ids else None)
            for ids in block_ids]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a connector sees it.

    Attributes:
        request_id: The engine's name for it.
        prompt_tokens: Tokens of the prompt.
        computed_tokens: Tokens whose cache is there, once the request has finished.
        params: What travels with the request from engine to engine, as plain data.
        aborted: Whether it finished because nobody wants it any more.
        tokens: Ids of its tokens, prompt and answer, from the first one on. What another engine has
            computed of other tokens is not loaded then; None where they are not known. Where a
            cache depends on more, such as an adapter or an image, take other numbers for the
            tokens concerned, the same on both engines.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int = 0
    params: Mapping[str, Any] | None = None
    aborted: bool = False
    tokens: Sequence[int] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How the load of a request ended on one rank.

    Attributes:
        error: Why it failed; empty if it did not.
        via: Name of the connector that moved the bytes.
        sources: What each remote rank contributed.
        seconds: From the first read to the last.
        cause: Why it failed, in a word; of several connectors, that of the last one that was tried.
        recompute: Whether the engine is to compute what has not come; if it failed and this is
            false, the request is to fail. False too if it was aborted: nobody waits for it.
    """

    error: str = ""
    via: str = ""
    sources: tuple[SourceStats, ...] = ()
    seconds: float = 0.0
    cause: Cause = ""
    recompute: bool = False

    @property
    def ok(self) -> bool:
        """Whether the blocks hold what was asked for."""
        return not self.error

    def under(self, on_failure: OnFailure) -> "Loaded":
        """Return the same with what is to become of the request."""
        unwanted = self.ok or self.cause == "aborted"
        return replace(self, recompute=on_failure == "recompute" and not unwanted)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What ended on one rank since its last report; each entry is reported once.

    Attributes:
        loaded: Requests whose load has ended, well or not; nothing touches their blocks any more.
        sent: Requests whose blocks no reader needs any more.
        expired: Those of them whose readers did not all report in time.
    """

    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    expired: frozenset[str] = frozenset()
