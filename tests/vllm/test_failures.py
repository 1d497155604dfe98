"""What goes wrong between engines: requests still end, rightly, and no block is lost."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbridge.connector.series import TRANSFER_BYTES
from tests.vllm.conftest import Pair, Start
from tests.vllm.engines import WANTED, Engine, disaggregated, prompt_of, transfer_config
from tests.vllm.models import make_adapter
from tests.vllm.test_tokens import answers_alone, external_tokens

pytestmark = pytest.mark.full

LOCAL = {"transport": "local"}
QUICK = {**LOCAL, "timeout_s": 6.0, "lease_s": 8.0, "handshake": {"timeout_s": 2.0}}
N = 300


@contextmanager
def stopped(engine: Engine) -> Iterator[None]:
    """Stop an engine's process for a while, as a machine that hangs."""
    engine.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.process.send_signal(signal.SIGCONT)


def all_blocks_come_back(engine: Engine, free: int) -> None:
    """Wait until an engine knows no request any more and has all of its blocks."""
    end_s = time.monotonic() + 30
    while engine.call("idle", seconds=0.2):
        assert time.monotonic() < end_s, engine.call("known")
    assert engine.call("free_blocks") == free


def bytes_loaded(engine: Engine) -> float:
    """Return how many bytes have come to an engine."""
    return float(engine.call("counted", name=f"{TRANSFER_BYTES.name}_sum", labels={}))


def test_a_request_is_aborted_while_it_is_loaded(pair: Pair) -> None:
    prefill, decode = pair(QUICK)
    free = [engine.call("free_blocks") for engine in (prefill, decode)]
    params = prefill.generate(prompt_of(N), 1, WANTED)["params"]
    with stopped(prefill):
        decode.call("add", name="a", prompt=prompt_of(N), max_tokens=8, params=params)
        decode.call("idle", seconds=0.5)
        assert list(decode.call("known").values()) == ["WAITING_FOR_REMOTE_KVS"]
        decode.call("abort", name="a")
        decode.call("idle", seconds=0.5)
    for engine, blocks in zip((prefill, decode), free, strict=True):
        all_blocks_come_back(engine, blocks)


def test_a_request_is_aborted_before_it_is_scheduled(pair: Pair) -> None:
    prefill, decode = pair({**LOCAL, "lease_s": 60.0})
    free = prefill.call("free_blocks")
    params = prefill.generate(prompt_of(N), 1, WANTED)["params"]
    decode.call("add_and_abort", name="a", prompt=prompt_of(N), params=params)
    all_blocks_come_back(prefill, free)  # long before the lease would end: it has been told


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_prefill_engine_is_killed(pair: Pair, policy: str) -> None:
    prefill, decode = pair(QUICK, kv_load_failure_policy=policy)
    alone = answers_alone(decode, [N, N + 1])
    disaggregated(prefill, decode, prompt_of(N + 1))  # both have met
    params = prefill.generate(prompt_of(N), 1, WANTED)["params"]
    free = decode.call("free_blocks")
    prefill.kill()
    began_s = time.monotonic()
    answer = decode.generate(prompt_of(N), 8, params)
    assert time.monotonic() - began_s < 20
    if policy == "recompute":
        assert (answer["tokens"], answer["reason"]) == (alone[N], "length")
    else:
        assert answer["reason"] == "error"
        assert "could not be loaded over local" in decode.tail()
    all_blocks_come_back(decode, free)


@pytest.mark.parametrize("have_met", [True, False])
def test_the_prefill_engine_comes_back_behind_the_same_port(
    start: Start, free_port: int, have_met: bool
) -> None:
    extra = {**QUICK, "handshake": {"timeout_s": 2.0, "port": free_port}}
    # One name for both, as where it is configured: only that it began anew tells them apart.
    same = transfer_config("kv_producer", extra, engine_id="prefill")
    first = start(transfer=same)
    decode = start(
        transfer=transfer_config("kv_consumer", QUICK, kv_load_failure_policy="recompute")
    ).ready()
    alone = answers_alone(decode, [N, N + 1, N + 2])
    first.ready()
    if have_met:
        _, answer = disaggregated(first, decode, prompt_of(N))
        assert answer["tokens"] == alone[N]
    old = first.generate(prompt_of(N + 1), 1, WANTED)["params"]
    first.kill()
    second = start(transfer=same).ready()
    second.generate(prompt_of(N + 3), 1, WANTED)  # other bytes where the old ones were
    before = external_tokens(decode)
    answer = decode.generate(prompt_of(N + 1), 8, old)
    assert answer["tokens"] == alone[N + 1], "what the old engine promised was read from the new"
    if not have_met:
        assert "has restarted" in decode.tail()
    _, answer = disaggregated(second, decode, prompt_of(N + 2))
    assert answer["tokens"] == alone[N + 2]
    assert external_tokens(decode) - before >= N + 1


