"""One rank of one demo engine: a process that holds its shard, computes, gives and takes."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvbridge.connector import BridgeConnector, Loaded, MultiConnector, worker_connector
from kvbridge.demo import messages
from kvbridge.demo.cache import POISON_BYTE
from kvbridge.demo.collective import Group
from kvbridge.demo.engine import RankEngine, generate
from kvbridge.demo.messages import Failed, RankSpec
from kvbridge.errors import KVBridgeError, TransportError
from kvbridge.model import (
    CacheGroup,
    RankCache,
    TransferTopology,
    attention_layer,
    memory_region,
)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0002


def run_rank(spec: RankSpec, group: Group, control: Connection) -> None:
    """Serve the parent's messages until it says stop, or is gone; the body of a rank process."""
    _die_with_parent()
    try:
        process = _RankProcess(spec, group)
        control.send(process.connector.get_handshake_metadata())
        while (message := process.next_message(control)) is not None:
            control.send(process.handle(message))
        process.close()
    except EOFError:
        return  # the parent is gone
    except (KVBridgeError, ValueError, OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            control.send(Failed(type(error).__name__, str(error)))


def _die_with_parent() -> None:
    """Have the kernel end this process with its parent, even while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)  # it went before the kernel was told


def rank_cache(engine_id: str, engine: RankEngine) -> RankCache:
    """Return what a demo rank announces: its layers, heads and memory."""
    cache, (pp_rank, tp_rank) = engine.cache, engine.group.rank
    layers = tuple(
        attention_layer(
            arrays if len(arrays) > 1 else arrays[0],
            axes=cache.axes,
            layer=layer,
            name=f"model.layers.{layer}.attention",
            unit_start=cache.heads.start,
            unit_total=engine.config.kv_heads,
        )
        for layer, arrays in cache.arrays.items()
    )
    groups = (CacheGroup("attention", engine.shape.page),)
    return RankCache(engine_id, pp_rank, tp_rank, layers, groups, (memory_region(cache.buffer),))


class _RankProcess:
    def __init__(self, spec: RankSpec, group: Group) -> None:
        self._timeout_s = spec.timeout_s
        self._engine = RankEngine(spec.model, spec.shape, group, spec.pages)
        pp_rank, tp_rank = group.rank
        topology = TransferTopology(
            tp_rank=tp_rank,
            tp_size=spec.shape.tp,
            pp_rank=pp_rank,
            pp_size=spec.shape.pp,
            block_size=spec.shape.page,
            engine_id=spec.engine_id,
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=spec.model.kv_heads,
        )
        self.connector = worker_connector(
            spec.connectors, topology, model=str(spec.model), incarnation=spec.incarnation
        )
        self.connector.register_kv_caches(rank_cache(spec.engine_id, self._engine))
        self._loaded: dict[str, Loaded] = {}
        self._sent: set[str] = set()
        self._handlers: dict[type, Callable[[Any], object]] = {
            messages.Prefill: self._prefill,
            messages.Step: self._step,
            messages.AwaitLoad: self._await_load,
            messages.Dump: self._dump,
            messages.Decode: self._decode,
            messages.AwaitSent: self._await_sent,
        }

    def next_message(self, control: Connection) -> object | None:
        """Wait for the parent, polling meanwhile: peers may need this rank to make progress."""
        while not control.poll(_POLL_S):
            self._poll()
        message: object = control.recv()
        return None if isinstance(message, messages.Stop) else message

    def handle(self, message: object) -> object:
        """Do what the parent asks."""
        return self._handlers[type(message)](message)

    def close(self) -> None:
        """Give everything back."""
        self.connector.shutdown()

    def _poll(self) -> None:
        report = self.connector.get_finished()
        self._loaded.update(report.loaded)
        self._sent |= report.sent

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while not done():
            self._poll()
            if time.monotonic() > deadline_s:
                raise TransportError(f"{what} within {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def _prefill(self, message: messages.Prefill) -> bool:
        self._engine.prefill(message.page_ids, message.tokens)
        return True

    def _step(self, message: messages.Step) -> bool:
        self.connector.start_load_kv(message.metadata)
        return True

    def _await_load(self, message: messages.AwaitLoad) -> messages.Pulled:
        request_id = message.request_id
        self._wait(
            lambda: request_id in self._loaded,
            f"the load of request {request_id!r} did not end",
        )
        loaded = self._loaded.pop(request_id)
        if loaded.error:
            raise TransportError(f"request {request_id!r} failed: {loaded.error}")
        connector, failovers = self.connector, []
        if isinstance(connector, MultiConnector):
            failovers = list(connector.worker_half.failovers)
            connector = connector.children[loaded.via]
        plans = []
        if isinstance(connector, BridgeConnector):
            sessions = connector.worker_half.agent.sessions.values()
            plans = [session.plan.explain() for session in sessions]
        return messages.Pulled(
            loaded.sources, loaded.seconds, loaded.via, failovers, "\n".join(plans)
        )

    def _dump(self, message: messages.Dump) -> messages.Dumped:
        cache = self._engine.cache
        cells = {}
        kept = cache.buffer.copy()
        poison = np.full(
            (message.tokens, len(cache.heads), self._engine.config.head_dim), np.nan, np.float16
        )
        poison.view(np.uint8)[:] = POISON_BYTE
        for layer in cache.layers:
            k, v = cache.gather(layer, message.page_ids, message.tokens)
            for i, head in enumerate(cache.heads):
                cells[layer, head] = (k[:, i], v[:, i])
            cache.write(layer, message.page_ids, 0, poison, poison)
        rest_is_untouched = bool((cache.buffer == POISON_BYTE).all())
        cache.buffer[:] = kept
        return messages.Dumped(cells, rest_is_untouched)

    def _decode(self, message: messages.Decode) -> list[int]:
        return generate(self._engine, message.page_ids, message.prompt, message.tokens)

    def _await_sent(self, message: messages.AwaitSent) -> bool:
        self._wait(
            lambda: message.request_id in self._sent,
            f"not every reader of {message.request_id!r} reported",
        )
        return True
