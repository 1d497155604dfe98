"""CONC: many things at once."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from kvbridge.errors import PeerLostError
from kvbridge.testing.bench import MIB, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.process import GRACE_S
from kvbridge.testing.remote import RemoteAgent, RemotePeer
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.peering import use
from kvbridge.testing.violations import expect, expect_at_most, expect_bytes, expect_equal
from kvbridge.transport import State

BOTH = ("processes", "threads")

# How long a silent peer is waited for, and how long all others may take meanwhile.
SILENT_S, OTHERS_S = 10.0, 5.0
# Waits for nothing and for something, and how late they may end.
IDLE_S, WAIT_S, LATE_S = 0.2, 4.0, 1.0


class ConcurrencyRules:
    """CONC."""

    @rule(
        "CONC-01",
        "Two agents may act on each other at the same time, and each gets its own bytes.",
        needs=("dram",),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_both_ways(self, bench: Bench) -> None:
        here, there, op = bench.here, bench.there, bench.any_op()
        back = there.add_peer(here)
        nbytes = bench.fit(4 * MIB)
        low, high = [(0, nbytes)], [(8 * MIB, nbytes)]
        for seed in range(bench.rounds(5, 50)):
            for agent, salt in ((here, 0), (there, 500)):
                agent.data[: 16 * MIB] = 0xEE
                agent.data[:nbytes] = pattern(seed + salt, nbytes)
            # Each takes the other's low memory into its own high memory, or the other way round.
            local, remote = (high, low) if op == "read" else (low, high)
            calls = [
                (here, here.submit(op, bench.peer, local, remote)),
                (there, there.submit(op, back, local, remote)),
            ]
            for agent, handle in calls:
                agent.finish(handle, f"a {op} while the peer does the same")
            for agent, other in ((here, there), (there, here)):
                expect_bytes(
                    f"memory after {op}s both ways",
                    agent.data[8 * MIB : 8 * MIB + nbytes],
                    other.data[:nbytes],
                )

    @rule(
        "CONC-02",
        "Operations with several peers in turn each reach the peer that was meant.",
        needs=("dram",),
    )
    def test_several_owners(self, bench: Bench) -> None:
        op = bench.any_op()
        agent, owners = bench.agent(), [bench.agent() for _ in range(3)]
        peers = [agent.add_peer(owner) for owner in owners]
        size, count = bench.fit(3001), 60
        agent.data[:] = pattern(9, MIB)
        for number, owner in enumerate(owners):
            owner.data[:] = pattern(number, MIB)
        models = [owner.data.copy() for owner in owners]
        model = agent.data.copy()
        handles: list[int] = []
        for k in range(count):
            piece = slice(k * size, (k + 1) * size)
            if op == "read":
                model[piece] = models[k % 3][piece]
            else:
                models[k % 3][piece] = model[piece]
            if len(handles) == (bench.can.inflight_max or count):
                agent.finish(handles.pop(0), f"a {op} with one of three peers")
            pieces = [(k * size, size)]
            handles.append(agent.submit(op, peers[k % 3], pieces, pieces))
        for handle in handles:
            agent.finish(handle, f"a {op} with one of three peers")
        expect_bytes(f"memory here after {op}s with three peers", agent.data, model)
        for owner, wanted in zip(owners, models, strict=True):
            expect_bytes(f"memory of one of three owners after {op}s", owner.data, wanted)

    @rule(
        "CONC-03",
        "Several agents may act on one owner at the same time.",
        needs=("dram",),
    )
    def test_several_actors(self, bench: Bench) -> None:
        op = bench.any_op()
        depth, nbytes = min(8, bench.can.inflight_max or 8), bench.fit(MIB)
        share = depth * nbytes
        owner, agents = bench.agent(3 * share), [bench.agent(3 * share) for _ in range(3)]
        peers = [agent.add_peer(owner) for agent in agents]
        owner.data[:] = pattern(9, 3 * share)
        for number, agent in enumerate(agents):
            agent.data[:] = pattern(number, 3 * share)
        calls = []
        for k in range(depth):  # in turn, so that all three are in the middle of theirs
            for number, (agent, peer) in enumerate(zip(agents, peers, strict=True)):
                pieces = [(number * share + k * nbytes, nbytes)]
                local, remote = agent.pieces(pieces), owner.pieces(pieces)
                calls.append((agent, agent.start("submit", op, peer.id, local, remote)))
        for agent, call in calls:
            agent.finish(call.result(bench.harness.patience_s), f"a {op} beside two others")
        for number, agent in enumerate(agents):
            part = slice(number * share, (number + 1) * share)
            expect_bytes(f"memory after {op}s of three agents", agent.data[part], owner.data[part])

    @rule(
        "CONC-04",
        "A peer may be added in one thread while another thread submits and polls.",
    )
    def test_add_peer_beside_traffic(self, bench: Bench) -> None:
        agent, owner = bench.agent(), bench.agent()
        peer, there = agent.add_peer(owner), bench.there
        info = there.agent_info()
        for _ in range(bench.rounds(20, 20)):
            limit_s = bench.harness.patience_s
            adding = agent.start_adding(there, info, there.registered, timeout_s=limit_s)
            for op in bench.declared_ops():
                bench.move(op, [(0, 100_000)], [(0, 100_000)], agent=agent, peer=peer)
            agent.call("poll_for", 0.002)
            agent.drop_peer(adding.result(limit_s + GRACE_S))

    @rule(
        "CONC-05",
        "poll never waits: not for bytes on their way, and not for messages that do not come.",
    )
    def test_poll_does_not_wait(self, bench: Bench) -> None:
        here, handles = bench.here, []
        nbytes = bench.fit(32 * MIB)
        for op in bench.declared_ops():
            handles += [
                here.submit(op, bench.peer, [(0, nbytes)], [(0, nbytes)])
                for _ in range(min(4, (bench.can.inflight_max or 8) // 2 or 1))
            ]
        took = here.call("poll_for", 0.3)
        expect(took < 0.05, f"the median poll took {took:.3f} s, may take 0.05 at most")
        for handle in handles:
            expect(here.wait(handle).state is State.DONE, "an operation failed under polling")

    @rule(
        "CONC-06",
        "Several peers may be added at once, and dropped beside that; one that does not answer "
        "holds up no other.",
        tiers=("quick", "full"),
    )
    def test_peering_at_once(self, bench: Bench) -> None:
        agent, silent = bench.agent(), bench.agent()
        others = [bench.agent(), bench.agent(), bench.there]
        standing = agent.add_peer(bench.there)
        info = silent.agent_info()
        silent.process.signal(signal.SIGSTOP)
        try:
            adding = agent.start_adding(silent, info, silent.registered, timeout_s=SILENT_S)
            # The first round is the first that the agent hears of most of them.
            for _ in range(bench.rounds(3, 30)):
                check_peering_at_once(bench, agent, others, standing)
            took = agent.call("poll_for", 0.3)
        finally:
            silent.process.signal(signal.SIGCONT)
        expect(took < 0.1, f"a poll took {took:.3f} s beside an add_peer; it must not wait")
        with suppress(PeerLostError):  # it may be given up, if only it can be added again
            agent.drop_peer(adding.result(SILENT_S + GRACE_S))
        check_peering_at_once(bench, agent, [*others, silent], standing)

    @rule(
        "CONC-07",
        "wait returns once an operation has ended or a notification has come, be it before the "
        "wait began, and by its time when nothing happens.",
        placements=BOTH,
    )
    def test_wait(self, bench: Bench) -> None:
        here, there, peer = bench.here, bench.there, bench.peer
        for timeout_s in (0.0, IDLE_S):
            waiting = here.start("time_idle_wait", timeout_s)
            took = waiting.result(timeout_s + LATE_S + GRACE_S)
            expect_at_most(f"seconds of a wait of {timeout_s:g} s", took, timeout_s + LATE_S)
        nbytes = bench.fit(64 << 10)
        pieces = here.pieces([(0, nbytes)]), there.pieces([(0, nbytes)])
        for op in bench.declared_ops():
            for pause_s in [0.0, 0.05] * bench.rounds(3, 30):
                took = here.call(
                    "time_wait_for_end", op, peer.id, *pieces, pause_s=pause_s, each_s=WAIT_S
                )
                expect_at_most(f"seconds of a wait of {WAIT_S:g} s for a {op}", took, LATE_S)
        if not bench.can.notify:
            return
        for _ in range(bench.rounds(3, 30)):
            waiting = there.start("time_wait_for_notification", WAIT_S)
            time.sleep(0.05)
            here.notify(peer, b"wake up")
            took = waiting.result(2 * WAIT_S + GRACE_S)
            expect_at_most(f"seconds of a wait of {WAIT_S:g} s for a notification", took, LATE_S)
            there.notifications(1)


def check_peering_at_once(
    bench: Bench, agent: RemoteAgent, owners: Sequence[RemoteAgent], standing: RemotePeer
) -> None:
    """Add all owners, each of them twice, use them, and drop them; use another one meanwhile."""
    infos = [(owner, owner.agent_info()) for owner in owners] * 2
    start = time.monotonic()
    adding = [
        agent.start_adding(owner, info, owner.registered, timeout_s=OTHERS_S)
        for owner, info in infos
    ]
    use(bench, agent, standing)
    added = [one.result(OTHERS_S) for one in adding]
    for peer in added:
        use(bench, agent, peer)
    dropping = [agent.start_dropping(peer) for peer in added]
    use(bench, agent, standing)
    for one in dropping:
        one.result(OTHERS_S)
    expect_at_most("seconds of adding and dropping peers", time.monotonic() - start, OTHERS_S)
    for peer in added:
        again = agent.add_peer(peer.owner)
        expect_equal("path of a peer that was added beside others", peer.path, again.path)
        agent.drop_peer(again)
