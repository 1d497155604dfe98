"""Whose digests can be taken, and how they are sent."""

from collections.abc import Sequence

import numpy as np

from kvbridge.errors import PlanError
from kvbridge.handshake.digests import DIGEST_NBYTES
from kvbridge.model import RankCache
from kvbridge.plan.values import UInt64Array

Values = tuple[UInt64Array, ...]
"""Digests, by probe."""
TAKING = "taking digests"
"""What failed, in messages."""


def can_digest(cache: RankCache) -> bool:
    """Whether a cache lies in memory that the host can read."""
    return all(region.memory_kind == "dram" for region in cache.regions)


def packed(values: Values) -> bytes:
    """Return digests as they are sent."""
    return b"".join(np.asarray(each, "<u8").tobytes() for each in values)


def unpacked(values: bytes, counts: Sequence[int]) -> Values:
    """Return digests as they were sent, by probe.

    Raises:
        PlanError: There are others than so many.
    """
    if len(values) != DIGEST_NBYTES * sum(counts):
        raise PlanError(f"{sum(counts)} digests were asked for, {len(values)} bytes came")
    flat = np.frombuffer(values, "<u8").astype(np.uint64)
    return tuple(np.split(flat, np.cumsum(counts)[:-1])) if counts else ()
