"""FAIL: peers that are killed, stopped or wrong."""

import random
import signal
import time

import numpy as np

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.testing.agent import Ended
from kvbridge.testing.bench import ARENA_NBYTES, MIB, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.process import GRACE_S, check_alive
from kvbridge.testing.remote import RemoteAgent, RemotePeer
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.moves import check_copies
from kvbridge.testing.violations import (
    RuleViolationError,
    expect,
    expect_bytes,
    expect_equal,
    expect_in,
    expect_raises,
)
from kvbridge.transport import Op, Region, State

PIECE_NBYTES = 32 << 10
TRIES = 3


def pieces_of(bench: Bench, nbytes: int) -> list[tuple[int, int]]:
    """Cut memory into neighbouring pieces, as many as one operation may have."""
    nbytes = bench.fit(nbytes)
    count = min(nbytes // PIECE_NBYTES, bench.can.descriptors_max or nbytes)
    return [(k * PIECE_NBYTES, PIECE_NBYTES) for k in range(count)] or [(0, nbytes)]


def kill_owner_under(
    bench: Bench, op: Op, agent: RemoteAgent, depth: int = 30
) -> tuple[RemotePeer, list[Ended]]:
    """Kill an owner while operations with it are in flight; returns how these ended.

    Tried again where each of them was faster than the kill.
    """
    pieces, patience_s = pieces_of(bench, 32 * MIB), bench.harness.patience_s
    fill = agent.span(0, sum(size for _, size in pieces))
    depth = min(depth, bench.can.inflight_max or depth)
    for _ in range(TRIES):
        victim = bench.agent(ARENA_NBYTES)
        peer = agent.add_peer(victim)
        local, remote = agent.pieces(pieces), victim.pieces(pieces)
        how = {"depth": depth, "timeout_s": patience_s, "fill": fill}
        transferring = agent.start("transfer_until_lost", op, peer.id, local, remote, **how)
        time.sleep(0.05)
        victim.process.kill()
        ends: list[Ended] = transferring.result(2 * patience_s + GRACE_S)
        if any(end.state is State.FAILED for end in ends):
            return peer, ends
    raise RuleViolationError(
        f"each {op} in flight is reported as done, although the owner was killed"
    )


def check_owner_killed(bench: Bench, op: Op) -> None:
    """All ends are reported, with reasons; then the memory is quiet."""
    agent = bench.agent(ARENA_NBYTES)
    doomed, ends = kill_owner_under(bench, op, agent)
    for end in ends:
        expect(end.state is State.DONE or end.reason, f"a failed {op} gives no reason")
    if op == "read":
        nbytes = sum(size for _, size in pieces_of(bench, 32 * MIB))
        time.sleep(0.15)
        agent.call("poll_for", 0.02)
        expect_bytes(
            "destination of reads that have ended, overwritten with 0x07 since",
            agent.data[:nbytes],
            np.full(nbytes, 7, np.uint8),
        )
    agent.unregister(agent.region)
    agent.register(agent.region)
    agent.drop_peer(doomed)
    check_copies(bench, op, [(0, 1, 100_000)], agent=agent, peer=agent.add_peer(bench.there))


def check_actors_killed(bench: Bench, op: Op) -> None:
    """Whatever it was in the middle of, the owner serves the next one."""
    owner = bench.agent(ARENA_NBYTES)
    pieces = pieces_of(bench, 32 * MIB)
    rounds = bench.rounds(3, 50)
    chance = random.Random(1)  # noqa: S311  (no secret)
    for number in range(1, rounds + 1):
        actor = bench.agent(ARENA_NBYTES)
        peer = actor.add_peer(owner)
        local, remote = actor.pieces(pieces), owner.pieces(pieces)
        depth = min(4, peer.capabilities.inflight_max or 4)
        actor.start("transfer_for_ever", op, peer.id, local, remote, depth)
        time.sleep(chance.uniform(0.005, 0.08))
        expect_equal(f"exit status of the acting process {number}", actor.process.exit_code, None)
        actor.process.kill()
        owner.call("poll_for", 0.01)
        check_alive([owner.process])
        bench.release(actor)
    survivor = bench.agent(ARENA_NBYTES)
    check_copies(bench, op, [(3, 1, MIB)], agent=survivor, peer=survivor.add_peer(owner))
    owner.check_guards(f"after {rounds} kills")


class FailureRules:
    """FAIL."""

    @rule(
        "FAIL-01",
        "When an owner is killed under reads, each of them ends in time, as failed with a reason "
        "or done; then its memory is quiet, and reads from others go on.",
        needs=("read", "peer_loss"),
        tiers=("quick", "full"),
    )
    def test_owner_killed_read(self, bench: Bench) -> None:
        for _ in range(bench.rounds(2, 20)):
            check_owner_killed(bench, "read")

    @rule(
        "FAIL-02",
        "When an owner is killed under writes, each of them ends in time, as failed with a reason "
        "or done; then its memory is free, and writes to others go on.",
        needs=("write", "peer_loss"),
        tiers=("quick", "full"),
    )
    def test_owner_killed_write(self, bench: Bench) -> None:
        for _ in range(bench.rounds(2, 20)):
            check_owner_killed(bench, "write")

    @rule(
        "FAIL-03",
        "Use of a peer that was killed ends in PeerLostError, after a few failed operations at "
        "most.",
        needs=("peer_loss",),
    )
    def test_lost(self, bench: Bench) -> None:
        agent, victim = bench.agent(), bench.agent()
        peer = agent.add_peer(victim)
        victim.process.kill()
        for op in bench.declared_ops():
            for _ in range(5):
                try:
                    ended = agent.wait(agent.submit(op, peer, [(0, 100)], [(0, 100)]))
                except PeerLostError:
                    break
                expect_equal(f"state of a {op} with a killed peer", ended.state, State.FAILED)
            else:
                expect(False, f"submit of a {op}: takes a peer that is dead after 5 failures")
        if bench.can.notify:
            with expect_raises("notify, again and again, to a killed peer", PeerLostError):
                agent.call("notify_until_lost", peer.id, bench.harness.patience_s)
        agent.drop_peer(peer)

    @rule(
        "FAIL-04",
        "Operations with one peer do not suffer from another peer that is killed meanwhile.",
        needs=("dram", "peer_loss"),
    )
    def test_others_go_on(self, bench: Bench) -> None:
        op = bench.any_op()
        agent, victim = bench.agent(ARENA_NBYTES), bench.agent(ARENA_NBYTES)
        doomed, good = agent.add_peer(victim), agent.add_peer(bench.there)
        pieces = pieces_of(bench, 4 * MIB)
        count = min(20, bench.can.inflight_max or 20) // 2
        lost, kept = [], []
        for _ in range(count):
            lost.append(agent.submit(op, doomed, pieces, pieces))
            kept.append(agent.submit(op, good, pieces, pieces))
        victim.process.kill()
        for handle in kept:
            agent.finish(handle, f"a {op} with a peer that lives")
        for handle in lost:
            agent.wait(handle)

    @rule(
        "FAIL-05",
        "When readers are killed in the middle of their reads, the owner lives and serves the "
        "next.",
        needs=("read",),
        tiers=("quick", "full"),
    )
    def test_readers_killed(self, bench: Bench) -> None:
        check_actors_killed(bench, "read")

    @rule(
        "FAIL-06",
        "When writers are killed in the middle of their writes, the owner lives and takes the "
        "next.",
        needs=("write",),
        tiers=("quick", "full"),
    )
    def test_writers_killed(self, bench: Bench) -> None:
        check_actors_killed(bench, "write")

    @rule(
        "FAIL-07",
        "A transfer proceeds although the owner's process is stopped, where the owner is declared "
        "passive.",
        needs=("owner_passive",),
    )
    def test_passive_owner(self, bench: Bench) -> None:
        agent, owner = bench.agent(), bench.agent()
        peer = agent.add_peer(owner)
        ops = bench.declared_ops() or (bench.any_op(),)
        for op in ops:
            agent.move(op, peer, [(0, 10)], [(0, 10)])
        owner.process.signal(signal.SIGSTOP)
        try:
            for op in ops:
                bench.move(op, [(0, MIB)], [(0, MIB)], agent=agent, peer=peer)
        finally:
            owner.process.signal(signal.SIGCONT)

    @rule(
        "FAIL-08",
        "Operations with an owner whose process is stopped end once it goes on, and others are "
        "not held up meanwhile.",
        needs=("dram",),
    )
    def test_stopped_owner(self, bench: Bench) -> None:
        agent, owner = bench.agent(), bench.agent()
        peer, other = agent.add_peer(owner), agent.add_peer(bench.there)
        op, whole = bench.any_op(), [(0, bench.fit(MIB))]
        agent.move(op, peer, [(0, 10)], [(0, 10)])
        owner.process.signal(signal.SIGSTOP)
        try:
            handle = agent.submit(op, peer, whole, whole)
            agent.move(op, other, [(0, 1000)], [(0, 1000)])
            took = agent.call("poll_for", 0.3)
        finally:
            owner.process.signal(signal.SIGCONT)
        expect(took < 0.1, f"a poll took {took:.3f} s while a peer was stopped; it must not wait")
        expect_in("state of the operation", agent.wait(handle).state, (State.DONE, State.FAILED))

    @rule(
        "FAIL-09",
        "Where failure is declared clean, a failed operation has left its destination untouched.",
        needs=("failure_is_clean", "peer_loss"),
    )
    def test_clean_failure(self, bench: Bench) -> None:
        for op in bench.declared_ops():
            for _ in range(bench.rounds(3, 10)):
                agent, victim = bench.agent(ARENA_NBYTES), bench.agent(ARENA_NBYTES)
                peer, each = agent.add_peer(victim), bench.fit(4 * MIB)
                target = agent if op == "read" else victim
                target.data[:] = pattern(1, ARENA_NBYTES)
                depth = min(8, bench.can.inflight_max or 8)
                parts = [[(k * each, each)] for k in range(depth)]
                handles = [agent.submit(op, peer, part, part) for part in parts]
                if depth > 1:
                    agent.wait(handles[0])
                victim.process.kill()
                ends = [agent.wait(handle) for handle in handles]
                for ((start, size),), end in zip(parts, ends, strict=True):
                    if end.state is State.FAILED:
                        expect_bytes(
                            f"destination of a failed {op}",
                            target.data[start : start + size],
                            pattern(1, ARENA_NBYTES)[start : start + size],
                        )

    @rule(
        "FAIL-10",
        "Where the loss of a peer is declared an event, it is known without using the peer.",
        needs=("peer_loss",),
    )
    def test_loss_is_an_event(self, bench: Bench) -> None:
        if bench.can.peer_loss != "event":
            bench.not_applicable(f"peer_loss is {bench.can.peer_loss!r}")
        op = bench.any_op()
        agent, victim = bench.agent(), bench.agent()
        peer = agent.add_peer(victim)
        victim.process.kill()
        agent.call("poll_for", 1.5)
        with expect_raises(f"the first {op} after a peer was lost", PeerLostError):
            agent.submit(op, peer, [(0, 10)], [(0, 10)])

    @rule(
        "FAIL-11",
        "Where the owner is declared to check bounds, it refuses what its peer was told wrongly: "
        "the operation fails, nothing moves, and the owner lives.",
        needs=("owner_checks_bounds", "dram"),
    )
    def test_owner_checks(self, bench: Bench) -> None:
        agent, owner = bench.agent(), bench.agent()
        size = owner.extent.nbytes
        wrong = [Region(owner.address, size + 4096)]
        for op in bench.declared_ops():
            try:
                peer = agent.add_peer_as(owner, owner.agent_info(), wrong)
            except TransportError:
                continue  # the owner's info says better what it has
            agent.data[:100] = 1
            ended = agent.wait(agent.submit(op, peer, [(0, 100)], [(size, 100)]))
            expect_equal(f"state of a {op} out of the owner's bounds", ended.state, State.FAILED)
            expect((agent.data[:100] == 1).all(), f"the refused {op} changed the memory here")
            owner.check_guards(f"the refused {op}")
            agent.drop_peer(peer)
        check_alive([owner.process])
        for op in bench.declared_ops():
            check_copies(bench, op, [(0, 5, 100)], agent=agent, peer=agent.add_peer(owner))

    @rule(
        "FAIL-12",
        "An owner may close while its peers are in the middle of transfers: these end, and both "
        "processes live.",
        needs=("dram", "peer_loss"),
        tiers=("quick", "full"),
    )
    def test_owner_closes(self, bench: Bench) -> None:
        op = bench.any_op()
        for _ in range(bench.rounds(1, 20)):
            agent, owner = bench.agent(ARENA_NBYTES), bench.agent(ARENA_NBYTES)
            peer = agent.add_peer(owner)
            pieces = pieces_of(bench, 32 * MIB)
            count = min(10, bench.can.inflight_max or 10)
            handles = [agent.submit(op, peer, pieces, pieces) for _ in range(count)]
            owner.close()
            for handle in handles:
                agent.wait(handle)
            bench.check_alive()
            bench.release(agent)
            bench.release(owner)
