"""RESTART: an agent that comes back is another one."""

from kvbridge.errors import PeerLostError
from kvbridge.testing.bench import MIB, Bench
from kvbridge.testing.remote import RemoteAgent
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.moves import check_copies
from kvbridge.testing.suite.peering import check_gone, use
from kvbridge.testing.violations import expect, expect_equal
from kvbridge.transport import State


def restarted(bench: Bench, first: RemoteAgent) -> RemoteAgent:
    """Kill an agent's process, and start its like with other bytes in its memory."""
    first.process.kill()
    second = bench.agent()
    second.data[:] = 0xBB
    return second


class RestartRules:
    """RESTART."""

    @rule(
        "RESTART-01",
        "An agent that is started again has a name of its own, and can be added and used at once.",
    )
    def test_new_name(self, bench: Bench) -> None:
        agent, first = bench.agent(), bench.agent()
        old = agent.add_peer(first)
        new = agent.add_peer(restarted(bench, first))
        expect(new.agent != old.agent, f"both have the name {new.agent!r}")
        use(bench, agent, new)

    @rule(
        "RESTART-02",
        "What was a peer before a restart is lost: it fails or is refused, and never brings or "
        "takes bytes of the new one.",
        needs=("peer_loss",),
    )
    def test_old_peer(self, bench: Bench) -> None:
        agent, first = bench.agent(), bench.agent()
        old = agent.add_peer(first)
        second = restarted(bench, first)
        agent.data[:] = 1
        for op in bench.declared_ops():
            try:
                ended = agent.wait(agent.submit(op, old, [(0, 1000)], [(0, 1000)]))
                expect_equal(f"state of a {op} with the old peer", ended.state, State.FAILED)
            except PeerLostError:
                pass
        expect(not (agent.data == 0xBB).any(), "bytes of the new agent came from the old peer")
        expect((second.data == 0xBB).all(), "bytes for the old peer went to the new agent")
        agent.drop_peer(old)
        use(bench, agent, agent.add_peer(second))

    @rule(
        "RESTART-03",
        "Agent info of before a restart does not lead to the new agent.",
        needs=("peer_loss",),
    )
    def test_old_info(self, bench: Bench) -> None:
        agent, first = bench.agent(), bench.agent()
        info = first.agent_info()
        second = restarted(bench, first)
        check_gone(bench, agent, first, info)
        expect((second.data == 0xBB).all(), "bytes for the old agent went to the new one")
        use(bench, agent, agent.add_peer(second))

    @rule(
        "RESTART-04",
        "An owner serves agents that come and go, one after the other, in one process.",
        tiers=("quick", "full"),
    )
    def test_actors_come_and_go(self, bench: Bench) -> None:
        owner, process = bench.agent(), bench.process()
        for _ in range(bench.rounds(5, 50)):
            agent = bench.agent(process=process)
            peer = agent.add_peer(owner)
            for op in bench.declared_ops():
                check_copies(bench, op, [(7, 3, MIB // 2)], agent=agent, peer=peer)
            expect_equal("regions that are not quiet after close", agent.close(), ())