def test_sixteen_requests_at_once(pair: Pair) -> None:
    prefill, decode = pair({"transport": "nixl"})
    lengths = [50 + 61 * i for i in range(16)]
    alone = answers_alone(decode, lengths)
    names = [f"r{n}" for n in lengths]
    for name, n in zip(names, lengths, strict=True):
        prefill.call("add", name=name, prompt=prompt_of(n), max_tokens=1, params=WANTED)
    firsts = prefill.wait(names)
    for name, n in zip(names, lengths, strict=True):
        decode.call("add", name=name, prompt=prompt_of(n), max_tokens=8,
                    params=firsts[name]["params"])  # fmt: skip
    seconds = decode.wait(names)
    assert {n: seconds[f"r{n}"]["tokens"] for n in lengths} == alone
    assert prefill.call("idle", seconds=0.5) == 0


@pytest.mark.parametrize("way", ["at once", "mixed up", "too long for it"])
def test_an_offer_is_loaded_by_the_request_that_it_is_for(pair: Pair, way: str) -> None:
    """A list of prompts in one HTTP request has one kv_transfer_params for all of them."""
    prefill, decode = pair(LOCAL)
    lengths = {"at once": (300, 301), "mixed up": (300, 300), "too long for it": (300, 100)}[way]
    ours, others = (prompt_of(n, seed=i) for i, n in enumerate(lengths))
    alone = [decode.generate(each)["tokens"] for each in (ours, others)]
    decode.call("reset")
    params = prefill.generate(ours, 1, WANTED)["params"]
    before = external_tokens(decode)
    asked = {"a": ours, "b": others} if way == "at once" else {"b": others}
    for name, prompt in asked.items():
        decode.call("add", name=name, prompt=prompt, max_tokens=8, params=params)
    answers = decode.wait(list(asked))
    assert answers["b"]["tokens"] == alone[1]
    assert decode.generate(others)["tokens"] == alone[1], "what was cached of it"
    if way == "at once":
        assert answers["a"]["tokens"] == alone[0]
    assert external_tokens(decode) - before == (299 if way == "at once" else 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the second one first"])
def test_prompts_under_one_transfer_id_get_nothing_of_each_other(
    pair: Pair, order: tuple[int, int]
) -> None:
    """Decode waits for the first of them; prefill keeps what it has computed first."""
    prefill, decode = pair(LOCAL, kv_load_failure_policy="recompute")
    prompts = [prompt_of(300, seed=i) for i in range(2)]
    alone = [decode.generate(each)["tokens"] for each in prompts]
    decode.call("reset")
    offer = prefill.generate(prompt_of(20), 1, WANTED)["params"]
    where = {key: offer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    params = {"do_remote_prefill": True, "transfer_id": "x", **where}
    before = bytes_loaded(decode)
    for name, prompt in zip("ab", prompts, strict=True):
        decode.call("add", name=name, prompt=prompt, max_tokens=8, params=params)
    for n in order:
        prefill.generate(prompts[n], 1, {**WANTED, "transfer_id": "x"})
    answers = decode.wait(["a", "b"])
    assert [answers[name]["tokens"] for name in "ab"] == alone
    assert [decode.generate(each)["tokens"] for each in prompts] == alone, "what was cached of them"
    assert (bytes_loaded(decode) > before) == (order[0] == 0)


@pytest.mark.parametrize("mixed_up", [False, True])
def test_what_was_computed_with_another_adapter_is_not_loaded(
    pair: Pair, tmp_path: Path, mixed_up: bool
) -> None:
    prefill, decode = pair(LOCAL, enable_lora=True, max_lora_rank=8, max_loras=2)
    ours, others = (make_adapter(seed, tmp_path) for seed in (1, 2))
    alone = {each: decode.generate(prompt_of(N), adapter=each)["tokens"] for each in (ours, others)}
    assert alone[ours] != alone[others] != decode.generate(prompt_of(N))["tokens"]
    decode.call("reset")
    params = prefill.generate(prompt_of(N), 1, WANTED, adapter=ours)["params"]
    before, asked = external_tokens(decode), others if mixed_up else ours
    assert decode.generate(prompt_of(N), 8, params, adapter=asked)["tokens"] == alone[asked]
    assert decode.generate(prompt_of(N), adapter=asked)["tokens"] == alone[asked], "what is cached"
    assert external_tokens(decode) - before == (0 if mixed_up else N - 1)


def test_what_decode_has_cached_does_not_move(pair: Pair) -> None:
    prefill, decode = pair(LOCAL)
    prompt = prompt_of(2 * 128 + 40)
    alone = decode.generate(prompt)["tokens"]
    decode.call("reset")
    disaggregated(prefill, decode, prompt[: 128 + 20])  # its first block stays cached here
    before, two_blocks = external_tokens(decode), bytes_loaded(decode)
    _, answer = disaggregated(prefill, decode, prompt)
    assert answer["tokens"] == alone
    assert external_tokens(decode) - before == len(prompt) - 1 - 128
    assert bytes_loaded(decode) - two_blocks == pytest.approx(two_blocks)  # of its three


def test_prompts_that_prefill_computes_in_chunks(pair: Pair) -> None:
    prefill, decode = pair(LOCAL, prefill={"max_num_batched_tokens": 128, "max_num_seqs": 4})
    alone = answers_alone(decode, [1000])
    _, answer = disaggregated(prefill, decode, prompt_of(1000))
    assert answer["tokens"] == alone[1000]


def test_a_request_loses_its_blocks_while_it_is_answered(pair: Pair) -> None:
    """What was loaded is computed again, here, after vLLM has taken its blocks away."""
    prefill, decode = pair(LOCAL, decode={"num_gpu_blocks_override": 8, "max_model_len": 896})
    lengths, names = [250, 251, 252], ["r250", "r251", "r252"]
    alone = {n: decode.generate(prompt_of(n), 140)["tokens"] for n in lengths}
    decode.call("reset")
    offers = [prefill.generate(prompt_of(n), 1, WANTED)["params"] for n in lengths]
    for name, n, params in zip(names, lengths, offers, strict=True):  # all three at once
        decode.call("add", name=name, prompt=prompt_of(n), max_tokens=140, params=params)
    ended = decode.wait(names)
    assert {n: ended[f"r{n}"]["tokens"] for n in lengths} == alone
    assert decode.call("metrics")["vllm:num_preemptions"] > 0


def test_several_transports_side_by_side(pair: Pair) -> None:
    """The first one fails at every read; the second one takes its place."""
    extra: dict[str, Any] = {
        "connectors": [
            {"name": "first", "transport": "faulty",
             "options": {"inner": {"transport": "local"},
                         "operations": [{"what": "fail", "share": 1.0}]}},
            {"name": "second", "transport": "nixl"},
        ],
    }  # fmt: skip
    prefill, decode = pair(extra, connector="KVBridgeMultiConnector")
    alone = answers_alone(decode, [N])
    _, answer = disaggregated(prefill, decode, prompt_of(N))
    assert (answer["tokens"], answer["reason"]) == (alone[N], "length")


def test_beside_others_in_vllms_own_multi_connector(start: Start) -> None:
    def several(role: str) -> dict[str, Any]:
        ours = transfer_config(role, LOCAL)
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"connectors": [ours]},
        }

    prefill = start(transfer=several("kv_producer"))
    decode = start(transfer=several("kv_consumer"))
    prefill.ready()
    alone = answers_alone(decode.ready(), [N])
    before = external_tokens(decode)
    _, answer = disaggregated(prefill, decode, prompt_of(N))
    assert answer["tokens"] == alone[N]
    assert external_tokens(decode) - before == N - 1


def test_requests_that_nobody_hands_on_are_let_go_of(pair: Pair) -> None:
    prefill, _ = pair({**LOCAL, "lease_s": 2.0})
    free = prefill.call("free_blocks")
    prefill.generate(prompt_of(N), 1, WANTED)
    assert prefill.call("free_blocks") < free
    all_blocks_come_back(prefill, free)
