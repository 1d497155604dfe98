"""One engine of vLLM in a process of its own, told what to do over a socket.

The engine runs in the process itself, with no others beside it, and is stepped here: two of them
fit on two cores.

Usage: engine_process.py PORT KEY OPTIONS, options being JSON for ``vllm.LLM``.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

_DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 128 << 20,
    "enforce_eager": True,
    "max_num_seqs": 16,
    "dtype": "float32",
    "seed": 0,
    "disable_log_stats": False,
}


class Engine:
    """What can be asked of the engine: one method each."""

    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("kv_transfer_config"):
            options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
        self._llm = LLM(**{**_DEFAULTS, **options})
        self._engine = self._llm.llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._ended: dict[str, dict[str, Any]] = {}
        self._adapters: dict[str, int] = {}

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None,
        adapter: str | None = None,
    ) -> None:
        """Take a request; ``adapter`` is where one is that its prompt is computed with."""
        number = self._adapters.setdefault(adapter, len(self._adapters) + 1) if adapter else 0
        self._engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
            lora_request=LoRARequest(Path(adapter).name, number, adapter) if adapter else None,
        )

    def abort(self, name: str) -> None:
        """Give up a request."""
        self._engine.abort_request([name])

    def add_and_abort(self, name: str, prompt: list[int], params: dict[str, Any]) -> None:
        """Take a request and give it up, before any step."""
        self.add(name, prompt, 8, params)
        self.abort(name)

    def use_all_cores(self) -> None:
        """Undo what vLLM's connector for NIXL does on a CPU: it leaves the engine one core."""
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

    def step(self) -> None:
        """Go on with whatever there is to do, if anything: also where no request waits for it."""
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    self._ended[output.request_id] = _described(output)
        elif self._core.scheduler.has_requests():
            self._core.step_fn()

    def wait(self, names: list[str], timeout_s: float) -> dict[str, dict[str, Any]]:
        """Step until requests have ended; return what became of them."""
        end_s = time.monotonic() + timeout_s
        while not self._ended.keys() >= set(names):
            if time.monotonic() > end_s:
                missing = sorted(set(names) - self._ended.keys())
                raise TimeoutError(f"{missing} have not ended within {timeout_s} s")
            self.step()
        return {name: self._ended.pop(name) for name in names}

    def idle(self, seconds: float) -> int:
        """Step for a time; return how many requests the scheduler still knows."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.step()
        return len(self._core.scheduler.requests)

    def known(self) -> dict[str, str]:
        """Return the requests that the scheduler knows, and how far they are."""
        return {name: each.status.name for name, each in self._core.scheduler.requests.items()}

    def free_blocks(self) -> int:
        """Return how many blocks of the cache are free."""
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def blocks_of(self, name: str) -> list[list[int]]:
        """Return the blocks of a request that has not been forgotten."""
        [known] = [each for each in self._core.scheduler.requests if each.startswith(name)]
        return [list(ids) for ids in self._core.scheduler.kv_cache_manager.get_block_ids(known)]

    def metrics(self) -> dict[str, float]:
        """Return vLLM's counters and gauges, and how often its histograms were added to."""
        values: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", getattr(metric, "count", None))
            if value is not None:
                values[metric.name] = values.get(metric.name, 0) + value
        return values

    def counted(self, name: str, labels: dict[str, str]) -> float:
        """Return what Prometheus sees of a series of ours, in all rows with these labels."""
        samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
        return sum(
            each.value
            for each in samples
            if each.name == name and labels.items() <= each.labels.items()
        )

    def reset(self) -> None:
        """Forget what is cached of earlier prompts."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset; requests are still running")

    def tokens_of(self, block_ids: list[int], tokens: int) -> dict[str, str]:
        """Return a digest of what blocks hold of the first tokens, by layer.

        For caches without heads, whose blocks have a row for each token.
        """
        layers = self._core.vllm_config.compilation_config.static_forward_context
        digests = {}
        for name, layer in layers.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel():
                rows = cache.reshape(cache.shape[0], -1, cache.shape[-1])[block_ids].flatten(0, 1)
                held = rows[:tokens].contiguous().view(torch.uint8).numpy()
                digests[name] = hashlib.sha256(held.tobytes()).hexdigest()
        return digests


def _described(output: Any) -> dict[str, Any]:
    [completion] = output.outputs
    return {
        "tokens": list(completion.token_ids),
        "reason": completion.finish_reason,
        "params": output.kv_transfer_params,
        "cached": output.num_cached_tokens,
        "queued_s": output.metrics.scheduled_ts - output.metrics.queued_ts,
        "first_token_s": output.metrics.first_token_latency,
    }


def _serve(engine: Engine, connection: Connection) -> None:
    while True:
        while not connection.poll(0.001):
            engine.step()
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(engine, name)(**arguments)))
        except Exception:
            connection.send((False, traceback.format_exc()))


def main() -> None:
    port, key, options = sys.argv[1:]
    address = ("127.0.0.1", int(port))
    try:
        engine = Engine(json.loads(options))
    except Exception:
        with Client(address, authkey=key.encode()) as connection:
            connection.send((False, traceback.format_exc()))
        raise
    with Client(address, authkey=key.encode()) as connection:
        connection.send((True, None))
        _serve(engine, connection)


if __name__ == "__main__":
    main()
