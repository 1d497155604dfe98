"""An engine with KVBridge in it, to copy: one process prefills, another one loads its cache.

The model is a toy and each engine has one rank; what is called, and when, is what any engine calls.
docs/how-to/embed-in-an-engine.md goes through it.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import multiprocessing
import random
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kvbridge.connector import Request, WorkerReport, scheduler_connector, worker_connector
from kvbridge.errors import KVBridgeError, MemoryBusyError
from kvbridge.handshake import hand_over
from kvbridge.model import CacheGroup, RankCache, TransferTopology, attention_layer, memory_region
from kvbridge.processes import start_uninterrupted

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 2, 64, 4, 16, 128
Blocks = tuple[int, ...]


class Engine:
    def __init__(self, engine_id: str, config: dict[str, Any], library_name: str) -> None:
        library = importlib.import_module(library_name)  # torch takes device="cuda" on a GPU
        shape = (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        self.new_cache = partial(library.zeros, shape, dtype=library.float32)
        self.cache = self.new_cache()
        self.free = random.sample(range(BLOCKS), BLOCKS)
        self.blocks: dict[str, Blocks] = {}  # those of each request
        self.given_up: set[str] = set()  # those of them that are still being loaded
        self.engine_id = engine_id
        place = TransferTopology(
            engine_id=engine_id,
            tp_rank=0,
            tp_size=1,
            block_size=BLOCK_TOKENS,
            total_num_kv_heads=HEADS,
            is_mla=False,
            is_mamba=False,
        )
        self.worker = worker_connector(config, place, model="toy")
        self.scheduler = scheduler_connector(config, engine_id=engine_id)
        self.publish()

    def publish(self) -> None:
        """Say where the cache is: at the start, and whenever it has moved."""
        describe = partial(attention_layer, axes="BHNC", unit_start=0, unit_total=HEADS)
        layers = tuple(
            describe(pages, layer=i, name=f"layers.{i}") for i, pages in enumerate(self.cache)
        )
        groups, regions = (CacheGroup("attention", BLOCK_TOKENS),), (memory_region(self.cache),)
        self.worker.register_kv_caches(RankCache(self.engine_id, 0, 0, layers, groups, regions))
        if metadata := self.worker.get_handshake_metadata():
            hand_over(self.scheduler, {(0, 0): metadata})

    def sleep(self) -> None:
        """Give the memory of the cache back, once nobody uses it."""
        halves = [self.worker, self.scheduler]  # in this order
        while halves:
            try:
                halves[0].unregister_kv_caches()
            except MemoryBusyError:
                self.step()  # and what is being loaded, or written for others, goes on
            else:
                halves.pop(0)
        self.cache = None

    def wake(self) -> None:
        self.cache = self.new_cache()
        self.publish()

    def step(self) -> WorkerReport:
        """Do what each step has to, whether there is anything to compute or not."""
        metadata = self.scheduler.build_connector_meta()
        self.worker.start_load_kv(metadata)
        self.worker.wait(0.001)  # or the model computes here, and loads go on beside it
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        for request_id in report.sent | (self.given_up & report.loaded.keys()):
            self.release(request_id)
        return report

    def allocate(self, request_id: str, tokens: int) -> Blocks:
        count = -(-tokens // BLOCK_TOKENS)
        self.blocks[request_id] = tuple(self.free.pop() for _ in range(count))
        return self.blocks[request_id]

    def release(self, request_id: str) -> None:
        self.given_up.discard(request_id)
        self.free += self.blocks.pop(request_id, ())

    def finish(self, request: Request) -> dict[str, Any] | None:
        blocks = self.blocks.get(request.request_id, ())
        keep, params = self.scheduler.request_finished(request, (blocks,))
        if not keep:
            self.release(request.request_id)
        elif request.aborted:  # while it was being loaded: its blocks are written to until then
            self.given_up.add(request.request_id)
        return params

    def close(self) -> None:
        self.worker.shutdown()  # the cache must be there until this has returned
        self.scheduler.shutdown()


def compute(cache: Any, blocks: Blocks, start: int, end: int) -> None:
    """Stand for the model: what a token leaves in the cache follows from the token before it."""
    for token, layer, head in itertools.product(range(start, end), range(LAYERS), range(HEADS)):
        (last, there), (block, here) = (divmod(t, BLOCK_TOKENS) for t in (token - 1, token))
        before = cache[layer, blocks[last], head, there] if token else layer * HEADS + head
        cache[layer, blocks[block], head, here] = (7 * before + token) % 251


def prefill(engine: Engine, request: Request) -> dict[str, Any] | None:
    """Compute a prompt, and return what finds it again."""
    tokens = request.prompt_tokens
    compute(engine.cache, engine.allocate(request.request_id, tokens), 0, tokens)
    return engine.finish(replace(request, computed_tokens=tokens))


def decode(engine: Engine, request: Request) -> None:
    """Load what can be loaded of a prompt, compute the rest of it, and one more token."""
    while (tokens := engine.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        engine.step()  # an earlier request of that id is still being loaded
    end = request.prompt_tokens + 1
    blocks = engine.allocate(request.request_id, end)
    engine.scheduler.update_state_after_alloc(request, (blocks,), tokens)
    loaded = None
    while tokens and loaded is None:  # what else is there to run goes on running
        loaded = engine.step().loaded.get(request.request_id)
    if loaded and not loaded.ok and not loaded.recompute:
        print(f"decode: nothing was loaded, so the request fails: {loaded.error}")
        engine.finish(request)
        return
    if loaded and not loaded.ok:
        print(f"decode: nothing was loaded, so it is computed: {loaded.error}")
        tokens = 0
    compute(engine.cache, blocks, tokens, end)

    alone = engine.cache * 0
    compute(alone, blocks, 0, end)
    assert (engine.cache == alone).all()
    print(f"decode: {tokens} tokens loaded, {end - tokens} computed, and all of them are right")
    engine.finish(replace(request, computed_tokens=end))


def serve_prefill(config: dict[str, Any], library_name: str, channel: Connection) -> None:
    """Be the other process; ``channel`` stands for HTTP."""
    with contextlib.closing(Engine("prefill", config, library_name)) as engine:
        is_open = True
        while is_open or engine.blocks:  # readers need steps of this engine to the end
            if is_open and channel.poll():
                try:
                    request = Request(**json.loads(channel.recv()))
                except (EOFError, ConnectionError):
                    is_open = False
                    engine.scheduler.drain(5)
                else:
                    channel.send(json.dumps(prefill(engine, request)))
            for request_id in engine.step().sent:
                print(f"prefill: the blocks of {request_id} are free", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="local", help="local, nixl, ucx, ...")
    parser.add_argument("--cache", choices=["numpy", "torch"], default="numpy")
    parser.add_argument("--kill", action="store_true", help="kill prefill before it is read")
    parser.add_argument("--on-failure", choices=["recompute", "fail"], default="recompute")
    words = parser.parse_args()
    config = {
        "transport": words.transport,
        "lease_s": 30,  # how long prefill keeps blocks for readers that it does not hear of
        "timeout_s": 20,  # how long a load of decode may take
        "handshake": {"timeout_s": 5},  # and of that, to meet the other engine
        "on_failure": words.on_failure,  # what becomes of a request that decode could not load
    }
    with contextlib.closing(Engine("decode", config, words.cache)) as engine:
        context = multiprocessing.get_context("spawn")  # no transport survives a fork
        channel, theirs = context.Pipe()
        peer = context.Process(
            target=serve_prefill, args=(config, words.cache, theirs), daemon=True
        )
        start_uninterrupted(peer)
        theirs.close()
        asked = {"request_id": "r", "prompt_tokens": 50}
        channel.send(json.dumps({**asked, "params": {"do_remote_decode": True}}))
        params = channel.recv()
        print(f"travels with the request: {params}", flush=True)
        if words.kill:
            peer.kill()
        decode(engine, Request("r", 50, params=json.loads(params)))
        channel.close()
        peer.join()


if __name__ == "__main__":
    try:
        main()
    except (KVBridgeError, EOFError) as error:
        sys.exit(f"embedded_engine: {str(error) or 'the prefill engine has ended'}")
    except KeyboardInterrupt:
        sys.exit(130)
