"""What planning and lowering cost, each as a ratio or a growth law within one run.

Engines exist on paper only: their tensors have addresses, but no memory. Figures are medians and
quartiles of runs in which everything that is compared takes its turn.

1. Planning does not grow with the number of pages: 10,000 against 1,000,000.
2. Planning for one consumer rank grows with layers times overlapping ranks: a line is fitted.
3. A further engine of a known shape costs little time and memory.
4. Lowering costs little more than the bare numpy that makes the same arrays, and merges. Ten
   requests follow one another, as in an engine at work, and one comes by itself, to cold caches.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvbridge.model import (
    CacheGroup,
    Rank,
    RankCache,
    Region,
    TransferTopology,
    attention_layer,
)
from kvbridge.plan import BlockTable, EngineTransferPlan, generate, generate_engine_transfer_plan

HEADS = 64
BLOCK_TOKENS = 16
CELL_BYTES = 512
ARENA = 1 << 44
"""Address space of one rank."""

Engine = dict[Rank, RankCache]


class PaperTensor:
    """A tensor that has an address and a shape, and no memory."""

    def __init__(self, address: int, *shape: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "|u1",
            "version": 3,
        }


def paper_engine(
    engine_id: str, tp: int, pp: int = 1, *, layers: int = 80, pages: int = 10_000, base: int = 1
) -> Engine:
    """Return an engine whose ranks have the heads and layers shared out evenly."""
    heads = HEADS // tp
    page = heads * BLOCK_TOKENS * CELL_BYTES
    start = base << 20
    region = Region(start, layers * pages * page)
    groups = (CacheGroup("attention", BLOCK_TOKENS),)
    return {
        (stage, rank): RankCache(
            engine_id,
            stage,
            rank,
            tuple(
                attention_layer(
                    PaperTensor(start + i * pages * page, pages, heads, BLOCK_TOKENS, CELL_BYTES),
                    axes="BHNC",
                    layer=i,
                    name=f"layers.{i}",
                    unit_start=rank * heads,
                    unit_total=HEADS,
                )
                for i in range(stage * layers // pp, (stage + 1) * layers // pp)
            ),
            groups,
            (region,),
        )
        for stage in range(pp)
        for rank in range(tp)
    }


def plan_for(ours: Engine, theirs: Engine) -> EngineTransferPlan:
    """Plan what rank 0 of a consumer reads."""
    topology = TransferTopology(
        tp_rank=0,
        tp_size=len(ours),
        block_size=BLOCK_TOKENS,
        engine_id="decode",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
    )
    return generate_engine_transfer_plan(topology, ours[0, 0], theirs, local_engine=ours)


def plan_anew(ours: Engine, theirs: Engine) -> EngineTransferPlan:
    """Plan as if no engine of this shape had been met."""
    generate._known_plans.clear()  # noqa: SLF001
    return plan_for(ours, theirs)


# --- how it is measured --------------------------------------------------------------------------


def in_turn(runs: int, *actions: Callable[[], object], calls: int = 1) -> list[list[float]]:
    """Return the seconds that a call of each action took in each run.

    Seconds of the processor, not of the clock: nothing here waits, and others use it too. Every
    other run goes backwards, so that none always comes first, to caches that the others left cold;
    one run more than asked for is made before, and does not count.
    """
    samples: list[list[float]] = []
    for i in range(runs + 1):
        gc.collect()
        seconds = [0.0] * len(actions)
        for place in range(len(actions))[:: -1 if i % 2 else 1]:
            action = actions[place]
            start = time.process_time()
            for _ in range(calls):
                action()
            seconds[place] = (time.process_time() - start) / calls
        samples.append(seconds)
    return list(map(list, zip(*samples[1:], strict=True)))


def ratio(ones: list[float], others: list[float]) -> list[float]:
    """Return the quartiles of the ratios within each run."""
    return quartiles([one / other for one, other in zip(ones, others, strict=True)])


def quartiles(values: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return statistics.quantiles(values, n=4)


def ms(seconds: list[float]) -> list[float]:
    return quartiles([s * 1e3 for s in seconds])


def traced(action: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that an action leaves behind, and the most that it used."""
    gc.collect()
    tracemalloc.start()
    kept = action()
    gc.collect()
    sizes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return sizes


# --- the figures ---------------------------------------------------------------------------------


def growth_with_pages(runs: int) -> dict[str, Any]:
    few, many = (
        (paper_engine("decode", 8, pages=pages), paper_engine("prefill", 16, 4, pages=pages))
        for pages in (10_000, 1_000_000)
    )
    seconds = in_turn(runs, partial(plan_anew, *few), partial(plan_anew, *many))
    (kept, most), (kept_of_many, most_of_many) = (
        traced(partial(plan_anew, *engines)) for engines in (few, many)
    )
    return {
        "planning, 1,000,000 / 10,000 pages": ratio(seconds[1], seconds[0]),
        "memory kept, the same": kept_of_many / kept,
        "memory used, the same": most_of_many / most,
        "memory kept, KiB": kept_of_many / 1024,
    }


