"""Hands a request from a prefill engine to a decode engine, through a list of two connectors.

This is all that an engine has to call. Both connectors use one transport under two names here, so
that the example runs anywhere; an engine would list two transports. Each engine has one rank; one
with several has a worker half for each, gives all of them one ``incarnation``, and puts their
reports together with ``ReportGatherer``. Pass the name of another transport as argument.
"""

import json
import sys
import time

import numpy as np

from kvbridge.connector import Request, WorkerReport, scheduler_connector, worker_connector
from kvbridge.handshake import gather_handshake_metadata, hand_over
from kvbridge.model import CacheGroup, RankCache, TransferTopology, attention_layer, memory_region

HEADS, BLOCK_TOKENS = 8, 16
CONFIG = {
    "connectors": [{"name": "first"}, {"name": "second"}],  # tried in this order
    "transport": sys.argv[1] if len(sys.argv) > 1 else "local",  # both of them share the rest
    "timeout_s": 20,
    "lease_s": 30,
}


class Engine:
    """One scheduler half, one worker half, and pages whose contents are random."""

    def __init__(self, engine_id: str, seed: int) -> None:
        shape = (64, HEADS, BLOCK_TOKENS, 256)
        self.pages = np.random.default_rng(seed).random(shape, np.float32)
        topology = TransferTopology(
            engine_id=engine_id,
            tp_rank=0,
            tp_size=1,
            block_size=BLOCK_TOKENS,
            total_num_kv_heads=HEADS,
            is_mla=False,
            is_mamba=False,
        )
        self.scheduler = scheduler_connector(CONFIG, engine_id=engine_id)
        self.worker = worker_connector(CONFIG, topology, model="tiny")
        layer = attention_layer(
            self.pages, axes="BHNC", layer=0, name="layer.0", unit_start=0, unit_total=HEADS
        )
        group, region = CacheGroup("attention", BLOCK_TOKENS), memory_region(self.pages)
        self.worker.register_kv_caches(RankCache(engine_id, 0, 0, (layer,), (group,), (region,)))
        metadata = self.worker.get_handshake_metadata()
        hand_over(
            self.scheduler, gather_handshake_metadata([{(0, 0): metadata} if metadata else None])
        )

    def step(self) -> WorkerReport:
        """Do what a connector wants of every step; what the model computes goes on beside it."""
        self.worker.start_load_kv(self.scheduler.build_connector_meta())
        report = self.worker.get_finished()
        self.scheduler.update_connector_output(report)
        return report

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


prefill, decode = Engine("P", seed=1), Engine("D", seed=2)

# Prefill has computed 50 tokens in four blocks, and keeps them for whoever gets these params.
computed = Request("r-p", 50, computed_tokens=50, params={"do_remote_decode": True})
keeps_blocks, params = prefill.scheduler.request_finished(computed, ((7, 8, 9, 2),))
assert keeps_blocks

# Decode gets them through a proxy, asks what can be loaded, and allocates blocks for it.
request = Request("r-d", 50, params=json.loads(json.dumps(params)))
tokens, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
assert tokens == 50
decode.scheduler.update_state_after_alloc(request, ((3, 1, 6, 4),), tokens)

# Both go on stepping. The request may run once it is loaded; prefill's blocks are free once sent.
free, loaded, deadline_s = False, None, time.monotonic() + 25
while not (loaded and free):
    assert time.monotonic() < deadline_s
    loaded = decode.step().loaded.get("r-d", loaded)
    free = free or "r-p" in prefill.step().sent
    time.sleep(0.001)
assert loaded.ok, loaded.error

for there, here in zip((7, 8, 9), (3, 1, 6), strict=True):
    assert np.array_equal(prefill.pages[there], decode.pages[here])
assert np.array_equal(prefill.pages[2, :, :2], decode.pages[4, :, :2])  # tokens 48 and 49
print(f"50 tokens arrived over {loaded.via!r}, every byte as it was; prefill's blocks are free")

for engine in (decode, prefill):
    engine.close()
