"""Runs of all cases in turn, so that what is compared shares the same minutes."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.bench.cases import Case, Measurement
from kvbridge.bench.pair import BenchError, Pair
from kvbridge.transport import Descriptors, TransportChoice, parse_config


def measure(
    choice: Mapping[str, Any] | TransportChoice,
    cases: Sequence[Case],
    *,
    runs: int = 7,
    on_step: Callable[[Case], None] = lambda _: None,
) -> list[Measurement]:
    """Measure cases on one transport, between this process and one that is started for it.

    Every case is run once beforehand, and what it moved is compared byte for byte; then all take
    their turn in each run, and numpy copies as many bytes within this process beside each.

    Args:
        choice: The transport, as in every configuration.
        cases: What to measure. Those that the transport does not offer are left out.
        runs: How often.
        on_step: Called after every transfer that counts.

    Raises:
        BenchError: Something did not arrive, or not as it was.
        KVBridgeError: The transport cannot be opened, or the two processes cannot meet.
    """
    chosen = parse_config(TransportChoice, choice, where="transport choice")
    with Pair(chosen, max(case.arena_nbytes for case in cases)) as pair:
        can = pair.peer.capabilities
        offered = [case for case in cases if (can.read if case.op == "read" else can.write)]
        pieces = {case: _pieces(pair, case) for case in offered}
        for case in offered:
            _check(pair, case, *pieces[case])
        seconds: dict[Case, list[float]] = {case: [] for case in offered}
        references: dict[Case, list[float]] = {case: [] for case in offered}
        spare = np.ones(max(case.nbytes for case in cases), np.uint8)
        for _ in range(runs):
            for case in offered:
                references[case].append(_memcpy(pair.arena.data, spare, case.nbytes))
                seconds[case].append(pair.transfer(case.op, *pieces[case]))
                on_step(case)
        return [
            Measurement(
                chosen.transport,
                case,
                pair.peer.path,
                tuple(seconds[case]),
                tuple(references[case]),
            )
            for case in offered
        ]


def _pieces(pair: Pair, case: Case) -> tuple[Descriptors, Descriptors]:
    return case.pieces(pair.arena.address, 1), case.pieces(pair.remote_address, 2)


def _check(pair: Pair, case: Case, local: Descriptors, remote: Descriptors) -> None:
    """Throughput of the wrong bytes is worth nothing."""
    pair.fill(1, 2)
    pair.transfer(case.op, local, remote)
    if not pair.same(local, remote):
        raise BenchError(
            f"a {case.op} of {case.blocks} blocks of {case.block_nbytes} bytes, {case.layout}, "
            "moved other bytes than those that were there"
        )


def _memcpy(source: NDArray[np.uint8], target: NDArray[np.uint8], nbytes: int) -> float:
    start = time.perf_counter()
    np.copyto(target[:nbytes], source[:nbytes])
    return time.perf_counter() - start