def growth_with_layers_and_ranks(runs: int) -> dict[str, Any]:
    """Fit planning time to layers times the producer ranks that hold a share of ours of each."""
    sizes = list(itertools.product((20, 40, 80, 160), (8, 16, 32)))
    engines = [
        (paper_engine("decode", 8, layers=layers), paper_engine("prefill", tp, 4, layers=layers))
        for layers, tp in sizes
    ]
    seconds = in_turn(runs, *(partial(plan_anew, *pair) for pair in engines))
    pairs = np.array([layers * tp // 8 for layers, tp in sizes], float)
    medians = np.array([statistics.median(s) * 1e3 for s in seconds])
    slope, offset = np.polyfit(pairs, medians, 1)
    rest = medians - (slope * pairs + offset)
    return {
        "planning 80 layers, tp16 x pp4 to tp8, ms": ms(seconds[sizes.index((80, 16))]),
        "fit: ms for 100 (layer, rank) pairs": float(slope * 100),
        "fit: ms for none": float(offset),
        "fit: r²": float(1 - rest.var() / medians.var()),
    }


def cost_of_a_further_engine(runs: int, count: int) -> dict[str, Any]:
    ours = paper_engine("decode", 8)
    remotes = [paper_engine(f"prefill-{i}", 16, 4, base=1 + i) for i in range(2)]
    plan = plan_anew(ours, remotes[0])
    seconds = in_turn(
        runs,
        partial(plan_anew, ours, remotes[0]),
        partial(plan_for, ours, remotes[1]),
        partial(plan.bind, ours[0, 0], remotes[1]),
    )

    def meet(request: bool) -> list[EngineTransferPlan]:
        plans = []
        for i in range(count):
            remote = paper_engine(f"prefill-{i}", 16, 4, base=2 + i)
            plans.append(plan_for(ours, remote))
            if request:
                table = [BlockTable(range(4))]
                plans[-1].lower(table, table, end_token=4 * BLOCK_TOKENS)
        return plans

    return {
        "second engine / first": ratio(seconds[1], seconds[0]),
        "bind / first": ratio(seconds[2], seconds[0]),
        f"memory for each of {count} further engines, KiB": traced(partial(meet, False))[0]
        / count
        / 1024,
        "the same, after their first requests, KiB": traced(partial(meet, True))[0] / count / 1024,
    }


def cost_of_lowering(runs: int, blocks: int = 512) -> dict[str, Any]:
    ours, theirs = (paper_engine(name, 8) for name in ("decode", "prefill"))
    plan = plan_for(ours, theirs)
    bases = [
        np.array([layer.base_address for layer in engine[0, 0].layers], np.uint64)
        for engine in (ours, theirs)
    ]
    page = np.uint64(ours[0, 0].layers[0].page_stride)
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {}
    for run, name in ((1, "scattered blocks"), (8, "blocks in runs of 8")):
        here, there = (scattered(blocks, run, rng) for _ in range(2))

        def lower(here: NDArray[Any] = here, there: NDArray[Any] = there) -> Any:
            return plan.lower(
                [BlockTable(here)], [BlockTable(there)], end_token=blocks * BLOCK_TOKENS
            )

        def bare(here: NDArray[Any] = here, there: NDArray[Any] = there) -> list[NDArray[Any]]:
            arrays = [
                (base[:, None] + ids.astype(np.uint64) * page).ravel()
                for base, ids in zip(bases, (here, there), strict=True)
            ]
            return [*arrays, np.full(arrays[0].size, page)]

        seconds = in_turn(runs, lower, bare, calls=10)
        once = in_turn(runs, lower, bare)
        (batch,) = lower()
        if run == 1 and not np.array_equal(np.sort(batch.local_address), np.sort(bare()[0])):
            raise SystemExit("lowering and bare numpy make different arrays")
        result |= {
            f"{name}: lowering / bare numpy": ratio(*seconds),
            f"{name}: the same, one call after a pause": ratio(*once),
            f"{name}: lowering, ms": ms(seconds[0]),
            f"{name}: copies / blocks": batch.nbytes.size / (80 * blocks),
        }
    return result


def scattered(count: int, run: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return blocks of a large cache: runs of neighbours, no two of which are neighbours."""
    starts = rng.choice(4_000 // (run + 1), count // run, replace=False) * (run + 1)
    return (starts[:, None] + np.arange(run)).ravel()


def show(figures: dict[str, Any]) -> None:
    for title, rows in figures.items():
        table = Table("", "median or value", "quartiles", title=title, title_justify="left")
        for name, value in rows.items():
            low, middle, high = value if isinstance(value, list) else (None, value, None)
            spread = "" if low is None else f"{low:.4g} to {high:.4g}"
            table.add_row(name, f"{middle:.4g}", spread)
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--engines", type=int, default=30, help="further engines of one shape")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {
        "More pages": growth_with_pages(arguments.runs),
        "More layers and ranks": growth_with_layers_and_ranks(max(3, arguments.runs // 3)),
        "More engines": cost_of_a_further_engine(arguments.runs, arguments.engines),
        "Lowering 80 layers x 512 blocks": cost_of_lowering(4 * arguments.runs),
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures)


if __name__ == "__main__":
    main()
