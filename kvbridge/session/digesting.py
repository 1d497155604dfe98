"""Taking digests beside the engine's steps, and how they are sent."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kvbridge.errors import KVBridgeError, PlanError
from kvbridge.handshake.digests import DIGEST_NBYTES
from kvbridge.model import RankCache
from kvbridge.plan.values import UInt64Array

_log = logging.getLogger(__name__)

T = TypeVar("T")
Values = tuple[UInt64Array, ...]
"""Digests, by probe."""


def can_digest(cache: RankCache) -> bool:
    """Whether a cache lies in memory that the host can read."""
    return all(region.memory_kind == "dram" for region in cache.regions)


class Digester:
    """Works in one thread, which is made when it is first needed; asked from one thread."""

    def __init__(self, threads: Executor | None = None) -> None:
        """Take where to work; a thread of its own if not given. Shut down at the end."""
        self._threads = threads
        self._running: list[Future[object]] = []

    def start(self, work: Callable[[], T]) -> "Future[T]":
        """Do some work; what it raises is an error of ours."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvbridge-digest")
        running = self._threads.submit(_guarded, work)
        self._running = [each for each in self._running if not each.done()]
        self._running.append(running)  # type: ignore[arg-type]
        return running

    @property
    def is_busy(self) -> bool:
        """Whether some of it goes on, so that memory is being read."""
        return any(not each.done() for each in self._running)

    def close(self) -> None:
        """Begin nothing more, and wait for what goes on. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


def _guarded(work: Callable[[], T]) -> T:
    """Do some work for somebody else; a fault of this code ends no engine's step."""
    try:
        return work()
    except KVBridgeError:
        raise
    except Exception as error:
        _log.exception("taking digests failed")
        raise PlanError(f"taking digests failed: {type(error).__name__}: {error}") from error


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
