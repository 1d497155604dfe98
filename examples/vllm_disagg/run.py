"""Disaggregated vLLM over KVBridge: a prefill server, a decode server and a router between them.

    python examples/vllm_disagg/run.py --transport nixl

On a machine without a GPU it makes a tiny model and runs it on the CPU. On GPUs:

    python examples/vllm_disagg/run.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --transport nixl --prefill-devices 0 --decode-devices 1,2 --decode-tp 2
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proxy

START_TIMEOUT_S = 600.0
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin while they wait would leave nothing to the other server.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Several ranks would compile a function in their first step, which takes half a minute.
    "TORCH_COMPILE_DISABLE": "1",
}


@dataclass
class Server:
    """One server of vLLM."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def main() -> int:
    """Run it."""
    options = arguments()
    logs = Path(tempfile.mkdtemp(prefix="vllm-disagg-"))
    print(f"logs are in {logs}")
    servers: list[Server] = []
    try:
        with terminated_by_exception():
            servers.append(start("prefill", options, logs))
            servers.append(start("decode", options, logs))
            for server in servers:
                wait_until_ready(server)
            port = free_port()
            proxy.serve(port, servers[0].url, servers[1].url)
            show(options, f"http://127.0.0.1:{port}", servers[1])
    except (FailedError, KeyboardInterrupt) as error:
        print(str(error) or "interrupted", file=sys.stderr)
        return 1
    finally:
        for server in servers:
            stop(server)
    return 0


class FailedError(Exception):
    """What went wrong, for the user."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="default: a tiny one, made here, on the CPU")
    parser.add_argument("--transport", default="nixl", help="one, or several by commas")
    parser.add_argument("--options", type=json.loads, default={}, help="the transport's, as JSON")
    parser.add_argument("--direction", default="auto", choices=["auto", "pull", "push"])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=16)
    for name in ("prefill", "decode"):
        parser.add_argument(f"--{name}-tp", type=int, default=1)
        parser.add_argument(f"--{name}-devices", help="CUDA_VISIBLE_DEVICES of this server")
        parser.add_argument(f"--{name}-args", default="", help="more arguments of vllm serve")
    return parser.parse_args()


def transfer_config(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a server of vLLM one half of the pair."""
    names = options.transport.split(",")
    extra: dict[str, Any] = {"direction": options.direction}
    if len(names) == 1:
        extra |= {"transport": names[0], "options": options.options}
    else:
        extra["connectors"] = [{"transport": each} for each in names]
    return {
        "kv_connector": "KVBridgeConnector" if len(names) == 1 else "KVBridgeMultiConnector",
        "kv_connector_module_path": "kvbridge.integrations.vllm",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[name],
        "kv_connector_extra_config": extra,
    }


def start(name: str, options: argparse.Namespace, logs: Path) -> Server:
    """Start a server, and do not wait for it."""
    chosen = vars(options)
    environment, more = dict(os.environ), chosen[f"{name}_args"].split()
    model = options.model
    if model is None:
        from tiny_model import save, tiny_llama

        model = str(save(tiny_llama, Path(tempfile.gettempdir()) / "kvbridge-tiny-llama"))
        environment |= ON_CPU
        more = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", *more]
    if chosen[f"{name}_tp"] == 1:
        more = ["--distributed-executor-backend", "uni", *more]
    if chosen[f"{name}_devices"]:
        environment["CUDA_VISIBLE_DEVICES"] = chosen[f"{name}_devices"]
    port, log = free_port(), logs / f"{name}.log"
    command = [
        # What `vllm serve` runs; that command itself fails where vLLM is installed as vllm-cpu.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--host", "127.0.0.1", "--port", str(port),
        "--tensor-parallel-size", str(chosen[f"{name}_tp"]),
        "--kv-transfer-config", json.dumps(transfer_config(name, options)),
        *more,
    ]  # fmt: skip
    print(f"$ vllm serve {model} ... --kv-transfer-config '{command[-1 - len(more)]}'")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    return Server(name, f"http://127.0.0.1:{port}", process, log)


def wait_until_ready(server: Server) -> None:
    """Wait until a server answers."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if server.process.poll() is not None:
            raise FailedError(
                f"{server.name} has ended; the end of {server.log}:\n{tail(server.log)}"
            )
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        time.sleep(0.5)
    raise FailedError(f"{server.name} was not ready within {START_TIMEOUT_S:g} s; see {server.log}")


def show(options: argparse.Namespace, url: str, decode: Server) -> None:
    """Send requests through the router; print what comes, and what was moved for it."""
    draw = random.Random(0)
    print(f"{'prompt':>8} {'moved':>10} {'first token':>12}  says")
    for _ in range(options.requests):
        prompt = " ".join(f"t{draw.randrange(3, 500)}" for _ in range(options.prompt_tokens))
        before = moved_bytes(decode)
        text, first_token_s = complete(url, options, prompt)
        moved = moved_bytes(decode) - before
        sizes = f"{options.prompt_tokens:8} {moved / 1e6:7.2f} MB {1e3 * first_token_s:9.1f} ms"
        print(f"{sizes}  {text[:60]}")
        if not moved:
            raise FailedError(f"nothing was moved; see {decode.log}")


def complete(url: str, options: argparse.Namespace, prompt: str) -> tuple[str, float]:
    """Return what is answered, and after which time the first of it came."""
    body = {
        "prompt": prompt,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    if options.model:
        body["model"] = options.model
    began_s, first_token_s, said = time.perf_counter(), 0.0, []
    with proxy.post(f"{url}/v1/completions", body) as answer:
        for line in answer:
            content = line.removeprefix(b"data: ").strip()
            if not content or content == b"[DONE]":
                continue
            chunk = json.loads(content)
            if "error" in chunk:
                raise FailedError(f"the servers answer: {chunk['error']}")
            first_token_s = first_token_s or time.perf_counter() - began_s
            said += [choice["text"] for choice in chunk["choices"]]
    return "".join(said).strip(), first_token_s


def moved_bytes(server: Server) -> float:
    """Return how many bytes a server has loaded, as it says on its page of metrics."""
    found = 0.0
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("kvbridge_transfer_bytes_sum"):
                found += float(line.rsplit(" ", 1)[1])
    return found


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-2000:]


def stop(server: Server) -> None:
    """End a server, and everything that it has started."""
    for sent, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(wait_s)


@contextlib.contextmanager
def terminated_by_exception() -> Iterator[None]:
    """Let whoever terminates us find the servers ended as well."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
