"""Engines of vLLM in processes of their own, and what a router does with them."""

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiny_model import VOCABULARY

START_TIMEOUT_S = 240.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    # Threads that spin while they wait would leave nothing to the other engine.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ranks that share the vocabulary compile a function with a C++ compiler in their first step:
    # half a minute in which nothing that is loaded is asked for either.
    "TORCH_COMPILE_DISABLE": "1",
    "UCX_NET_DEVICES": "lo",
}
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router tells the engine that computes a prompt for another one."""


class EngineError(Exception):
    """What an engine was asked to do has raised there, or did not end."""


class Engine:
    """One engine; it starts when this is made, and is there after :meth:`ready`."""

    def __init__(
        self,
        model: Path,
        *,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        **options: Any,
    ) -> None:
        """Start a process.

        Args:
            model: Where the model is.
            transfer: vLLM's ``kv_transfer_config``.
            environment: Variables to set beside the usual ones.
            log: Where its output goes.
            options: Further ones of ``vllm.LLM``.
        """
        key = secrets.token_hex(16)
        self.log = log or Path(tempfile.mkstemp(suffix=".log")[1])
        self._listener = Listener(("127.0.0.1", 0), authkey=key.encode())
        told = {"model": str(model), "kv_transfer_config": transfer, **_one_process(options)}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_process",
                 str(self._listener.address[1]), key, json.dumps(told)],
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._connection: Any = None

    def ready(self) -> Self:
        """Wait until it has started.

        Raises:
            EngineError: It has not.
        """
        if self._connection is None:
            self._listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                raise EngineError(f"no engine within {START_TIMEOUT_S} s; see {self.log}") from None
            self._answer(START_TIMEOUT_S)
        return self

    def call(self, name: str, /, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Return what a method of ``engine_process.Engine`` returns there."""
        self.send(name, **arguments)
        return self._answer(timeout_s)

    def send(self, name: str, /, **arguments: Any) -> None:
        """Call a method whose answer is read by :meth:`answer`."""
        self.ready()._connection.send((name, arguments))

    def answer(self, timeout_s: float = 60.0) -> Any:
        """Return what the method returned that was sent."""
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise EngineError(f"no answer within {timeout_s} s; see {self.log}")
            is_ok, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineError(f"the engine has ended; see {self.log}:\n{self.tail()}") from None
        if not is_ok:
            raise EngineError(f"{answer}\nsee {self.log}")
        return answer

    def generate(
        self, prompt: list[int], max_tokens: int = 8, params: dict[str, Any] | None = None,
        *, timeout_s: float = 60.0, adapter: Path | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return what the engine says to a prompt."""
        name, path = secrets.token_hex(4), None if adapter is None else str(adapter)
        self.call(
            "add", name=name, prompt=prompt, max_tokens=max_tokens, params=params, adapter=path
        )
        ended = self.wait([name], timeout_s)
        return dict(ended[name])

    def wait(self, names: list[str], timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
        """Return what became of requests, once they have ended."""
        self.send("wait", names=names, timeout_s=timeout_s)
        ended: dict[str, dict[str, Any]] = self._answer(timeout_s + 30)
        return ended

    def tail(self) -> str:
        """Return the end of its output."""
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Kill it, with everything that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it."""
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        self.kill()
        self._listener.close()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()


def _one_process(options: dict[str, Any]) -> dict[str, Any]:
    many = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) > 1
    return {"distributed_executor_backend": "mp" if many else "uni", **options}


def transfer_config(
    role: str, extra: dict[str, Any], *, connector: str = "KVBridgeConnector", **others: Any
) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config`` for a connector of ours."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "kvbridge.integrations.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
        **others,
    }


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """Return a prompt of so many tokens, the same each time."""
    draw = random.Random(f"{tokens} {seed}")
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]


def disaggregated(
    prefill: Engine, decode: Engine, prompt: list[int], max_tokens: int = 8
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let one engine compute a prompt and another one answer it, as a router does.

    Returns:
        What each of them has returned.
    """
    first = prefill.generate(prompt, 1, WANTED)
    return first, decode.generate(prompt, max_tokens, first["params"])
