"""What it costs when many peers shake hands with one engine at the same time.

The engine has tp8 x pp2 ranks and 80 layers on paper. Its peers are spread over four processes,
each with one dialer; every peer asks once, with factors, and reads what it gets. Sizes and the
presence of keys take turns within each run. Afterwards everything must be as it was before.

1. Time until the last peer is done, and its growth with their number: a line is fitted.
2. Memory and file descriptors of the engine's process before, at most, and after.
3. Bytes of one answer, which must not grow with the number of pages.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.plan import paper_engine, quartiles
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    Keys,
    MetadataReply,
    RankPayload,
    factors_of,
    keys_of_secret,
)
from kvbridge.handshake.compatibility import engine_factors
from kvbridge.handshake.metadata import decode_factors, seal
from kvbridge.handshake.wire import WIRE, encode
from kvbridge.model import Rank

TP, PP, LAYERS, PAGES = 8, 2, 80, 10_000
PROCESSES = 4
TIMEOUT_S = 120.0
SAMPLE_S = 0.002
SECRET = b"a secret for this benchmark"

Figures = dict[str, Any]


def published(pages: int = PAGES) -> dict[Rank, HandshakeMetadata]:
    """Return what the ranks of the engine publish."""
    metadata = {}
    for rank, held in paper_engine("prefill", TP, PP, layers=LAYERS, pages=pages).items():
        factors = factors_of(held, model="a-model-of-80-layers", transport="nixl", revision="r1")
        body = RankPayload(held, bytes(256))
        payload = seal(factors, body, engine_id="prefill", incarnation="start-1", generation=1)
        metadata[rank] = HandshakeMetadata("prefill", "start-1", *rank, payload)
    return metadata


def factors() -> dict[str, Any]:
    """Return the factors that all peers ask with."""
    return engine_factors(decode_factors(data.payload) for data in published().values())


def answer_nbytes(pages: int) -> int:
    """Return how long one answer is."""
    return len(encode(MetadataReply(1, tuple(published(pages).values()), WIRE)))


# --- the engine ----------------------------------------------------------------------------------


def look() -> dict[str, float]:
    """Return what this process uses: MiB, file descriptors and threads."""
    status = Path("/proc/self/status").read_text()
    return {
        "rss": int(status.partition("VmRSS:")[2].split()[0]) / 1024,
        "fds": len(list(Path("/proc/self/fd").iterdir())) - 1,
        "threads": int(status.partition("Threads:")[2].split()[0]),
    }


def serve(link: Connection, keys: Keys | None) -> None:
    """Be the engine: at each question, watch what this process uses until the next one."""
    server = HandshakeServer(keys=keys)
    server.set_xfer_handshake_metadata_pp_aware(published())
    link.send(server.port)
    while link.recv():
        gc.collect()
        before = look()
        link.send(before)
        most = dict(before)
        while not link.poll(SAMPLE_S):
            most = {key: max(most[key], value) for key, value in look().items()}
        link.recv()
        gc.collect()
        deadline_s = time.monotonic() + 5
        while look()["fds"] > before["fds"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        link.send({"before": before, "peak": most, "after": look(), "refused": server.refused})
    server.close()


def ask(link: Connection, port: int, keys: Keys | None) -> None:
    """Be a share of the peers."""
    mine = factors()
    before = threading.active_count()
    while count := link.recv():
        with Dialer(keys=keys) as dialer:
            link.send("ready")
            link.recv()
            address = EngineAddress("127.0.0.1", port)
            asked = [
                dialer.fetch(
                    address, timeout_s=TIMEOUT_S, engine_id="prefill", asker=f"d{i}", factors=mine
                )
                for i in range(count)
            ]
            ranks = {len(each.result().ranks) for each in asked}
        link.send((ranks, threading.active_count() - before))


@contextmanager
def processes(keys: Keys | None) -> Iterator[tuple[Connection, list[Connection]]]:
    """Start the engine and its peers."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(target: Any, *arguments: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        started.append((process, ours))
        theirs.close()
        return ours

    engine = start(serve, keys)
    port = engine.recv()
    peers = [start(ask, port, keys) for _ in range(PROCESSES)]
    try:
        yield engine, peers
    finally:
        for process, link in started:
            link.send(0)
            process.join(10)
            process.kill()
            link.close()


