"""KVBridge as a KV connector of vLLM; named in its configuration, loaded by it.

``--kv-transfer-config '{"kv_connector": "KVBridgeConnector", "kv_connector_module_path":
"kvbridge.integrations.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"transport":
"nixl"}}'``
"""

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvbridge.integrations.vllm.connector import KVBridgeConnector, KVBridgeMultiConnector

__all__ = ["KVBridgeConnector", "KVBridgeMultiConnector"]

for _name in __all__:
    # vLLM's MultiConnector looks up by name who has counted what.
    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(_name, __name__, _name)
