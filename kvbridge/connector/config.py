"""How a connector is configured: the same keys everywhere, a list of them for several."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvbridge.config import Config, parse_config
from kvbridge.connector.values import OnFailure
from kvbridge.errors import ConfigError
from kvbridge.handshake import EngineAddress, Networks, SecurityConfig
from kvbridge.session.leases import SLOTS
from kvbridge.session.staging import STAGING_NBYTES

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Positive = Annotated[float, Meta(gt=0, le=86_400)]
LOOPBACK = ("127.0.0.0/8", "::1/128")


class HandshakeConfig(SecurityConfig, frozen=True):
    """Where the control channel listens, whom it believes, and what it may dial.

    Attributes:
        host: Address that the engine listens on; others than loopback need a secret or keys.
        port: Port; 0 takes a free one.
        advertise_host: Host that requests carry, where peers reach the engine by another one.
        allowed_networks: Networks that may be dialled.
        peers: Engines that are known beforehand, as ``host:port`` or ``[ipv6]:port``. They are
            asked at the start, and this engine is not ready while one of them does not fit.
        registry: Where engines are found that requests name without an address, and where this one
            announces itself: ``{"registry": "redis", "options": {...}}``; None for nowhere.
        ttl_s: How long an entry there outlives the engine.
        timeout_s: How long an engine may take to answer, and then each of its ranks.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    advertise_host: str | None = None
    allowed_networks: tuple[str, ...] = LOOPBACK
    peers: tuple[str, ...] = ()
    registry: dict[str, Any] | None = None
    ttl_s: Positive = 15.0
    timeout_s: Positive = 10.0


class ConnectorConfig(Config, frozen=True):
    """One connector over one transport.

    Attributes:
        transport: Name of the transport.
        options: The transport's options.
        name: Name of the connector, the same on both engines; the transport's if not given.
        role: Whether its engine gives, takes or does both.
        engine_id: Id of the engine, if another one than its own.
        handshake: The control channel.
        lease_s: How long blocks are kept for readers that do not report, and do not ask for more
            time while the request still waits in their queue.
        lease_longest_s: How long they are kept in all.
        timeout_s: How long a load may take, meeting the other engine included; less than the other
            engine's lease, since blocks are only kept for so long. Of several connectors, each may
            use its share of the time.
        reads_max: How many loads of one rank may read at once; others wait in order, while their
            time runs. One engine may take all but a quarter of the places.
        direction: Whether this engine reads what it loads (``"pull"``), or asks the other one to
            write it (``"push"``); ``"auto"`` pushes where the transport says that writing is faster
            or safer, and both engines can.
        leases_max: For how many requests at once blocks may be kept; others are not offered.
        payload_check: Whether what has been loaded is compared with what the other engine holds:
            not at all, some chunks of each rank (``"sampled"``), or all of it (``"full"``).
        on_failure: What engines are told to do with a request that could not be loaded: to compute
            it, or to fail it; the same for all connectors of an engine.
        log_interval_s: How often a line of the log says what has happened since, if anything has;
            0 for never.
        staging_nbytes: Host memory of each rank that pages are read into where the two engines keep
            cells in another order, to be put in their places from there; made and registered with
            the first such load. 0: such loads are read cell by cell.
    """

    transport: str = "local"
    options: dict[str, Any] = {}
    name: Name | None = None
    role: Literal["producer", "consumer", "both"] = "both"
    engine_id: Annotated[str, Meta(min_length=1)] | None = None
    handshake: HandshakeConfig = HandshakeConfig()
    lease_s: Positive = 30.0
    lease_longest_s: Positive = 600.0
    timeout_s: Positive = 20.0
    reads_max: Annotated[int, Meta(ge=1, le=SLOTS)] = 64
    direction: Literal["auto", "pull", "push"] = "auto"
    leases_max: Annotated[int, Meta(ge=1, le=SLOTS)] = SLOTS
    payload_check: Literal["off", "sampled", "full"] = "off"
    on_failure: OnFailure = "recompute"
    log_interval_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0
    staging_nbytes: Annotated[int, Meta(ge=0, le=1 << 36)] = STAGING_NBYTES