def shake_hands(engine: Connection, peers: list[Connection], count: int) -> dict[str, Any]:
    """Have so many peers ask at once; return the seconds that took, and what the engine used."""
    engine.send(1)
    engine.recv()
    share, more = divmod(count, len(peers))
    for i, peer in enumerate(peers):
        peer.send(share + (i < more))
        peer.recv()
    started_s = time.perf_counter()
    for peer in peers:
        peer.send("go")
    told = [peer.recv() for peer in peers]
    seconds = time.perf_counter() - started_s
    engine.send("done")
    used: dict[str, Any] = engine.recv()
    before, after = used["before"], used["after"]
    left = {key: after[key] - before[key] for key in ("fds", "threads")}
    if any(left.values()) or used["refused"] or any(each != ({TP * PP}, 0) for each in told):
        raise SystemExit(f"{count} peers left {left} behind, {used['refused']} refused: {told}")
    return {"s": seconds, "peers": count, **used}


# --- the figures ---------------------------------------------------------------------------------


def measure(sizes: list[int], runs: int) -> Figures:
    samples: dict[str, list[dict[str, Any]]] = {}
    with processes(None) as plain, processes(keys_of_secret(SECRET)) as secured:
        kinds = {"open": plain, "keys": secured}
        for engine, peers in kinds.values():  # the first ones are not counted
            shake_hands(engine, peers, PROCESSES)
        for run in range(runs):
            for count in sizes[:: -1 if run % 2 else 1]:
                for name, (engine, peers) in kinds.items():
                    sample = shake_hands(engine, peers, count)
                    samples.setdefault(f"{count} peers, {name}", []).append(sample)
    few, many = answer_nbytes(10_000), answer_nbytes(1_000_000)
    return {
        "Many peers at once": {name: columns(found) for name, found in samples.items()},
        "Growth": {
            name: growth(sizes, [samples[f"{count} peers, {name}"] for count in sizes])
            for name in kinds
        },
        "One answer": {
            "": {"bytes, 10,000 pages": few, "1,000,000 pages": many, "ratio": many / few},
        },
    }


def columns(samples: list[dict[str, Any]]) -> Figures:
    peers = samples[0]["peers"]
    return {
        "all done, ms": quartiles([each["s"] * 1e3 for each in samples]),
        "ms a peer": statistics.median(each["s"] * 1e3 / peers for each in samples),
        **{
            f"{what} before, peak, after": {
                when: statistics.median(each[when][key] for each in samples)
                for when in ("before", "peak", "after")
            }
            for key, what in (("rss", "MiB"), ("fds", "fds"))
        },
    }


def growth(sizes: list[int], samples: list[list[dict[str, Any]]]) -> Figures:
    """Fit time to the number of peers, and compare what the first and the last run left."""
    counts = np.array(sizes, float)
    ms = np.array([statistics.median(each["s"] * 1e3 for each in found) for found in samples])
    slope, offset = np.polyfit(counts, ms, 1)
    rest = ms - (slope * counts + offset)
    fds = [max(each["peak"]["fds"] - each["before"]["fds"] for each in found) for found in samples]
    first, last = (max(found[run]["after"]["rss"] for found in samples) for run in (0, -1))
    return {
        "ms for one more": float(slope),
        "ms for none": float(offset),
        "r²": float(1 - rest.var() / ms.var()),
        "fds for one more": float(np.polyfit(counts, fds, 1)[0]),
        "MiB after first run": first,
        "MiB after last": last,
    }


def show(figures: Figures) -> None:
    for title, rows in figures.items():
        names = next(iter(rows.values()))
        table = Table("", *names, title=title, title_justify="left")
        for name, values in rows.items():
            table.add_row(name, *map(written, values.values()))
        Console().print(table)


def written(value: Any) -> str:
    if isinstance(value, list):
        low, middle, high = value
        return f"{middle:.0f} ({low:.0f} to {high:.0f})"
    if isinstance(value, dict):
        return ", ".join(f"{each:.0f}" for each in value.values())
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.runs < 2:
        parser.error(f"--runs {arguments.runs} gives no quartiles; take at least 2")
    figures = measure(arguments.peers, arguments.runs)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures)


if __name__ == "__main__":
    main()
