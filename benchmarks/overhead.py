"""What the core costs: planning, lowering and submitting, as shares of the transfer they lead to.

One consumer rank pulls one request of one producer rank in another process: real bytes, 80 layers
of 512 blocks, 8 KiB for each (16 tokens of one head of 128, K and V, 2 bytes). Planning is that of
a consumer rank that faces a producer of 8 x 4 ranks. Everything is timed in each run, in turn, and
every figure is a ratio within its run; what is printed is the median and the quartiles of those.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvbridge.model import (
    CacheGroup,
    Rank,
    RankCache,
    TransferTopology,
    attention_layer,
    memory_region,
)
from kvbridge.plan import (
    BlockTable,
    EngineTransferPlan,
    generate,
    generate_engine_transfer_plan,
)
from kvbridge.transport import Descriptors, Peer, State, Transport, open_transport

HEADS = 8
BLOCK_TOKENS = 16
HEAD_SIZE = 128
PATIENCE_S = 60.0
RATIOS = (
    ("planning", "transfer"),
    ("planning for another engine of this shape", "transfer"),
    ("lowering", "transfer"),
    ("submitting", "transfer"),
    ("lowering", "bare numpy"),
)

Cache = NDArray[np.float16]
"""Axes: layer, block, K/V, token, head of this rank, content."""


def make_cache(layers: int, blocks: int) -> Cache:
    return np.zeros((layers, blocks, 2, BLOCK_TOKENS, 1, HEAD_SIZE), np.float16)


def announce(cache: Cache, engine_id: str, rank: Rank, first_layer: int = 0) -> RankCache:
    return RankCache(
        engine_id,
        *rank,
        layers=tuple(
            attention_layer(
                tensor,
                axes="BKNHC",
                layer=layer,
                name=f"layers.{layer}",
                unit_start=rank[1],
                unit_total=HEADS,
            )
            for layer, tensor in enumerate(cache, first_layer)
        ),
        groups=(CacheGroup("attention", BLOCK_TOKENS),),
        regions=(memory_region(cache),),
    )


def announce_engine(cache: Cache, engine_id: str, stages: int) -> dict[Rank, RankCache]:
    """Return an engine whose ranks all lie in the same memory; only one of them is moved."""
    return {
        (pp, tp): announce(part, engine_id, (pp, tp), pp * len(part))
        for pp, part in enumerate(np.split(cache, stages))
        for tp in range(HEADS)
    }


def serve(connection: Connection, transport_name: str, layers: int, blocks: int) -> None:
    """Be the producer: hold the bytes, and let the consumer read them."""
    cache = make_cache(layers, blocks)
    cache.view(np.uint16)[:] = np.random.default_rng(0).integers(
        1 << 16, size=cache.shape, dtype=np.uint16
    )
    transport = open_transport({"transport": transport_name})
    transport.register([memory_region(cache)])
    caches = {stages: announce_engine(cache, "prefill", stages) for stages in (1, 4)}
    connection.send((transport.agent_info(), [memory_region(cache)], caches, checksums(cache)))
    while not connection.poll(0.01):
        transport.poll()
    connection.recv()
    transport.close()


@contextmanager
def producer(transport_name: str, layers: int, blocks: int) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, transport_name, layers, blocks), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours.recv()
        ours.send("end")
    finally:
        process.join(PATIENCE_S)


# --- one run -------------------------------------------------------------------------------------


def block_ids(count: int, run: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return all blocks, runs of neighbours in any order."""
    starts = rng.permutation(np.arange(0, count, run))
    return (starts[:, None] + np.arange(run)).ravel()[:count]


