"""Throughput of each transport against its own library driven directly, in the same runs.

They move the same pieces of the same memory between the same two processes and take turns, each
first in some runs. Neighbours are merged beforehand, as the planner does: that is the best
list that the library can be given, and the transport gets the same one. A ratio of 1 means that
the transport costs nothing; what it may cost is checks, a thread of its own, and the way there.

A transport never blocks its caller, so its library runs in a thread while the caller looks now and
then. On few cores that alone costs something, whoever does it: the last column compares with the
library in such a thread, looked at as often.

Where a transport serves its reads by writes of the owner, the library is measured reading, as it
would be used directly, and the transport's option `read_mode=native` is measured too.
"""

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.libraries import LIBRARIES, Library
from kvbridge.bench import Case, Quartiles, quartiles
from kvbridge.bench.pair import Arena
from kvbridge.transport import (
    Descriptors,
    Op,
    Peer,
    State,
    Transport,
    available_transports,
    open_transport,
)

WAIT_S = 60.0
POLL_S = 200e-6  # an engine looks less often
BLOCKS = (4 << 10, 64 << 10, 1 << 20, 4 << 20)

# What is measured: a transport with options, and the same options for its library.
SETUPS: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("nixl", {}),
    ("mooncake", {"allow_open_data_port": True}),
    ("ucx", {}),
    ("ucx", {"tls": "tcp"}),
    ("ucx", {"tls": "tcp", "read_mode": "native"}),
]


def own(pipe: Connection, name: str, options: dict[str, Any], nbytes: int) -> None:
    """Own memory that is reached both ways."""
    arena = Arena(nbytes)
    library = LIBRARIES[name](arena.region, options)
    transport = open_transport({"transport": name, "options": options})
    transport.register([arena.region])
    pipe.send((arena.region, library.card(), transport.agent_info()))
    while not pipe.poll(0.0001):
        while library.progress():
            pass
        transport.poll()
    transport.close()


def through_transport(
    transport: Transport, peer: Peer, op: Op, local: Descriptors, remote: Descriptors
) -> float:
    start = time.perf_counter()
    handle = transport.submit(op, peer, local, remote)
    while time.perf_counter() < start + WAIT_S:
        for finished in transport.poll().finished:
            if finished.handle is handle and finished.state is State.DONE:
                return time.perf_counter() - start
            raise SystemExit(f"the transfer failed: {finished.reason}")
        time.sleep(POLL_S)
    raise SystemExit(f"the transfer is pending after {WAIT_S} s")


def directly(library: Library, op: Op, local: Descriptors, remote: Descriptors) -> float:
    start = time.perf_counter()
    library.move(op, local, remote)
    return time.perf_counter() - start


class InThread:
    """A library in a thread of its own, and a caller that looks now and then."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tasks: SimpleQueue[tuple[Op, Descriptors, Descriptors] | None] = SimpleQueue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> float:
        start = time.perf_counter()
        self._done.clear()
        self._tasks.put((op, local, remote))
        while not self._done.is_set():
            if not self._thread.is_alive():
                raise SystemExit("the library failed, see above")
            time.sleep(POLL_S)
        return time.perf_counter() - start

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._library.move(*task)
            self._done.set()


def merged(case: Case, address: int, seed: int) -> Descriptors:
    """Return the best list: what is contiguous is one piece."""
    if case.layout == "contiguous":
        case = Case(case.op, case.nbytes, case.layout, case.nbytes)
    return case.pieces(address, seed)


def measure(name: str, options: dict[str, Any], total: int, runs: int) -> list[dict[str, Any]]:
    cases = [Case(op, total, "contiguous", total) for op in ("read", "write")]
    cases += [Case(op, block, "scattered", total) for op in ("read", "write") for block in BLOCKS]
    nbytes = max(case.arena_nbytes for case in cases)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, name, options, nbytes), daemon=True)
    owner.start()
    theirs.close()
    arena = Arena(nbytes)
    library = LIBRARIES[name](arena.region, options)
    transport = open_transport({"transport": name, "options": options})
    transport.register([arena.region])
    if not pipe.poll(WAIT_S):
        raise SystemExit(f"{name}: the owner does not start")
    region, card, info = pipe.recv()
    library.meet(card)
    peer = transport.add_peer(info, [region], timeout_s=WAIT_S)
    rows = []
    for case in cases:
        pieces = merged(case, arena.address, 1), merged(case, region.address, 2)
        figures = compare(case, pieces, library, transport, peer, runs)
        rows.append({"transport": name, "options": options, "path": peer.path, **figures})
    pipe.send("stop")
    transport.close()
    owner.join(10)
    return rows


def compare(
    case: Case,
    pieces: tuple[Descriptors, Descriptors],
    library: Library,
    transport: Transport,
    peer: Peer,
    runs: int,
) -> dict[str, Any]:
    thread = InThread(library)
    ways: list[Callable[[], float]] = [
        partial(through_transport, transport, peer, case.op, *pieces),
        partial(directly, library, case.op, *pieces),
        partial(thread.move, case.op, *pieces),
    ]
    seconds = []
    for i in range(runs + 1):
        order = [(i + step) % len(ways) for step in range(len(ways))]
        taken = {which: ways[which]() for which in order}
        seconds.append((taken[0], taken[1], taken[2]))
    thread.close()
    seconds = seconds[1:]  # what is touched for the first time is slower
    return {
        "op": case.op,
        "layout": case.layout,
        "block_nbytes": case.block_nbytes,
        "gbps": quartiles([case.nbytes / ours / 1e9 for ours, _, _ in seconds]).median,
        "ratio": quartiles([direct / ours for ours, direct, _ in seconds]),
        "ratio_in_thread": quartiles([threaded / ours for ours, _, threaded in seconds]),
    }


def words_of(ratio: Quartiles) -> str:
    low, middle, high = ratio
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("transports", nargs="*", help="all that run here if none is named")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--total-mib", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    able = {name for name, availability in available_transports().items() if availability.ok}
    rows = []
    for name, options in SETUPS:
        if name in (arguments.transports or able):
            rows += measure(name, options, arguments.total_mib << 20, arguments.runs)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        "transport",
        "path",
        "op",
        "pieces",
        "GB/s",
        "ratio to the library",
        "and in a thread",
        box=None,
    )
    for r in rows:
        words = ", ".join(f"{k}={v}" for k, v in r["options"].items() if v is not True)
        one = "one" if r["layout"] == "contiguous" else f"{r['block_nbytes'] >> 10} KiB"
        table.add_row(
            f"{r['transport']} {words}".strip(),
            r["path"],
            r["op"],
            one,
            f"{r['gbps']:.3g}",
            *(words_of(r[key]) for key in ("ratio", "ratio_in_thread")),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
