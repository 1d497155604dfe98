"""Moves one attention layer between two engines that share neither page size nor layout.

Both engines live in this process to keep the example short; each would use a transport of its own
in any case. For the same reason every piece is copied straight to its place by ``lower``, although
``explain`` says that fewer reads and a rearrangement, by ``lower_staged``, would cost less. Pass
the name of another transport as argument.
"""

import sys

import numpy as np
import numpy.typing as npt

from kvbridge.model import CacheGroup, RankCache, TransferTopology, attention_layer, memory_region
from kvbridge.plan import BlockTable, generate_engine_transfer_plan
from kvbridge.transport import Descriptors, State, open_transport

HEADS = 8


def describe(
    engine_id: str, tp_rank: int, pages: npt.NDArray[np.float32], axes: str, first_head: int
) -> RankCache:
    """Announce what one rank holds: the array, and what its axes and heads are."""
    layer = attention_layer(
        pages, axes=axes, layer=0, name="layer.0", unit_start=first_head, unit_total=HEADS
    )
    group = CacheGroup("attention", block_tokens=pages.shape[axes.index("N")])
    return RankCache(engine_id, 0, tp_rank, (layer,), (group,), (memory_region(pages),))


# Prefill: two ranks with four heads each, 16 tokens a page, heads first.
computed = [np.random.default_rng(rank).random((64, 4, 16, 256), np.float32) for rank in range(2)]
prefill = {(0, rank): describe("P", rank, computed[rank], "BHNC", 4 * rank) for rank in range(2)}

# Decode: one rank with all eight heads, 32 tokens a page, tokens first.
pages = np.zeros((32, 32, HEADS, 256), np.float32)
decode = describe("D", 0, pages, "BNHC", 0)
topology = TransferTopology(
    engine_id="D",
    tp_rank=0,
    tp_size=1,
    block_size=32,
    total_num_kv_heads=HEADS,
    is_mla=False,
    is_mamba=False,
)

choice = {"transport": sys.argv[1] if len(sys.argv) > 1 else "local"}
transport = open_transport(choice)
transport.register(decode.regions)
owners = {rank: open_transport(choice) for rank in prefill}
peers = {}
for rank, owner in owners.items():
    owner.register(prefill[rank].regions)
    peers[rank] = transport.add_peer(owner.agent_info(), prefill[rank].regions, timeout_s=5)

# 50 tokens lie in the blocks 7, 8, 9 and 2 of prefill, and go to the blocks 3 and 1 of decode.
plan = generate_engine_transfer_plan(topology, decode, prefill)
print(plan.explain())

pending = set()
for batch in plan.lower([BlockTable([3, 1])], [BlockTable([7, 8, 9, 2])], end_token=50):
    local = Descriptors(batch.local_address, batch.nbytes)
    remote = Descriptors(batch.remote_address, batch.nbytes)
    pending.add(transport.submit("read", peers[batch.remote_rank], local, remote))
while pending:
    for handle, state, reason in transport.poll().finished:
        assert state is State.DONE, reason
        pending.remove(handle)

# Token 49 is the second of prefill's block 2, and the 18th of decode's block 1.
for head in range(HEADS):
    assert (pages[1, 17, head] == computed[head // 4][2, head % 4, 1]).all()
assert not pages[1, 18:].any()
print("all heads of the last token arrived, and nothing behind it was touched")

for agent in (transport, *owners.values()):
    agent.close()
