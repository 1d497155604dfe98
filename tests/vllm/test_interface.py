"""Our class against vLLM's base class: of the vLLM that is installed, and of those read."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.platforms import current_platform

import kvbridge.integrations.vllm
from kvbridge.errors import ConfigError, UnknownTransportError
from kvbridge.integrations.vllm import KVBridgeConnector
from tests.tools.vllm_interface import interface_of

READ = sorted((Path(__file__).parent / "interfaces").glob("*.json"))

LEFT_TO_VLLM = {
    "bind_connector_metadata": "keeps what the step brings",
    "bind_gpu_block_pool": "block tables come with the hooks",
    "bind_kv_cache_manager": "keeps the manager, which we ask for block tables",
    "clear_connector_metadata": "forgets what the step brought",
    "finish_forward": "nothing is read of the cache in the forward pass",
    "get_block_ids_with_load_errors": "requests are reported, also right for several groups",
    "get_external_cache_hit_sources": "all of it is from a peer, as _cache_hit_source says",
    "get_finished": "get_transfer_results says it, with what failed",
    "get_finished_count": "every worker reports",
    "get_kv_connector_kv_cache_events": "no block is made that others could look up",
    "get_mem_pool_context": "vLLM's own memory is registered",
    "handle_preemptions": "the scheduler half is told, with the step",
    "has_connector_metadata": "as vLLM has it",
    "has_pending_block_frees": "blocks are kept for readers, whoever else wants them",
    "register_finished_partial_tail": "nothing is kept that is addressed by hashes",
    "requires_kv_delivery": "whoever produces has to deliver",
    "reset_cache": "there is none",
    "reset_capture_state": "nothing is captured",
    "role": "as vLLM has it",
    "set_host_xfer_buffer_ops": "transports read device memory, or refuse it when configured",
    "set_xfer_handshake_metadata": "the one that knows pipeline stages is called",
    "supports_divergent_local_hybrid_hits": "it does not: of a window that begins before what "
    "attention has cached here, only what comes behind that would be loaded",
    "supports_sleep_mode": "the default is that it does, and it does",
    "take_events": "no block is made that others could look up",
}
"""Hooks that are vLLM's own here, and why."""


def test_every_hook_of_the_vllm_that_runs_here_is_known() -> None:
    check(interface_of(Path(inspect.getfile(KVConnectorBase_V1)).read_text()))


@pytest.mark.parametrize("read", READ, ids=lambda path: path.stem)
def test_every_hook_of_a_vllm_that_was_read_is_known(read: Path) -> None:
    check(json.loads(read.read_text()))


def check(theirs: dict[str, list[str]]) -> None:
    """Check that we have each hook, with its arguments, or know why not."""
    ours = vars(KVBridgeConnector)
    unknown = [name for name in theirs if name not in ours and name not in LEFT_TO_VLLM]
    assert not unknown, f"vLLM has hooks that nobody has decided on: {unknown}"
    for name, arguments in theirs.items():
        if name in ours:
            hook = getattr(KVBridgeConnector, name)
            assert [*inspect.signature(hook).parameters][-len(arguments) :] == arguments or not (
                arguments
            ), f"{name} is called with {arguments}"


@pytest.mark.parametrize(
    ("connector", "extra", "message"),
    [
        ("KVBridgeConnector", {"transport": "nixel"}, "no transport named 'nixel'"),
        ("KVBridgeConnector", {"transport": "nixl", "options": {"backend": 1}}, "backend"),
        ("KVBridgeConnector", {"engine_id": "e"}, "said by 'engine_id'"),
        ("KVBridgeMultiConnector", {"transport": "nixl"}, "needs the key 'connectors'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_before_a_model_is_loaded(
    connector: str, extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where graphs are captured vLLM asks about them while it makes its own configuration."""
    with pytest.raises((ValueError, UnknownTransportError), match=message):
        configured(connector, extra, monkeypatch)
    # On CPUs it does not ask; the connector is made in the end.
    made = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    with pytest.raises((ConfigError, UnknownTransportError), match=message):
        getattr(kvbridge.integrations.vllm, connector)(made, KVConnectorRole.WORKER, None)


def test_a_sound_configuration_keeps_full_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = []
    ask = KVBridgeConnector.requires_piecewise_for_cudagraph

    def asked(_: object, extra_config: dict[str, Any]) -> bool:
        answers.append(ask(extra_config))
        return answers[-1]

    monkeypatch.setattr(KVBridgeConnector, "requires_piecewise_for_cudagraph", classmethod(asked))
    configured("KVBridgeConnector", {"transport": "nixl", "model": "m"}, monkeypatch)
    assert answers == [False]


def configured(
    connector: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> VllmConfig:
    """Return vLLM's configuration as it makes it where graphs can be captured."""
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)
    transfer = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="kvbridge.integrations.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL)
    return VllmConfig(kv_transfer_config=transfer, compilation_config=graphs)
