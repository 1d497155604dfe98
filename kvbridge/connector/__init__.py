"""What an engine calls: one connector per transport, or several as one."""

from kvbridge.connector.base import Connector
from kvbridge.connector.bridge import BridgeConnector
from kvbridge.connector.config import ConnectorConfig, HandshakeConfig, connector_configs
from kvbridge.connector.factory import scheduler_connector, worker_connector
from kvbridge.connector.gather import ReportGatherer
from kvbridge.connector.multi import MultiConnector
from kvbridge.connector.params import RemoteRequest, remote_request
from kvbridge.connector.stats import Spread, Stats
from kvbridge.connector.values import NO_BLOCK, BlockIds, Loaded, Request, WorkerReport

__all__ = [
    "NO_BLOCK",
    "BlockIds",
    "BridgeConnector",
    "Connector",
    "ConnectorConfig",
    "HandshakeConfig",
    "Loaded",
    "MultiConnector",
    "RemoteRequest",
    "ReportGatherer",
    "Request",
    "Spread",
    "Stats",
    "WorkerReport",
    "connector_configs",
    "remote_request",
    "scheduler_connector",
    "worker_connector",
]
