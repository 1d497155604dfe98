"""Which tokens of a sequence a rank holds, where ranks share them out."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import UnsupportedLayoutError

PERIOD_MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Round-robin pieces of a sequence, packed in order: decode-context parallelism.

    The rank holds the tokens ``t`` with ``(t // interleave) % size == rank``.

    Attributes:
        rank: Which of the shares.
        size: Number of shares; 1 means all tokens.
        interleave: Tokens that stay together.
    """

    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    interleave: Annotated[int, msgspec.Meta(ge=1)] = 1

    def __str__(self) -> str:
        """Say which share it is, behind what it is a share of."""
        if self.is_whole:
            return ""
        return f" of token share {self.rank} of {self.size} (interleave {self.interleave})"

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds every token."""
        return self.size == 1

    def before(self, token: int) -> int:
        """Return how many tokens before ``token`` the rank holds: its position when packed."""
        if self.is_whole:
            return token
        rounds, rest = divmod(token, self.size * self.interleave)
        own = min(max(rest - self.rank * self.interleave, 0), self.interleave)
        return rounds * self.interleave + own

    def tokens(self, packed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens at packed positions."""
        if self.is_whole:
            return packed
        rounds, rest = np.divmod(packed, self.interleave)
        return (rounds * self.size + self.rank) * self.interleave + rest

    def holds(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tokens the rank holds."""
        held: NDArray[np.bool_] = tokens // self.interleave % self.size == self.rank
        return held


ALL_TOKENS = TokenShare()


def period_of(*shares: TokenShare) -> NDArray[np.int64]:
    """Return the tokens after which several shares repeat together.

    Raises:
        UnsupportedLayoutError: They repeat too late to be compared token by token.
    """
    period = math.lcm(*(share.size * share.interleave for share in shares if not share.is_whole))
    if period > PERIOD_MAX_TOKENS:
        splits = sorted({(share.size, share.interleave) for share in shares})
        words = " and ".join(f"{size} ranks (interleave {each})" for size, each in splits)
        raise UnsupportedLayoutError(
            f"token shares of {words} repeat only after {period} tokens, more than "
            f"{PERIOD_MAX_TOKENS}; choose interleaves of which one divides the other"
        )
    return np.arange(period, dtype=np.int64)


@lru_cache(maxsize=4096)
def shares_meet(one: TokenShare, other: TokenShare) -> bool:
    """Whether two ranks hold some token in common.

    Raises:
        UnsupportedLayoutError: The shares repeat too late to be compared.
    """
    tokens = period_of(one, other)
    return bool((one.holds(tokens) & other.holds(tokens)).any())
