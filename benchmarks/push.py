"""Loads between two engines by native reads, by served reads and by push, in the same runs.

Two processes, an engine of one rank in each for every way, and whole loads through the connectors:
from the step in which a load begins to the one that reports it. Blocks lie scattered on both sides.
The ways take turns, each first in some runs; a ratio above 1 means that push is faster.

Native reads are measured twice: as they are here, and with UCX's own segments of 8 KiB, which is
what whoever sets nothing gets. KVBridge sets 64 KiB, which helps reads over TCP and not writes.

With ``--apart`` the two engines keep their cells in other orders, so that only single cells are the
same: push packs them, reads are staged, and both are measured without that, too.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvbridge.bench import Quartiles, quartiles
from kvbridge.connector import Request, scheduler_connector, worker_connector
from kvbridge.handshake import hand_over
from kvbridge.model import (
    CacheGroup,
    RankCache,
    TransferTopology,
    attention_layer,
    memory_region,
)

WAIT_S, STEP_S = 60.0, 1e-3
TOKENS, HEADS = 16, 4
AXES, OTHER_AXES = "BKNHC", "BKHNC"
BLOCKS = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
SEGMENTS = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
NATIVE, SERVED = {"read_mode": "native"}, {"read_mode": "served"}
ALIKE: dict[str, dict[str, Any]] = {
    "reads of UCX": {"direction": "pull", "options": NATIVE},
    "native reads": {"direction": "pull", "options": NATIVE},
    "served reads": {"direction": "pull", "options": SERVED},
    "push": {"direction": "push", "options": NATIVE},
}
APART: dict[str, dict[str, Any]] = {
    "reads of cells": {"direction": "pull", "options": NATIVE, "staging_nbytes": 0},
    "staged reads": {"direction": "pull", "options": SERVED},
    "push of cells": {"direction": "push", "options": NATIVE, "staging_nbytes": 0},
    "push": {"direction": "push", "options": NATIVE},
}
WAYS = {**ALIKE, **APART}


class Case(NamedTuple):
    """What is measured.

    Attributes:
        transport: What moves the bytes.
        block_nbytes: Size of a block.
        blocks: How many there are.
        axes: How the giving engine keeps its cells; the other one does so in ``AXES``.
    """

    transport: str
    block_nbytes: int
    blocks: int
    axes: str


class Engine:
    """One rank, with a cache of blocks of some size."""

    def __init__(self, engine_id: str, config: dict[str, Any], case: Case, axes: str) -> None:
        """Register the cache, and serve its metadata."""
        content = case.block_nbytes // (2 * TOKENS * HEADS * 4)
        size = dict(zip(AXES, (case.blocks, 2, TOKENS, HEADS, content), strict=True))
        array = np.zeros([size[axis] for axis in axes], np.float32)
        self.memory: NDArray[np.float32] = array.transpose([axes.index(axis) for axis in AXES])
        layer = attention_layer(
            self.memory, axes=AXES, layer=0, name="layer", unit_start=0, unit_total=HEADS
        )
        cache = RankCache(
            engine_id,
            0,
            0,
            (layer,),
            (CacheGroup("attention", TOKENS),),
            (memory_region(array),),
        )
        topology = TransferTopology(
            tp_rank=0,
            tp_size=1,
            block_size=TOKENS,
            engine_id=engine_id,
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=HEADS,
        )
        self.scheduler = scheduler_connector(config, engine_id=engine_id)
        self.worker = worker_connector(config, topology, model="m")
        self.worker.register_kv_caches(cache)
        metadata = self.worker.get_handshake_metadata()
        if metadata is not None:
            hand_over(self.scheduler, {metadata.rank: metadata})

    def step(self) -> dict[str, Any]:
        """Do what a step does around the forward pass; return what has been loaded."""
        self.worker.start_load_kv(self.scheduler.build_connector_meta())
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        return dict(report.loaded)

    def offer(self, request_id: str, blocks: list[int]) -> dict[str, Any]:
        """Finish a prefill."""
        tokens = len(blocks) * TOKENS
        request = Request(request_id, tokens, tokens, {"do_remote_decode": True})
        _, params = self.scheduler.request_finished(request, (tuple(blocks),))
        return params or {}

    def load(self, request_id: str, blocks: list[int], params: dict[str, Any]) -> float:
        """Load a request; return the seconds that it took."""
        request = Request(request_id, len(blocks) * TOKENS, params=params)
        tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, (tuple(blocks),), tokens or 0)
        start = time.perf_counter()
        while time.perf_counter() < start + WAIT_S:
            loaded = self.step()
            if request_id in loaded:
                if not loaded[request_id].ok:
                    raise SystemExit(f"a load failed: {loaded[request_id].error}")
                seconds = time.perf_counter() - start
                self.scheduler.request_finished(request, (tuple(blocks),))
                return seconds
            self.worker.wait(STEP_S)
        raise SystemExit(f"no load ended within {WAIT_S:g} s")

    def close(self) -> None:
        """Give everything back."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def config_of(transport: str, way: str) -> dict[str, Any]:
    """Return the configuration of an engine; a network of TCP alone is the transport's to make."""
    options = dict(WAYS[way]["options"])
    if transport == "ucx":
        options["tls"] = "tcp"
    return {**WAYS[way], "transport": transport, "options": options}


