"""A small engine in this process: a scheduler half, a worker half for each rank, real memory."""

import json
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.connector import (
    BlockIds,
    BridgeConnector,
    Connector,
    MultiConnector,
    Request,
    WorkerReport,
    scheduler_connector,
    worker_connector,
)
from kvbridge.connector.gather import ReportGatherer
from kvbridge.connector.scheduler import BridgeScheduler
from kvbridge.connector.worker import BridgeWorker
from kvbridge.handshake import gather_handshake_metadata, hand_over
from kvbridge.model import (
    CacheGroup,
    Rank,
    RankCache,
    TransferTopology,
    attention_layer,
    memory_region,
)

HEADS, LAYERS, PAGE, PAGES, CONTENT = 4, 2, 4, 16, 8
AXES = "BKNHC"
"""The order in which tests see the axes of a layer, however they lie in memory."""
Configure = Callable[[], Any]


def place(engine_id: str, rank: Rank, tp: int, pp: int, page: int = PAGE) -> TransferTopology:
    return TransferTopology(
        tp_rank=rank[1],
        tp_size=tp,
        pp_rank=rank[0],
        pp_size=pp,
        block_size=page,
        engine_id=engine_id,
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
    )


class TinyEngine:
    """An engine of any shape, whose step is a call."""

    def __init__(
        self,
        engine_id: str,
        config: Any,
        *,
        tp: int = 1,
        pp: int = 1,
        page: int = PAGE,
        axes: str = AXES,
        worker_config: Any = None,
        scheduler: Connector | None = None,
        workers: Callable[[Rank, TransferTopology], Connector] | None = None,
    ) -> None:
        self.engine_id, self.page, self.axes = engine_id, page, axes
        self.ranks: list[Rank] = [(p, t) for p in range(pp) for t in range(tp)]
        incarnation = uuid.uuid4().hex
        self.scheduler = scheduler or scheduler_connector(config, engine_id=engine_id, pp_size=pp)

        def make(rank: Rank, topology: TransferTopology) -> Connector:
            return worker_connector(
                config if worker_config is None else worker_config,
                topology,
                model="m",
                incarnation=incarnation,
            )

        self.workers = {
            rank: (workers or make)(rank, place(engine_id, rank, tp, pp, page))
            for rank in self.ranks
        }
        heads, layers = HEADS // tp, LAYERS // pp
        self.memory = {rank: self.new_memory(layers, heads) for rank in self.ranks}
        self.reports = ReportGatherer(self.ranks)
        self.loaded: dict[str, Any] = {}
        self.sent: list[str] = []
        self.expired: set[str] = set()
        for rank, worker in self.workers.items():
            worker.register_kv_caches(self.cache(rank, layers, heads))
        self.publish()

    def publish(self) -> None:
        metadata = [{rank: w.get_handshake_metadata()} for rank, w in self.workers.items()]
        found = [{r: m for r, m in each.items() if m is not None} for each in metadata]
        if any(found):
            hand_over(self.scheduler, gather_handshake_metadata(found))

    def new_memory(self, layers: int, heads: int, value: float = -1) -> NDArray[np.float32]:
        """Return a cache whose layers lie in memory in the engine's own order of axes."""
        size = dict(zip(AXES, (PAGES, 2, self.page, heads, CONTENT), strict=True))
        array = np.full((layers, *(size[axis] for axis in self.axes)), value, np.float32)
        return array.transpose(0, *(1 + self.axes.index(axis) for axis in AXES))

    def cache(self, rank: Rank, layers: int, heads: int) -> RankCache:
        pp_rank, tp_rank = rank
        return RankCache(
            self.engine_id,
            pp_rank,
            tp_rank,
            tuple(
                attention_layer(
                    self.memory[rank][i],
                    axes=AXES,
                    layer=pp_rank * layers + i,
                    name=f"layers.{pp_rank * layers + i}",
                    unit_start=tp_rank * heads,
                    unit_total=HEADS,
                )
                for i in range(layers)
            ),
            (CacheGroup("attention", self.page),),
            (memory_region(self.memory[rank]),),
        )

    def fill(self, pages: Iterable[int], value: float = 0.0) -> None:
        """Write into every cell of some pages what nothing else holds."""
        for (pp, tp), memory in self.memory.items():
            layers, heads = memory.shape[0], memory.shape[4]
            for n, page in enumerate(pages):
                for i in range(layers):
                    for head in range(heads):
                        layer, unit = pp * layers + i, tp * heads + head
                        cells = np.arange(2 * self.page * CONTENT).reshape(2, self.page, CONTENT)
                        memory[i, page, :, :, head] = (
                            value + cells + 1000 * unit + 10_000 * layer + 100_000 * n
                        )

    def tokens(self, pages: Iterable[int], count: int) -> NDArray[np.float32]:
        """Return what the ranks hold of some pages together: [layer, token, K/V, head, content]."""
        pages = list(pages)
        pps = sorted({pp for pp, _ in self.ranks})
        tps = sorted({tp for _, tp in self.ranks})
        whole = np.concatenate(
            [np.concatenate([self.memory[pp, tp][:, pages] for tp in tps], axis=4) for pp in pps]
        )
        by_token = np.moveaxis(whole, 2, 3).reshape(whole.shape[0], -1, 2, HEADS, CONTENT)
        return by_token[:, :count]

    def step(self) -> WorkerReport:
        metadata = self.scheduler.build_connector_meta()
        for rank, worker in self.workers.items():
            worker.start_load_kv(metadata)
            self.reports.add(rank, worker.get_finished())
        report = self.reports.take()
        self.scheduler.update_connector_output(report)
        assert not self.loaded.keys() & report.loaded.keys(), "reported twice"
        assert not set(self.sent) & report.sent, "reported twice"
        self.loaded.update(report.loaded)
        self.sent += report.sent
        self.expired |= report.expired
        return report

    def prefill(self, request_id: str, blocks: list[int], tokens: int, **params: Any) -> Any:
        """Compute a request, and return what it takes along through a proxy, as JSON."""
        self.fill(blocks)
        request = Request(request_id, tokens, tokens, {"do_remote_decode": True, **params})
        holds, taken = self.scheduler.request_finished(request, (tuple(blocks),))
        assert holds == (taken is not None)
        return json.loads(json.dumps(taken))

    def load(
        self, request_id: str, blocks: list[int], tokens: int, params: Any, here: int = 0
    ) -> int:
        """Ask for a request's tokens and begin to load them; return how many."""
        request = Request(request_id, tokens, params=params)
        matched, _ = self.scheduler.get_num_new_matched_tokens(request, here)
        ids: BlockIds = (tuple(blocks),)
        self.scheduler.update_state_after_alloc(request, ids, matched or 0)
        return matched or 0

    def sleep(self) -> None:
        """Give the memory back; what others find there from then on is nobody's."""
        for worker in self.workers.values():
            worker.unregister_kv_caches()
        self.scheduler.unregister_kv_caches()
        for memory in self.memory.values():
            memory[:] = -9

    def renew(self) -> None:
        """Wake up with other memory, as an engine that has slept does."""
        for rank, worker in self.workers.items():
            layers, heads = self.memory[rank].shape[0], self.memory[rank].shape[4]
            self.memory[rank] = self.new_memory(layers, heads, 0)
            worker.register_kv_caches(self.cache(rank, layers, heads))
        self.publish()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.shutdown()
        self.scheduler.shutdown()


Make = Callable[..., TinyEngine]
"""Makes an engine; takes what the class takes."""


def scheduler_of(connector: Connector) -> BridgeScheduler:
    """Return the scheduler half of a connector of one transport."""
    assert isinstance(connector, BridgeConnector)
    return connector.scheduler_half


def worker_of(connector: Connector) -> BridgeWorker:
    """Return the worker half of a connector of one transport."""
    assert isinstance(connector, BridgeConnector)
    return connector.worker_half


def expected(p: TinyEngine, transfer_id: str, connector: Connector | None = None) -> dict[str, Any]:
    """Return what a router gives to a reader at the same time as the prompt to the producer."""
    address = scheduler_of(connector or p.scheduler).server.address
    return {
        "do_remote_prefill": True,
        "remote_engine_id": p.engine_id,
        "remote_host": address.host,
        "remote_port": address.port,
        "transfer_id": transfer_id,
    }


def several(connector: Connector) -> MultiConnector:
    """Return a connector of several transports as what it is."""
    assert isinstance(connector, MultiConnector)
    return connector


def run(engines: Iterable[TinyEngine], done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Step some engines until something is true."""
    engines = list(engines)
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, "it neither ends nor fails"
        for engine in engines:
            engine.step()
        time.sleep(0.001)
