"""vLLM with KVBridge against vLLM with its own NixlConnector, over the same transport.

Two pairs of engines, one of each kind, get the same prompts in turns. What is compared is, on the
engine that answers, the time until its first token, and of that the time until the request can be
scheduled: asking, meeting, moving. Prompts differ from round to round, so nothing is cached. While
one pair is measured the other one stands still.

    .venv-vllm/bin/pip install --no-deps nixl    # what vLLM's connector imports
    .venv-vllm/bin/python -m benchmarks.vllm_connectors --rounds 30
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "vllm_disagg"))

from tests.vllm.engines import Engine, disaggregated, prompt_of, transfer_config
from tests.vllm.models import make_model

SIZES = (512, 2048, 8192)
WHAT = ("first_token_s", "queued_s")
RESAMPLES = 2000


def main() -> None:
    """Measure, and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # One that is told to end ends its engines, too, of which half stand still.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as directory:
        model = make_model("llama", Path(directory))
        pairs = {"nixl": nixl_pair(model), "kvbridge": our_pair(model)}
        try:
            for pair in pairs.values():
                for engine in pair:
                    engine.ready()
                    engine.call("use_all_cores")
            measured = measure(pairs, options.sizes, options.rounds)
        finally:
            for pair in pairs.values():
                for engine in pair:
                    engine.close()
    rows = [row(measured, size, what) for size in options.sizes for what in WHAT]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'tokens':>7} {'what':>14} {'NixlConnector':>14} {'KVBridge':>10}  ratio (95 %)")
    for each in rows:
        low, high = each["interval"]
        print(
            f"{each['tokens']:7} {each['what']:>14} {1e3 * each['nixl']:11.2f} ms "
            f"{1e3 * each['kvbridge']:7.2f} ms  {each['ratio']:.3f} ({low:.3f} to {high:.3f})"
        )


def nixl_pair(model: Path) -> tuple[Engine, Engine]:
    """Start two engines with vLLM's own connector."""
    ports = [_free_port(), _free_port()]
    first, second = (
        Engine(
            model,
            transfer={"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            environment={
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                "UCX_MODULES": "^efa",
            },
            max_model_len=16384,
            max_num_batched_tokens=16384,
        )
        for role, port in zip(("kv_producer", "kv_consumer"), ports, strict=True)
    )
    return first, second


def our_pair(model: Path) -> tuple[Engine, Engine]:
    """Start two engines with ours."""
    first, second = (
        Engine(
            model,
            transfer=transfer_config(role, {"transport": "nixl"}),
            max_model_len=16384,
            max_num_batched_tokens=16384,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return first, second


def measure(
    pairs: dict[str, tuple[Engine, Engine]], sizes: list[int], rounds: int
) -> list[dict[str, Any]]:
    """Return what each pair took for each prompt; who is first changes."""
    for pair in pairs.values():
        for size in sizes:
            disaggregated(*pair, prompt_of(size, seed=-1), 1)
    measured = []
    for at in range(rounds):
        for size in sizes:
            names = sorted(pairs, reverse=bool(at % 2))
            took: dict[str, Any] = {"tokens": size}
            for name in names:
                with alone(name, pairs):
                    _, answer = disaggregated(*pairs[name], prompt_of(size, seed=at), 1)
                took[name] = {what: answer[what] for what in WHAT}
            measured.append(took)
    return measured


@contextlib.contextmanager
def alone(name: str, pairs: dict[str, tuple[Engine, Engine]]) -> Iterator[None]:
    """Have all other engines stand still: their threads would take processors away."""
    others = [each for other, pair in pairs.items() if other != name for each in pair]
    for engine in others:
        os.killpg(engine.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in others:
            os.killpg(engine.process.pid, signal.SIGCONT)


def row(measured: list[dict[str, Any]], size: int, what: str) -> dict[str, Any]:
    """Return medians, and the median of the ratios of pairs with its interval."""
    taken = [each for each in measured if each["tokens"] == size]
    values = {name: [each[name][what] for each in taken] for name in ("nixl", "kvbridge")}
    ratios = [
        ours / theirs for ours, theirs in zip(values["kvbridge"], values["nixl"], strict=True)
    ]
    draw = random.Random(0)
    resampled = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return {
        "tokens": size,
        "what": what,
        **{name: statistics.median(each) for name, each in values.items()},
        "ratio": statistics.median(ratios),
        "interval": [resampled[RESAMPLES // 40], resampled[-RESAMPLES // 40]],
    }


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


if __name__ == "__main__":
    main()
