"""What vLLM's configuration says, in KVBridge's words."""

from collections.abc import Mapping
from typing import Any

from kvbridge.connector import connector_configs
from kvbridge.errors import ConfigError
from kvbridge.transport import check_choice

_ROLES = {"kv_producer": "producer", "kv_consumer": "consumer", "kv_both": "both"}
_SAID_ELSEWHERE = {
    "role": "kv_role",
    "engine_id": "engine_id",
    "on_failure": "kv_load_failure_policy",
}
"""Keys of ours that vLLM has keys of its own for."""
_MODEL = "model"


def connector_values(vllm_config: Any) -> dict[str, Any]:
    """Return the connectors that ``kv_connector_extra_config`` asks for, for both halves.

    Args:
        vllm_config: A ``VllmConfig``.

    Raises:
        ConfigError: Something there cannot be.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    values = _ours(transfer.kv_connector_extra_config)
    if parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"prefill_context_parallel_size is {parallel.prefill_context_parallel_size}; its ranks "
            "are not known to KVBridge; set it to 1"
        )
    values["role"] = _ROLES[transfer.kv_role]
    values["on_failure"] = transfer.kv_load_failure_policy
    values.setdefault("log_interval_s", 0)  # vLLM logs what we count
    values = _with_ports_of(values, parallel.data_parallel_index)
    connector_configs(values)
    return values


def check_extra_config(extra: Mapping[str, Any]) -> None:
    """Find out what is wrong with ``kv_connector_extra_config`` by itself, wherever vLLM runs.

    Raises:
        ConfigError: A key or a value cannot be.
        TransportError: Nobody offers a transport of that name, or it cannot be imported.
    """
    for config in connector_configs(_ours(extra)).values():
        check_choice({"transport": config.transport, "options": config.options})


def model_name(vllm_config: Any) -> str:
    """Return the name that models are compared by: the key ``model``, or vLLM's own."""
    extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    return str(extra.get(_MODEL, vllm_config.model_config.model))


def names_its_model(vllm_config: Any) -> bool:
    """Whether the key ``model`` is there, as where engines know the model by different paths."""
    return _MODEL in vllm_config.kv_transfer_config.kv_connector_extra_config


def _ours(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what KVBridge's own configuration knows of, without what vLLM says itself."""
    values = {key: value for key, value in extra.items() if key != _MODEL}
    # A policy is one for all connectors of an engine, so no child has one of its own.
    said = {*values, *(_said_by_children(values.get("connectors")) & {"on_failure"})}
    for ours, theirs in _SAID_ELSEWHERE.items():
        if ours in said:
            raise ConfigError(
                f"kv_connector_extra_config has {ours!r}; of vLLM that is said by {theirs!r} in "
                "kv_transfer_config, beside kv_connector"
            )
    return values


def _said_by_children(children: object) -> set[str]:
    """Return the keys of all children together; what is no list of mappings is refused later."""
    listed = children if isinstance(children, list) else []
    return {key for each in listed if isinstance(each, Mapping) for key in each}


def _with_ports_of(values: dict[str, Any], replica: int) -> dict[str, Any]:
    """Return the values with ports of their own for one of several replicas of an engine."""
    values = dict(values)
    handshake = values.get("handshake")
    if isinstance(handshake, Mapping) and isinstance(handshake.get("port"), int):
        port = handshake["port"]
        values["handshake"] = {**handshake, "port": port + replica if port else 0}
    if isinstance(values.get("connectors"), list):
        values["connectors"] = [
            _with_ports_of(dict(each), replica) if isinstance(each, Mapping) else each
            for each in values["connectors"]
        ]
    return values
