"""The code under test, put together with what is simulated."""

from typing import TYPE_CHECKING

from kvbridge.connector import BridgeConnector, Connector, MultiConnector
from kvbridge.connector.config import ConnectorConfig, HandshakeConfig
from kvbridge.connector.scheduler import BridgeScheduler
from kvbridge.connector.worker import BridgeWorker
from kvbridge.handshake import EngineAddress, HandshakeMetadata
from kvbridge.handshake.metadata import decode_body
from kvbridge.handshake.wire import decode
from kvbridge.model import Rank, TransferTopology
from kvbridge.testing.simulation.fabric import Fabric
from kvbridge.testing.simulation.handshake import (
    Network,
    SimulatedDialer,
    SimulatedServer,
    SimulatedThreads,
)
from kvbridge.testing.simulation.scenario import Scenario
from kvbridge.testing.simulation.transport import SimulatedAgent, SimulatedTransport
from kvbridge.testing.simulation.world import World

if TYPE_CHECKING:
    from kvbridge.testing.simulation.ranks import Ranks


ARRANGING_S = 0.05
"""Cells are put in their places after at most so long: others work on that thread, too."""


class Build:
    """Makes connectors. Tests that plant a bug derive from it, and make a wrong one.

    Attributes:
        scheduler_type: The scheduler half of one connector.
        worker_type: The worker half of one.
    """

    scheduler_type: type[BridgeScheduler] = BridgeScheduler
    worker_type: type[BridgeWorker] = BridgeWorker

    def __init__(self, world: World, scenario: Scenario) -> None:
        """Start with an empty wire and an empty network."""
        self.world, self.scenario = world, scenario
        self.fabric = Fabric(world, scenario)
        self.network = Network(world, scenario.faults)
        share_s = scenario.timeout_s / len(scenario.children)
        self._configs = {
            (name, way): ConnectorConfig(
                transport="simulated",
                name=name,
                role="both",
                lease_s=scenario.lease_s,
                lease_longest_s=scenario.lease_longest_s,
                timeout_s=share_s,
                handshake=HandshakeConfig(timeout_s=scenario.meet_s),
                direction=way,
                leases_max=scenario.slots,
                on_failure=scenario.on_failure,
                staging_nbytes=scenario.staging_nbytes,
            )
            for name in scenario.children
            for way in sorted(set(scenario.ways))
        }

    def _of(self, engine: "Ranks") -> dict[str, ConnectorConfig]:
        """Return how an engine's connectors are configured."""
        way = self.scenario.ways[engine.index]
        return {name: self._configs[name, way] for name in self.scenario.children}

    def address_of(self, engine: "Ranks", child: int = 0) -> EngineAddress:
        """Return where the handshake server of an engine's connector listens."""
        return EngineAddress("127.0.0.1", 10_000 + 10 * engine.index + child)

    def scheduler(self, engine: "Ranks") -> Connector:
        """Return an engine's scheduler half."""
        halves: dict[str, Connector] = {}
        for i, (name, config) in enumerate(self._of(engine).items()):
            server = SimulatedServer(self.network, self.address_of(engine, i))
            half = self.scheduler_type(
                config,
                name,
                engine.name,
                server,
                dialer=SimulatedDialer(self.network),
                clock=self.world.clock,
            )
            halves[name] = BridgeConnector(name, scheduler_half=half)
        return self._one_of(halves, engine)

    def worker(self, engine: "Ranks", rank: Rank) -> tuple[Connector, dict[str, SimulatedAgent]]:
        """Return the worker half of a rank, and its ends of the transports."""
        halves: dict[str, Connector] = {}
        agents: dict[str, SimulatedAgent] = {}
        shape = engine.shape
        for name, config in self._of(engine).items():
            transport = SimulatedTransport(self.fabric, (engine.name, engine.incarnation), rank)
            transport.open()
            topology = TransferTopology(
                tp_rank=rank[1],
                tp_size=shape.tp,
                pp_rank=rank[0],
                pp_size=shape.pp,
                block_size=shape.block_tokens,
                engine_id=engine.name,
                is_mla=False,
                is_mamba=False,
                total_num_kv_heads=self.scenario.heads,
            )
            half = self.worker_type(
                config,
                name,
                topology,
                transport,
                SimulatedDialer(self.network),
                model="m",
                incarnation=engine.incarnation,
                clock=self.world.clock,
                threads=SimulatedThreads(self.world),
                uniform=self.world.rng.uniform,
                digesting=SimulatedThreads(self.world, ARRANGING_S, self.scenario.slow_work_s),
            )
            halves[name] = BridgeConnector(name, worker_half=half)
            agents[name] = transport.agent
        return self._one_of(halves, engine), agents

    def _one_of(self, halves: dict[str, Connector], engine: "Ranks") -> Connector:
        if len(halves) == 1:
            return next(iter(halves.values()))
        return MultiConnector(
            halves,
            pp_size=engine.shape.pp,
            timeout_s=self.scenario.timeout_s,
            on_failure=self.scenario.on_failure,
            clock=self.world.clock,
        )

    def lease_tables(self, metadata: HandshakeMetadata) -> dict[str, int]:
        """Return where a rank has its words of leases, by connector."""
        payloads = metadata.payload
        if isinstance(payloads, bytes):
            parts = [payloads]
        else:
            parts = [
                decode(each, HandshakeMetadata, "child").payload  # type: ignore[misc]
                for each in payloads
                if each is not None
            ]
        tables = {}
        for name, part in zip(self.scenario.children, parts, strict=True):
            leases = decode_body(part).leases
            if leases is not None:
                tables[name] = leases.address
        return tables
