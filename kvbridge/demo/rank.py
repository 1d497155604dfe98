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

from kvbridge.demo import messages
from kvbridge.demo.cache import POISON_BYTE
from kvbridge.demo.collective import Group
from kvbridge.demo.engine import RankEngine, generate
from kvbridge.demo.messages import Failed, RankSpec
from kvbridge.errors import KVBridgeError, TransportError
from kvbridge.handshake import fetch_metadata
from kvbridge.model import (
    CacheGroup,
    RankCache,
    TransferTopology,
    attention_layer,
    memory_region,
)
from kvbridge.plan import BlockTable
from kvbridge.session import RankAgent
from kvbridge.transport import State, open_transport

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.0002


def run_rank(spec: RankSpec, group: Group, control: Connection) -> None:
    """Serve the parent's messages until it says stop, or is gone; the body of a rank process."""
    _die_with_parent()
    try:
        process = _RankProcess(spec, group)
        control.send(process.agent.metadata())
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
        self.agent = RankAgent(
            topology,
            rank_cache(spec.engine_id, self._engine),
            open_transport({"transport": spec.transport, "options": spec.options}),
            model=str(spec.model),
            incarnation=spec.incarnation,
        )
        self._handlers: dict[type, Callable[[Any], object]] = {
            messages.Prefill: self._prefill,
            messages.Connect: self._connect,
            messages.Pull: self._pull,
            messages.Dump: self._dump,
            messages.Decode: self._decode,
            messages.AwaitRelease: self._await_release,
        }

    def next_message(self, control: Connection) -> object | None:
        """Wait for the parent, polling meanwhile: peers may need this rank to make progress."""
        while not control.poll(_POLL_S):
            self.agent.poll()
        message: object = control.recv()
        return None if isinstance(message, messages.Stop) else message

    def handle(self, message: object) -> object:
        """Do what the parent asks."""
        return self._handlers[type(message)](message)

    def close(self) -> None:
        """Give everything back."""
        self.agent.close()

    def _prefill(self, message: messages.Prefill) -> bool:
        self._engine.prefill(message.page_ids, message.tokens)
        return self.agent.releases.hold(message.request_id)

    def _connect(self, message: messages.Connect) -> str:
        self.agent.share_engine(message.local_engine)
        reply = fetch_metadata(
            message.host, message.port, timeout_s=self._timeout_s, engine_id=message.engine_id
        )
        session = self.agent.connect(reply.by_rank, timeout_s=self._timeout_s)
        return session.plan.explain()

    def _pull(self, message: messages.Pull) -> messages.Pulled:
        transfer = self.agent.pull(
            message.engine_id,
            message.request_id,
            [BlockTable(message.page_ids)],
            [BlockTable(message.remote_page_ids)],
            end_token=message.tokens,
            timeout_s=self._timeout_s,
        )
        while transfer.state is State.PENDING:
            self.agent.poll()
            time.sleep(_POLL_S)
        if transfer.state is not State.DONE:
            raise TransportError(f"request {message.request_id!r} failed: {transfer.reason}")
        return messages.Pulled(transfer.sources, transfer.seconds)

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

    def _await_release(self, message: messages.AwaitRelease) -> bool:
        deadline_s = time.monotonic() + self._timeout_s
        while message.request_id in self.agent.releases.held:
            self.agent.poll()
            if time.monotonic() > deadline_s:
                raise TransportError(
                    f"not every reader of {message.request_id!r} reported within "
                    f"{self._timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        return True
