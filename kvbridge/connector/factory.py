"""From a configuration to a connector."""

import time
from collections.abc import Callable

import msgspec

from kvbridge.connector.base import Connector
from kvbridge.connector.bridge import BridgeConnector
from kvbridge.connector.config import ConnectorConfig, connector_configs
from kvbridge.connector.multi import MultiConnector
from kvbridge.model import TransferTopology


def scheduler_connector(values: object, *, engine_id: str, pp_size: int = 1) -> Connector:
    """Return the scheduler half that a configuration asks for.

    Args:
        values: See :func:`~kvbridge.connector.connector_configs`.
        engine_id: The engine.
        pp_size: Its pipeline stages.

    Raises:
        ConfigError: Something in the configuration cannot be.
        HandshakeError: A handshake port cannot be bound.
    """

    def make(name: str, config: ConnectorConfig) -> Connector:
        return BridgeConnector.scheduler(config, engine_id=engine_id, name=name)

    return _connector(connector_configs(values), make, pp_size)


def worker_connector(
    values: object,
    topology: TransferTopology,
    *,
    model: str,
    revision: str | None = None,
    draft_layers: tuple[int, ...] = (),
    incarnation: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Connector:
    """Return the worker half that a configuration asks for.

    Args:
        values: See :func:`~kvbridge.connector.connector_configs`.
        topology: The rank's place in its engine.
        model: Name of the model, compared with peers.
        revision: Revision of the model, if it is pinned.
        draft_layers: Layers that belong to a draft model, by global index.
        incarnation: Agreed with the engine's other ranks; needed if there are any.
        clock: Seconds that never run backwards.

    Raises:
        ConfigError: Something in the configuration cannot be.
        TransportError: A transport is unknown or cannot run here.
    """

    def make(name: str, config: ConnectorConfig) -> Connector:
        return BridgeConnector.worker(
            config,
            topology.alone(),
            model=model,
            revision=revision,
            draft_layers=draft_layers,
            incarnation=incarnation,
            name=name,
            clock=clock,
        )

    return _connector(connector_configs(values), make, topology.pp_size)


def _connector(
    configs: dict[str, ConnectorConfig],
    make: Callable[[str, ConnectorConfig], Connector],
    pp_size: int,
) -> Connector:
    made: dict[str, Connector] = {}
    try:
        for name, config in configs.items():
            # One that stalls must leave time for those that stand by.
            share_s = config.timeout_s / len(configs)
            meet_s = min(config.handshake.timeout_s, share_s if len(configs) == 1 else share_s / 2)
            handshake = msgspec.structs.replace(config.handshake, timeout_s=meet_s)
            mine = msgspec.structs.replace(config, timeout_s=share_s, handshake=handshake)
            made[name] = make(name, mine)
    except Exception:
        for connector in made.values():
            connector.shutdown()
        raise
    if len(made) == 1:
        return next(iter(made.values()))
    longest_s = max(config.timeout_s for config in configs.values())
    on_failure = next(iter(configs.values())).on_failure  # that of all of them
    return MultiConnector(made, pp_size=pp_size, timeout_s=longest_s, on_failure=on_failure)