@contextmanager
def timing(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def plan_for(ours: dict[Rank, RankCache], remotes: dict[Rank, RankCache]) -> EngineTransferPlan:
    topology = TransferTopology(
        tp_rank=0,
        tp_size=HEADS,
        block_size=BLOCK_TOKENS,
        engine_id="decode",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
    )
    return generate_engine_transfer_plan(topology, ours[0, 0], remotes, local_engine=ours)


def outer_sum(
    bases: list[NDArray[np.uint64]], tables: list[BlockTable], page: int
) -> list[NDArray[np.uint64]]:
    """Make the arrays of a batch as bare numpy would, without a look at anything."""
    arrays = [
        (base[:, None] + np.asarray(table.block_ids, np.uint64) * np.uint64(page)).ravel()
        for base, table in zip(bases, tables, strict=True)
    ]
    return [*arrays, np.full(arrays[0].size, page, np.uint64)]


def wait(transport: Transport) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for finished in transport.poll().finished:
            if finished.state is not State.DONE:
                raise SystemExit(f"the transfer failed: {finished.reason}")
            return
        time.sleep(0)
    raise SystemExit(f"the transfer is pending after {PATIENCE_S} s")


def measure(
    transport: Transport,
    peer: Peer,
    cache: Cache,
    caches: dict[int, dict[Rank, RankCache]],
    run: int,
    runs: int,
) -> dict[str, Any]:
    """Time everything, in turn, in each of several runs."""
    rng = np.random.default_rng(run)
    ours = announce_engine(cache, "decode", 1)
    plan = plan_for(ours, caches[1])
    tables = [BlockTable(block_ids(cache.shape[1], run, rng)) for _ in range(2)]
    end = cache.shape[1] * BLOCK_TOKENS
    bases = [
        np.array([layer.base_address for layer in engine[0, 0].layers], np.uint64)
        for engine in (ours, caches[1])
    ]
    page = ours[0, 0].layers[0].page_stride
    samples = []
    for _ in range(runs + 2):
        seconds: dict[str, float] = {}
        generate._known_plans.clear()  # noqa: SLF001
        for name in ("planning", "planning for another engine of this shape"):
            with timing(seconds, name):
                plan_for(ours, caches[4])
        with timing(seconds, "lowering"):
            (batch,) = plan.lower(tables[:1], tables[1:], end_token=end)
        with timing(seconds, "bare numpy"):
            outer_sum(bases, tables, page)
        with timing(seconds, "transfer"):
            with timing(seconds, "submitting"):
                local = Descriptors(batch.local_address, batch.nbytes)
                remote = Descriptors(batch.remote_address, batch.nbytes)
                transport.submit("read", peer, local, remote)
            wait(transport)
        samples.append(seconds)
    samples = samples[2:]  # what is touched for the first time is slower
    return {
        "blocks": "scattered" if run == 1 else f"in runs of {run}",
        "tables": tables,
        "nbytes": batch.total_nbytes,
        "copies": batch.piece_count,
        "merged": int(batch.nbytes.size),
        "transfer, ms": quartiles([s["transfer"] * 1e3 for s in samples]),
        **{
            f"{part} / {whole}": quartiles([s[part] / s[whole] for s in samples])
            for part, whole in RATIOS
        },
    }


def quartiles(values: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return statistics.quantiles(values, n=4)


def check(cache: Cache, result: dict[str, Any], sums: NDArray[np.uint64]) -> None:
    """Refuse to print figures of a transfer that moved other bytes than it should."""
    ours, theirs = (table.block_ids for table in result.pop("tables"))
    if not (checksums(cache)[:, ours] == sums[:, theirs]).all():
        raise SystemExit("the wrong bytes were moved")


def checksums(cache: Cache) -> NDArray[np.uint64]:
    """Return the sum of each block of each layer."""
    total: NDArray[np.uint64] = cache.view(np.uint16).sum(axis=(2, 3, 4, 5), dtype=np.uint64)
    return total


# --- the figures ---------------------------------------------------------------------------------


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="The core's share of one request (median, quartiles)")
    table.add_column("blocks")
    for result in results:
        table.add_column(result["blocks"], justify="right")
    table.add_row("MiB", *(f"{r['nbytes'] / 2**20:.0f}" for r in results))
    table.add_row(
        "copies before, after merging", *(f"{r['copies']}, {r['merged']}" for r in results)
    )
    for name in results[0]:
        if name.startswith("transfer") or "/" in name:
            table.add_row(name, *("{1:.3g} ({0:.3g} to {2:.3g})".format(*r[name]) for r in results))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", default="local")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    with producer(arguments.transport, arguments.layers, arguments.blocks) as answer:
        info, regions, caches, sums = answer
        cache = make_cache(arguments.layers, arguments.blocks)
        transport = open_transport({"transport": arguments.transport})
        transport.register([memory_region(cache)])
        peer = transport.add_peer(info, regions, timeout_s=PATIENCE_S)
        for run in (1, 8):
            cache[:] = 0
            result = measure(transport, peer, cache, caches, run, arguments.runs)
            check(cache, result, sums)
            results.append(result)
        transport.close()
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
