"""KVBridge as a KV connector of vLLM; named in its configuration, loaded by it.

``--kv-transfer-config '{"kv_connector": "KVBridgeConnector", "kv_connector_module_path":
"kvbridge.integrations.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"transport":
"nixl"}}'``
"""

from kvbridge.integrations.vllm.connector import KVBridgeConnector, KVBridgeMultiConnector

__all__ = ["KVBridgeConnector", "KVBridgeMultiConnector"]
