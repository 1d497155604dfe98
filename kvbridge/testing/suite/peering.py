"""PEER: finding each other, and letting go."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvbridge.errors import OutOfBoundsError, PeerLostError, TransportError
from kvbridge.testing.bench import ARENA_NBYTES, MIB, Bench
from kvbridge.testing.remote import RemoteAgent, RemotePeer
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.moves import check_copies
from kvbridge.testing.suite.rounds import check_rounds
from kvbridge.testing.violations import (
    expect,
    expect_at_most,
    expect_equal,
    expect_in,
    expect_raises,
)
from kvbridge.transport import (
    Capabilities,
    Descriptors,
    Op,
    Region,
    State,
    seal_agent_info,
)

PATHS = ("memory", "cma", "shm", "rdma", "tcp", "unknown")
LOSS = ("none", "on_use", "event")
FLAGS = (
    "read",
    "write",
    "notify",
    "notify_with_transfer",
    "failure_is_clean",
    "owner_passive",
    "owner_checks_bounds",
    "peers_in_process",
)
LIMITS = ("descriptors_max", "inflight_max", "transfer_max_bytes")
FRAME_NBYTES = 16 << 20
SLACK_S = 4.5  # of add_peer, beyond its time limit: a busy machine may hold it up


def more_than(peer: Capabilities, transport: Capabilities) -> list[str]:
    """Name what a peer has and its transport does not declare."""
    more = [flag for flag in FLAGS if getattr(peer, flag) and not getattr(transport, flag)]
    for limit in LIMITS:
        most, its = getattr(transport, limit), getattr(peer, limit)
        if most and (not its or its > most):
            more.append(limit)
    if peer.notify_max_bytes > transport.notify_max_bytes:
        more.append("notify_max_bytes")
    if not peer.memory_kinds <= transport.memory_kinds:
        more.append("memory_kinds")
    if LOSS.index(peer.peer_loss) > LOSS.index(transport.peer_loss):
        more.append("peer_loss")
    return more


def use(bench: Bench, agent: RemoteAgent, peer: RemotePeer) -> None:
    """Show that a peer can be used, as far as anything is declared."""
    for op in bench.declared_ops():
        check_copies(bench, op, [(5, 1, 1000)], agent=agent, peer=peer)


@contextmanager
def in_time(limit_s: float) -> Iterator[None]:
    """Break the rule where an add_peer with this time limit takes much longer."""
    start = time.monotonic()
    try:
        yield
    finally:
        took_s = time.monotonic() - start
        expect_at_most(f"seconds of an add_peer with {limit_s:g}", took_s, limit_s + SLACK_S)


def check_gone(bench: Bench, agent: RemoteAgent, owner: RemoteAgent, info: bytes) -> None:
    """Some libraries connect at first use only; then that is what fails."""
    try:
        with in_time(2):
            peer = agent.add_peer_as(owner, info, owner.registered, timeout_s=2)
    except PeerLostError:
        return
    for op in bench.declared_ops():
        try:
            ended = agent.wait(agent.submit(op, peer, [(0, 10)], [(0, 10)]))
        except PeerLostError:
            continue
        expect_equal(f"state of a {op} with a peer that has ended", ended.state, State.FAILED)
    agent.drop_peer(peer)


class PeeringRules:
    """PEER."""

    @rule(
        "PEER-01",
        "add_peer returns the peer's name, a known path, the regions that were given, and no "
        "capability that the transport does not declare.",
    )
    def test_what_a_peer_is(self, bench: Bench) -> None:
        peer, can = bench.peer, bench.here.call("capabilities")
        expect(peer.agent and isinstance(peer.agent, str), f"name of the peer: is {peer.agent!r}")
        expect_in("path", peer.path, PATHS)
        if bench.harness.path:
            expect_equal("path that the options lead to", peer.path, bench.harness.path)
        expect_equal("regions of the peer", peer.regions, bench.there.registered)
        more = more_than(peer.capabilities, can)
        expect(not more, f"{', '.join(more)}: the peer has more than the transport declares")

    @rule("PEER-02", "The name of an agent is its own, and the same for all who add it.")
    def test_names(self, bench: Bench) -> None:
        first, second = bench.agent(), bench.agent()
        names = [
            a.add_peer(b).agent for a in (first, second) for b in (first, second) if a is not b
        ]
        expect(names[0] != names[1], f"two agents have one name, {names[0]!r}")
        known = first.add_peer(bench.there).agent
        expect_equal("name of one agent for another", second.add_peer(bench.there).agent, known)

    @rule(
        "PEER-03",
        "Agent info that is truncated, flipped, oversized or another transport's is refused with "
        "TransportError, and the right one is taken afterwards.",
        tiers=("quick", "full"),
    )
    def test_garbled(self, bench: Bench) -> None:
        agent, there = bench.agent(), bench.there
        info = there.agent_info()
        step = max(1, len(info) // bench.rounds(40, 1000))
        bad = [info[:cut] for cut in range(0, len(info), step)]
        bad += [
            info[:at] + bytes([info[at] ^ 1 << at % 8]) + info[at + 1 :]
            for at in range(0, len(info), step)
        ]
        bad += [info + b"\0", info + info, b"\xff" * 100, bytes(FRAME_NBYTES + 1)]
        bad += [
            seal_agent_info("somebody else", b"x"),
            seal_agent_info(bench.harness.kind.name, b""),
        ]
        for garbled in bad:
            with expect_raises(f"add_peer with {len(garbled)} garbled bytes", TransportError):
                agent.add_peer_as(there, garbled, there.registered, timeout_s=1)
        use(bench, agent, agent.add_peer(there))

    @rule(
        "PEER-04",
        "A peer that has ended cannot be added: PeerLostError in time, or the first operation "
        "fails.",
    )
    def test_gone(self, bench: Bench) -> None:
        agent, gone = bench.agent(), bench.agent()
        info = gone.agent_info()
        gone.process.kill()
        check_gone(bench, agent, gone, info)
        use(bench, agent, agent.add_peer(bench.there))

    @rule(
        "PEER-05",
        "add_peer keeps its time limit with a peer that does not answer, and succeeds once the "
        "peer answers again.",
    )
    def test_silent(self, bench: Bench) -> None:
        agent, silent = bench.agent(), bench.agent()
        info = silent.agent_info()
        silent.process.signal(signal.SIGSTOP)
        try:
            with in_time(0.5):
                peer = agent.add_peer_as(silent, info, silent.registered, timeout_s=0.5)
            agent.drop_peer(peer)
        except PeerLostError:
            pass
        finally:
            silent.process.signal(signal.SIGCONT)
        use(bench, agent, agent.add_peer(silent))

    @rule("PEER-06", "A peer may be added twice; dropping one of them leaves the other usable.")
    def test_added_twice(self, bench: Bench) -> None:
        agent = bench.agent()
        first, second = agent.add_peer(bench.there), agent.add_peer(bench.there)
        expect_equal("name of a peer that is added again", second.agent, first.agent)
        agent.drop_peer(first)
        use(bench, agent, second)

    @rule(
        "PEER-07",
        "A dropped peer is refused with PeerLostError, and dropping it again is no error.",
    )
    def test_dropped(self, bench: Bench) -> None:
        agent = bench.agent()
        peer = agent.add_peer(bench.there)
        agent.drop_peer(peer)
        agent.drop_peer(peer)
        for op in bench.declared_ops():
            with expect_raises(f"{op} with a dropped peer", PeerLostError):
                agent.submit(op, peer, [(0, 1)], [(0, 1)])
        if bench.can.notify:
            with expect_raises("notify to a dropped peer", PeerLostError):
                agent.notify(peer, b"x")

    @rule(
        "PEER-08",
        "Dropping a peer ends its operations: each is reported once, and their memory is free "
        "and quiet again.",
    )
    def test_drop_ends_operations(self, bench: Bench) -> None:
        op = bench.any_op()
        nbytes = bench.fit(32 * MIB)
        agent = bench.agent(ARENA_NBYTES)
        peer = agent.add_peer(bench.there)
        count = min(8, bench.can.inflight_max or 8)
        handles = [agent.submit(op, peer, [(0, nbytes)], [(0, nbytes)]) for _ in range(count)]
        agent.drop_peer(peer)
        target = agent if op == "read" else bench.there
        for handle in handles:
            ended = agent.wait(
                handle, fill=target.span(0, nbytes) if handle == handles[-1] else None
            )
            expect(ended.state is State.DONE or ended.reason, "a failed operation gives no reason")
        agent.call("poll_for", 0.1)
        expect((target.data[:nbytes] == 7).all(), "bytes came after all operations had ended")
        agent.unregister(agent.region)

    @rule(
        "PEER-09",
        "Adding and dropping peers leaves no descriptor, thread or memory behind, neither here "
        "nor at the peer.",
        tiers=("quick", "full"),
    )
    def test_peer_rounds(self, bench: Bench) -> None:
        agent, owner = bench.agent(), bench.agent()

        def one_round() -> None:
            peer = agent.add_peer(owner)
            for op in bench.declared_ops():
                agent.move(op, peer, [(0, 10)], [(0, 10)])
            agent.drop_peer(peer)

        check_rounds(one_round, [agent.process, owner.process], bench.rounds(20, 200))

    @rule(
        "PEER-10",
        "Regions of a peer that overlap are refused with OutOfBoundsError; such of a memory kind "
        "that is not declared are refused when they are added or used.",
    )
    def test_regions(self, bench: Bench) -> None:
        here, there = bench.here, bench.there
        info, base = there.agent_info(), there.address
        if "dram" in bench.can.memory_kinds:
            with expect_raises("add_peer with regions that overlap", OutOfBoundsError):
                here.add_peer_as(there, info, [Region(base, 100), Region(base + 99, 10)])
        strange = Region(base, 100, memory_kind="core rope")
        op: Op = "read" if bench.can.read else "write"
        with expect_raises(f"{op} of 'core rope' memory", TransportError):
            peer = here.add_peer_as(there, info, [strange])
            remote = Descriptors(np.array([base]), np.array([10]), "core rope")
            here.call("submit", op, peer.id, here.pieces([(0, 10)]), remote)
