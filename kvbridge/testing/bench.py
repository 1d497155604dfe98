"""Where a rule is tried: two agents that stand ready, and as many more as it wants."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from kvbridge.errors import ConfigError
from kvbridge.namespaces import NetworkNamespace
from kvbridge.testing.first_step import FirstStep
from kvbridge.testing.harness import TransportHarness
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.process import AgentProcess, check_alive
from kvbridge.testing.remote import Pieces, RemoteAgent, RemotePeer, parts_within
from kvbridge.testing.rules import Placement, Tier
from kvbridge.testing.violations import NotApplicable, RuleViolationError
from kvbridge.transport import Capabilities, Op, Region

MIB = 1 << 20
ARENA_NBYTES = 34 * MIB


class Pair:
    """Two open agents: *here* acts on the memory of *there*."""

    def __init__(self, here: RemoteAgent, there: RemoteAgent) -> None:
        """Let them meet."""
        self.here, self.there = here, there
        self.peer = here.add_peer(there)


class Laboratory:
    """All that outlives a rule: the shared memory, and pairs that no rule has broken yet.

    Starting a process takes longer than most rules, so one is always being started in advance.
    """

    def __init__(self, harness: TransportHarness) -> None:
        """Prepare; nothing is started before a rule asks for it."""
        self.harness = harness
        self.memory = SharedMemory.make()
        self.path = ""
        self._namespace: NetworkNamespace | None = None
        self._spare: AgentProcess | None = None
        self._pairs: dict[Placement, Pair] = {}
        self._standing: list[AgentProcess] = []
        self._opening = FirstStep("an agent cannot be opened")
        self._registering = FirstStep("an agent cannot register memory")
        self._meeting: dict[Placement, FirstStep] = {
            "processes": FirstStep("two agents cannot meet"),
            "threads": FirstStep("two agents of one process cannot meet"),
        }

    def check_options(self) -> None:
        """Find out, before any verdict, whether agents can be opened at all with the options.

        Raises:
            ConfigError: They cannot; the transport says why.
        """
        try:
            self.pair("processes")
        except RuleViolationError as violation:
            # Whatever else is wrong is for the rules to say.
            self.discard_pairs()
            if not self._opening.worked and isinstance(violation.__cause__, ConfigError):
                raise violation.__cause__ from None

    def spawn(self) -> AgentProcess:
        """Return a fresh process."""
        if self.harness.isolate_network and self._namespace is None:
            self._namespace = NetworkNamespace()
        process = self._spare or self._start()
        self._spare = self._start()
        return process

    def _start(self) -> AgentProcess:
        return AgentProcess(self.harness, self.memory, self._namespace)

    def open_agent(
        self, process: AgentProcess, nbytes: int, *, polls_when_idle: bool = True
    ) -> RemoteAgent:
        """Open an agent with registered memory."""
        agent = RemoteAgent(process, nbytes, self.harness.patience_s)
        with self._opening.attempt():
            can = agent.open(self.harness.options, polls_when_idle=polls_when_idle)
        if "dram" in can.memory_kinds:
            with self._registering.attempt():
                agent.register(agent.region)
        return agent

    def pair(self, placement: Placement) -> Pair:
        """Return the standing pair, or set up one."""
        if placement not in self._pairs:
            meeting = self._meeting[placement]
            for step in (self._opening, self._registering, meeting):
                step.check()
            first = self.spawn()
            second = first if placement == "threads" else self.spawn()
            self._standing += [first, second]
            agents = [self.open_agent(process, ARENA_NBYTES) for process in (first, second)]
            with meeting.attempt():
                self._pairs[placement] = Pair(*agents)
            self.path = self._pairs[placement].peer.path if placement == "processes" else self.path
        return self._pairs[placement]

    def check(self) -> None:
        """Break the rule where an agent of a standing pair has died."""
        check_alive(self._standing)

    def discard_pairs(self) -> None:
        """End the standing pairs, whose state is in doubt."""
        for process in self._standing:
            process.close()
        for pair in self._pairs.values():
            self.memory.give_back(pair.here.extent)
            self.memory.give_back(pair.there.extent)
        self._standing.clear()
        self._pairs.clear()

    def close(self) -> None:
        """End everything."""
        self.discard_pairs()
        if self._spare:
            self._spare.close()
        if self._namespace:
            self._namespace.close()
        self.memory.close()


class Bench:
    """What one run of a rule works with.

    Attributes:
        harness: The transport under test.
        placement: Where the two standing agents live.
        tier: How hard to try.
    """

    def __init__(
        self, laboratory: Laboratory, placement: Placement = "processes", tier: Tier = "quick"
    ) -> None:
        """Start with nothing but what stands ready."""
        self.harness = laboratory.harness
        self.placement = placement
        self.tier = tier
        self._laboratory = laboratory
        self._processes: list[AgentProcess] = []
        self._agents: list[RemoteAgent] = []

    # --- the standing pair -----------------------------------------------------------------------

    @property
    def here(self) -> RemoteAgent:
        """The standing agent that acts."""
        return self._laboratory.pair(self.placement).here

    @property
    def there(self) -> RemoteAgent:
        """The standing agent that owns what is read and written."""
        return self._laboratory.pair(self.placement).there

    @property
    def peer(self) -> RemotePeer:
        """The second agent, as the first one knows it."""
        return self._laboratory.pair(self.placement).peer

    @property
    def can(self) -> Capabilities:
        """What holds between the standing agents."""
        return self.peer.capabilities

    # --- more agents -----------------------------------------------------------------------------

    def process(self) -> AgentProcess:
        """Return a fresh process, which this rule may break."""
        process = self._laboratory.spawn()
        self._processes.append(process)
        return process

    def agent(
        self,
        nbytes: int = 1 * MIB,
        *,
        process: AgentProcess | None = None,
        polls_when_idle: bool = True,
    ) -> RemoteAgent:
        """Open a fresh agent with registered memory, in a fresh process unless one is given."""
        agent = self._laboratory.open_agent(
            process or self.process(), nbytes, polls_when_idle=polls_when_idle
        )
        self._agents.append(agent)
        return agent

    def unopened(self, process: AgentProcess | None = None, nbytes: int = 1 * MIB) -> RemoteAgent:
        """Make an agent that is not open and has nothing registered."""
        agent = RemoteAgent(process or self.process(), nbytes, self.harness.patience_s)
        self._agents.append(agent)
        return agent

    def release(self, agent: RemoteAgent) -> None:
        """End an agent's process and free its memory, in the middle of a long rule."""
        agent.process.close()
        self._processes.remove(agent.process)
        self._agents.remove(agent)
        self._laboratory.memory.give_back(agent.extent)

    # --- how hard to try -------------------------------------------------------------------------

    def rounds(self, quick: int, full: int) -> int:
        """Choose a number by the tier."""
        return full if self.tier == "full" else quick

    def for_all(self, strategy: SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        """Try a check on many generated values; in the quick tier on the same ones every time."""
        full = self.tier == "full"

        @settings(
            deadline=None,
            max_examples=self.rounds(25, 500),
            derandomize=not full,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def tried(value: Any) -> None:
            check(value)

        tried()

    def not_applicable(self, reason: str) -> NoReturn:
        """End the rule: it has nothing to say here."""
        raise NotApplicable(reason)

    # --- what many rules do ----------------------------------------------------------------------

    def move(
        self,
        op: Op,
        local: Pieces,
        remote: Pieces,
        *,
        agent: RemoteAgent | None = None,
        peer: RemotePeer | None = None,
    ) -> None:
        """Move pieces between the standing agents, in as many parts as the transport needs."""
        agent, peer = agent or self.here, peer or self.peer
        for here, there in parts_within(local, remote, peer.capabilities):
            agent.move(op, peer, here, there)

    def fit(self, nbytes: int) -> int:
        """Return as many bytes as one operation may move, at most so many."""
        return min(nbytes, self.can.transfer_max_bytes or nbytes)

    def any_op(self) -> Op:
        """Return an operation that is declared."""
        if not (self.can.read or self.can.write):
            self.not_applicable("neither read nor write declared")
        return "read" if self.can.read else "write"

    def declared_ops(self) -> tuple[Op, ...]:
        """Return the operations that are declared."""
        ops: tuple[Op, ...] = ("read", "write")
        return tuple(op for op in ops if getattr(self.can, op))

    def outside(self, agent: RemoteAgent) -> Region:
        """Return memory that an agent has but did not register: its guard."""
        return Region(agent.region.end, 4096)

    # --- the end ---------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Break the rule where an agent's process has died by itself."""
        check_alive(self._processes)
        self._laboratory.check()

    def close(self, *, broken: bool) -> None:
        """End all that this rule made; what is broken takes the standing pairs with it."""
        for process in self._processes:
            process.close()
        for agent in self._agents:
            with suppress(ValueError):
                self._laboratory.memory.give_back(agent.extent)
        if broken:
            self._laboratory.discard_pairs()