def set_up(ways: Sequence[str]) -> None:
    """Leave nothing but TCP, and to the reads of UCX its own settings."""
    os.environ["UCX_TLS"] = "tcp"
    if "reads of UCX" in ways:
        os.environ.update(dict.fromkeys(SEGMENTS, "8k"))


def give(pipe: Connection, ways: Sequence[str], case: Case) -> None:
    """Be the engines that have the blocks, whatever way they are loaded."""
    set_up(ways)
    engines = {
        # What pulls elsewhere is given to here by an engine that would push, too.
        way: Engine(
            f"p {way}", {**config_of(case.transport, way), "direction": "auto"}, case, case.axes
        )
        for way in ways
    }
    for engine in engines.values():
        engine.memory[:] = np.arange(case.blocks, dtype=np.float32)[:, None, None, None, None]
    pipe.send("ready")
    way = ways[0]
    while True:
        while not pipe.poll(0 if engines[way].worker.busy else None):
            engines[way].step()  # the others have nothing to do
            engines[way].worker.wait(STEP_S)
        asked = pipe.recv()
        if asked is None:
            break
        way, request_id, blocks = asked
        pipe.send(engines[way].offer(request_id, blocks))
        engines[way].step()
    for engine in engines.values():
        engine.close()


def take(pipe: Connection, ways: Sequence[str], case: Case) -> None:
    """Be the engines that load, one load for each way that is asked for; say how long it took."""
    set_up(ways)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=give, args=(there, ways, case))
    process.start()
    here.recv()
    engines = {way: Engine(f"d {way}", config_of(case.transport, way), case, AXES) for way in ways}
    pipe.send("ready")
    rng = np.random.default_rng(1)
    while (asked := pipe.recv()) is not None:
        way, request_id = asked
        theirs, ours = (rng.permutation(case.blocks).tolist() for _ in range(2))
        here.send((way, request_id, theirs))
        took_s = engines[way].load(request_id, ours, here.recv())
        memory = engines[way].memory
        if not (memory[ours] == np.array(theirs, np.float32)[:, None, None, None, None]).all():
            raise SystemExit(f"{way}: wrong bytes")
        memory[:] = -1
        pipe.send(took_s)
    here.send(None)
    for engine in engines.values():
        engine.close()
    process.join(10)


def measure(case: Case, ways: Sequence[str], runs: int) -> dict[str, list[float]]:
    """Return how long the loads of each way took."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    alone = [way for way in ways if way == "reads of UCX"]  # settings hold for a whole process
    for together in filter(None, (alone, [way for way in ways if way not in alone])):
        here, there = context.Pipe()
        process = context.Process(target=take, args=(there, together, case))
        process.start()
        processes.append((process, here))
        here.recv()
        pipes |= dict.fromkeys(together, here)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(-1, runs):  # the first one meets, and does not count
        first = run % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            pipes[way].send((way, f"{run}"))
            took_s = pipes[way].recv()
            if run >= 0:
                seconds[way].append(took_s)
    for process, here in processes:
        here.send(None)
        process.join(20)
    return seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="*", default=["nixl", "ucx"])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--mib", type=int, default=32, help="of each load")
    parser.add_argument("--apart", action="store_true", help="engines with other layouts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ways = list(APART if options.apart else ALIKE)
    others = [way for way in ways if way != "push"]
    found: list[dict[str, Any]] = []
    for transport in options.transports:
        for block_nbytes in BLOCKS:
            nbytes = options.mib << 20
            axes = OTHER_AXES if options.apart else AXES
            case = Case(transport, block_nbytes, nbytes // block_nbytes, axes)
            seconds = measure(case, ways, options.runs)
            ratios: dict[str, Quartiles] = {
                way: quartiles([a / b for a, b in zip(seconds[way], seconds["push"], strict=True)])
                for way in others
            }
            gbps = {way: nbytes / quartiles(seconds[way]).median / 1e9 for way in ways}
            found.append(
                {
                    "transport": transport,
                    "block_nbytes": block_nbytes,
                    "gb_per_s": gbps,
                    "push_against": {way: list(each) for way, each in ratios.items()},
                }
            )
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = Table(
        "transport",
        "block",
        *(f"{way}, GB/s" for way in ways),
        *(f"push / {way}" for way in others),
    )
    for each in found:
        table.add_row(
            each["transport"],
            f"{each['block_nbytes'] >> 10} KiB",
            *(f"{each['gb_per_s'][way]:.2f}" for way in ways),
            *(
                f"{q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})"
                for q in (each["push_against"][way] for way in others)
            ),
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
