"""Registers GPU memory and moves it, with every transport that can: for a machine that has a GPU.

Takes at most ten minutes. Two processes each register a tensor on the GPU; whole and scattered
blocks are read and written between them, every byte is compared, and each transfer is timed beside
a copy of as many bytes within the GPU. Where no GPU or no transport for one is found, it says so.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvbridge.bench import Case
from kvbridge.errors import KVBridgeError
from kvbridge.model import memory_region
from kvbridge.transport import (
    Descriptors,
    Op,
    Peer,
    Region,
    State,
    Transport,
    available_transports,
    get_transport,
    open_transport,
)

LIMIT_S = 600.0
WAIT_S = 30.0
TOTAL_NBYTES = 64 << 20
BLOCKS = (4 << 10, 64 << 10, 1 << 20)
RUNS = 5


def make_tensor(seed: int, nbytes: int) -> Any:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensor = torch.randint(0, 256, (nbytes,), generator=generator, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    return tensor


def own(pipe: Connection, name: str, nbytes: int) -> None:
    """Own memory on the GPU until told to stop."""
    import torch

    tensor = make_tensor(2, nbytes)
    region = memory_region(tensor)
    transport = open_transport({"transport": name})
    transport.register([region])
    pipe.send((transport.agent_info(), region))
    while True:
        if not pipe.poll(0.001):
            transport.poll()
        elif pipe.recv() == "stop":
            break
        else:
            torch.cuda.synchronize()
            pipe.send(tensor.cpu().numpy().tobytes())
    transport.close()


def move(
    transport: Transport, peer: Peer, op: Op, local: Descriptors, remote: Descriptors
) -> float:
    start = time.perf_counter()
    handle = transport.submit(op, peer, local, remote)
    while time.perf_counter() < start + WAIT_S:
        for finished in transport.poll().finished:
            if finished.handle is handle and finished.state is State.DONE:
                return time.perf_counter() - start
            raise SystemExit(f"the {op} failed: {finished.reason}")
        time.sleep(20e-6)
    raise SystemExit(f"the {op} is pending after {WAIT_S} s")


def check(name: str, deadline: float) -> list[dict[str, Any]]:
    """Move GPU memory between two processes with one transport."""
    import torch

    nbytes = 2 * TOTAL_NBYTES
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, name, nbytes), daemon=True)
    owner.start()
    theirs.close()
    tensor, spare = make_tensor(1, nbytes), make_tensor(3, nbytes)
    region = memory_region(tensor)
    transport = open_transport({"transport": name})
    transport.register([region])
    if not pipe.poll(2 * WAIT_S):
        raise SystemExit(f"{name}: the owner does not start")
    info, remote_region = pipe.recv()
    peer = transport.add_peer(info, [remote_region], timeout_s=WAIT_S)
    rows: list[dict[str, Any]] = []
    ops: tuple[Op, ...] = ("read", "write")
    for op in ops:
        for block in BLOCKS:
            if time.monotonic() > deadline:
                break
            case = Case(op, block, "scattered", TOTAL_NBYTES)
            pieces = on_gpu(case, region, 1), on_gpu(case, remote_region, 2)
            move(transport, peer, op, *pieces)
            torch.cuda.synchronize()
            pipe.send("dump")
            there = np.frombuffer(pipe.recv(), np.uint8)
            equal = same(tensor.cpu().numpy(), region, there, remote_region, pieces)
            seconds = [move(transport, peer, op, *pieces) for _ in range(RUNS)]
            copies = [copy_within(tensor, spare, case.nbytes) for _ in range(RUNS)]
            ratio = statistics.median(a / b for a, b in zip(copies, seconds, strict=True))
            gbps = case.nbytes / statistics.median(seconds) / 1e9
            rows.append(
                {
                    "transport": name,
                    "path": peer.path,
                    "op": op,
                    "block_nbytes": block,
                    "equal": equal,
                    "gbps": gbps,
                    "of a copy within the GPU": ratio,
                }
            )
    pipe.send("stop")
    transport.close()
    owner.join(WAIT_S)
    return rows


def on_gpu(case: Case, region: Region, seed: int) -> Descriptors:
    pieces = case.pieces(region.address, seed)
    return Descriptors(pieces.address, pieces.nbytes, region.memory_kind, region.device)


def same(
    here: np.ndarray[Any, Any],
    region: Region,
    there: np.ndarray[Any, Any],
    remote_region: Region,
    pieces: tuple[Descriptors, Descriptors],
) -> bool:
    local, remote = pieces
    ours, theirs = local.address - region.address, remote.address - remote_region.address
    return all(
        np.array_equal(here[a : a + n], there[b : b + n])
        for a, b, n in zip(ours.tolist(), theirs.tolist(), local.nbytes.tolist(), strict=True)
    )


def copy_within(source: Any, target: Any, nbytes: int) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    target[:nbytes].copy_(source[:nbytes])
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit_s
    try:
        import torch
    except ImportError:
        print("no GPU was checked: torch is not installed")
        return 2
    if not torch.cuda.is_available():
        print("no GPU was checked: torch finds none on this machine")
        return 2
    rows, silent = [], []
    for name, availability in available_transports().items():
        if not availability.ok:
            silent.append(f"{name}: {availability.reason}")
        elif "cuda" not in get_transport(name)().capabilities.memory_kinds:
            silent.append(f"{name}: it does not register GPU memory")
        else:
            try:
                rows += check(name, deadline)
            except (KVBridgeError, SystemExit) as error:
                silent.append(f"{name}: {error}")
    if arguments.json:
        print(json.dumps({"measured": rows, "not measured": silent}, indent=2))
    else:
        for row in rows:
            print(
                ", ".join(
                    f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                )
            )
        print("\n".join(silent))
    return 0 if rows and all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