def connector_configs(values: object) -> dict[str, ConnectorConfig]:
    """Return the connectors that a configuration asks for, by name, in order of load priority.

    Args:
        values: One mapping, or a list of them, or a mapping whose ``connectors`` is such a list;
            what stands beside that key is the children's default.

    Raises:
        ConfigError: An unknown key or a wrong value, no connector, or two of one name.
    """
    configs: dict[str, ConnectorConfig] = {}
    for i, each in enumerate(_children(values)):
        config = parse_config(ConnectorConfig, each, where=f"connectors[{i}]")
        name = config.name or config.transport
        if name in configs:
            raise ConfigError(
                f"two connectors are called {name!r}; give the second one a name of its own, "
                "the same on both engines"
            )
        configs[name] = config
    _check_ports(configs)
    _check_peers(configs)
    _check_on_failure(configs)
    if not configs:
        raise ConfigError(
            "no connector is configured; give at least one, such as {transport: nixl}"
        )
    return configs


def _check_ports(configs: Mapping[str, ConnectorConfig]) -> None:
    """Refuse children that would listen on one port: the default that they share may have one."""
    owners: dict[tuple[str, int], str] = {}
    for name, config in configs.items():
        host, port = config.handshake.host, config.handshake.port
        first = owners.setdefault((host, port), name)
        if port and first != name:
            raise ConfigError(
                f"connectors {first!r} and {name!r} would both listen on {host} port {port}; give "
                "each a handshake.port of its own, or 0 for a free one"
            )


def known_peers(handshake: HandshakeConfig) -> tuple[EngineAddress, ...]:
    """Return the addresses of the engines that are known beforehand.

    Raises:
        ConfigError: One is none, or may not be dialled.
    """
    networks = Networks(handshake.allowed_networks)
    peers: dict[EngineAddress, None] = {}
    for text in handshake.peers:
        address = EngineAddress.parse(text, where="handshake.peers:")
        if not address.port:
            raise ConfigError(
                f"handshake.peers: {text!r} has no port that can be dialled; give the peer a "
                "handshake.port of its own, and name that"
            )
        if not networks.admit(address):
            raise ConfigError(
                f"handshake.peers: {address} is outside of the networks that may be dialled "
                f"({networks}); add its network to handshake.allowed_networks"
            )
        peers[address] = None
    return tuple(peers)


def _check_peers(configs: Mapping[str, ConnectorConfig]) -> None:
    """Refuse children that would ask one port: it belongs to one connector of the peer."""
    owners: dict[EngineAddress, str] = {}
    for name, config in configs.items():
        for address in known_peers(config.handshake):
            first = owners.setdefault(address, name)
            if first != name:
                raise ConfigError(
                    f"connectors {first!r} and {name!r} both have {address} in handshake.peers; "
                    "each connector of a peer has a port of its own, so give each child here "
                    "handshake.peers of its own"
                )


def _check_on_failure(configs: Mapping[str, ConnectorConfig]) -> None:
    """Refuse two words about one thing: a request fails as a whole, whoever was to load it."""
    words = {name: config.on_failure for name, config in configs.items()}
    if len(set(words.values())) > 1:
        listed = ", ".join(f"{name!r} has {word!r}" for name, word in words.items())
        raise ConfigError(
            f"on_failure differs: {listed}; give it once, beside the list of connectors"
        )


def _children(values: object) -> Sequence[Mapping[str, Any] | ConnectorConfig]:
    if isinstance(values, ConnectorConfig):
        return [values]
    if isinstance(values, Mapping) and "connectors" in values:
        shared = {key: value for key, value in values.items() if key != "connectors"}
        listed = values["connectors"]
    else:
        shared, listed = {}, [values] if isinstance(values, Mapping) else values
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise ConfigError(
            f"connectors must be a list of mappings, got {type(listed).__name__}: {listed!r:.80}"
        )
    wrong = [each for each in listed if not isinstance(each, Mapping)]
    if wrong:
        raise ConfigError(f"a connector is a mapping of names to values, got {wrong[0]!r:.80}")
    return [_merged(shared, each) for each in listed]


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a child's keys over the shared ones; of ``handshake``, key by key as well."""
    merged = {**shared, **own}
    theirs, ours = shared.get("handshake"), own.get("handshake")
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        merged["handshake"] = {**theirs, **ours}
    return merged
