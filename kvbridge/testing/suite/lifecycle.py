"""LIFE: from the probe to the end of the process."""

import re
import time

import numpy as np

from kvbridge.errors import ConfigError, TransportError
from kvbridge.testing.bench import ARENA_NBYTES, MIB, Bench
from kvbridge.testing.remote import RemoteAgent
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.rounds import check_rounds
from kvbridge.testing.violations import (
    expect,
    expect_at_most,
    expect_bytes,
    expect_equal,
    expect_raises,
)
from kvbridge.transport import TRANSPORT_API_VERSION, TransportConfig


def use_once(bench: Bench, agent: RemoteAgent, owner: RemoteAgent) -> None:
    """Do a little of everything that is declared with an agent that was just opened."""
    peer = agent.add_peer(owner)
    for op in bench.declared_ops():
        agent.move(op, peer, [(0, 10)], [(0, 10)])
    if peer.capabilities.notify:
        agent.notify(peer, b"once")


def check_refuses(agent: RemoteAgent, what: str) -> None:
    """An agent that is not open refuses whatever needs one."""
    with expect_raises(f"agent_info of {what}", TransportError):
        agent.agent_info()
    with expect_raises(f"register with {what}", TransportError):
        agent.call("register", (agent.region,))
    with expect_raises(f"add_peer with {what}", TransportError):
        agent.add_peer_as(agent, b"", ())


class LifeRules:
    """LIFE."""

    @rule(
        "LIFE-01",
        "A transport has a name of small letters, this version of the contract, and a type for "
        "its options.",
    )
    def test_identity(self, bench: Bench) -> None:
        kind = bench.harness.kind
        missing = sorted(getattr(kind, "__abstractmethods__", ()))
        expect(not missing, f"{kind.__qualname__}: does not implement {', '.join(missing)}")
        expect(
            re.fullmatch(r"[a-z][a-z0-9_-]*", kind.name),
            f"name: is {kind.name!r}, must be small letters, digits, '_' and '-'",
        )
        expect_equal("api_version", kind.api_version, TRANSPORT_API_VERSION)
        expect(
            issubclass(kind.config_type, TransportConfig),
            f"config_type: is {kind.config_type!r}, must derive from TransportConfig",
        )

    @rule(
        "LIFE-02",
        "probe says whether the transport can run here, at once, again and again, and opens "
        "nothing.",
    )
    def test_probe(self, bench: Bench) -> None:
        agent = bench.unopened()
        agent.call("probe")  # the first one may load things
        before = agent.process.resources()
        start = time.monotonic()
        for _ in range(5):
            ok, reason, _hint = agent.call("probe")
            expect(isinstance(ok, bool), f"probe().ok: is {ok!r}, must be a bool")
            expect(ok or reason, "probe() says that it cannot run, and gives no reason")
        expect_at_most("seconds that five probes took", time.monotonic() - start, 2.5)
        grown = agent.process.resources().grown_since(before, {"descriptors": 0, "threads": 0})
        expect(not grown, f"five probes left something behind: {', '.join(grown)}")

    @rule(
        "LIFE-03",
        "An agent that was not opened refuses use with TransportError, and closing it is no error.",
    )
    def test_not_open(self, bench: Bench) -> None:
        agent = bench.unopened()
        check_refuses(agent, "an agent that is not open")
        expect_equal("close of an agent that was never open", agent.close(), ())

    @rule(
        "LIFE-04", "A second open is refused with TransportError, and the agent goes on as it was."
    )
    def test_open_twice(self, bench: Bench) -> None:
        agent = bench.agent()
        with expect_raises("the second open", TransportError, ConfigError):
            agent.open(bench.harness.options)
        use_once(bench, agent, bench.there)

    @rule(
        "LIFE-05",
        "An unknown option is refused with ConfigError before anything is opened.",
    )
    def test_unknown_option(self, bench: Bench) -> None:
        agent = bench.unopened()
        before = agent.process.resources()
        with expect_raises("open with the option 'no_such_option'", ConfigError):
            agent.open({**bench.harness.options, "no_such_option": 1})
        grown = agent.process.resources().grown_since(before, {"descriptors": 0, "threads": 0})
        expect(not grown, f"a refused open left something behind: {', '.join(grown)}")

    @rule(
        "LIFE-06",
        "A closed agent stays closed: closing again is no error, all other use is refused with "
        "TransportError.",
    )
    def test_closed_stays_closed(self, bench: Bench) -> None:
        agent = bench.agent()
        peer = agent.add_peer(bench.there)
        expect_equal("regions that are not quiet after close", agent.close(), ())
        expect_equal("regions that are not quiet after the second close", agent.close(), ())
        check_refuses(agent, "a closed agent")
        with expect_raises("open of a closed agent", TransportError):
            agent.open(bench.harness.options)
        with expect_raises("submit on a closed agent", TransportError):
            agent.submit("read", peer, [(0, 1)], [(0, 1)])
        with expect_raises("notify on a closed agent", TransportError):
            agent.notify(peer, b"x")

    @rule(
        "LIFE-07",
        "close ends in time with operations in flight; memory that it does not return is quiet.",
        tiers=("quick", "full"),
    )
    def test_close_in_flight(self, bench: Bench) -> None:
        op = bench.any_op()
        nbytes = bench.fit(32 * MIB)
        for timeout_s in [5.0, 0.05] * bench.rounds(1, 10):
            agent = bench.agent(ARENA_NBYTES)
            peer = agent.add_peer(bench.there)
            for _ in range(min(16, peer.capabilities.inflight_max or 16)):
                agent.submit(op, peer, [(0, nbytes)], [(0, nbytes)])
            target = agent if op == "read" else bench.there
            start = time.monotonic()
            not_quiet = agent.close(timeout_s, fill=target.span(0, nbytes))
            expect_at_most("seconds that close took", time.monotonic() - start, timeout_s + 5)
            if not_quiet:
                expect_equal("regions returned by close", set(not_quiet), {agent.region})
                agent.process.kill()
            else:
                time.sleep(0.1)
                expect_bytes(
                    f"destination of {op}s, overwritten with 0x07 after close",
                    target.data[:nbytes],
                    np.full(nbytes, 7, np.uint8),
                )

    @rule(
        "LIFE-08",
        "Use in a forked child is refused there with TransportError, and the parent goes on.",
    )
    def test_fork(self, bench: Bench) -> None:
        agent = bench.agent()
        expect_equal(
            "what poll raises in a forked child", agent.call("poll_in_fork"), "TransportError"
        )
        use_once(bench, agent, bench.there)

    @rule(
        "LIFE-09",
        "Opening and closing agents leaves no descriptor, thread, memory or shared memory behind.",
        tiers=("quick", "full"),
    )
    def test_open_rounds(self, bench: Bench) -> None:
        process, owner = bench.process(), bench.agent()

        def one_round() -> None:
            agent = RemoteAgent(process, 64 << 10, bench.harness.patience_s)
            if "dram" in agent.open(bench.harness.options).memory_kinds:
                agent.register(agent.region)
            use_once(bench, agent, owner)
            owner.notifications(1000, 0.005)
            expect_equal("regions that are not quiet after close", agent.close(), ())
            agent.forget()

        check_rounds(one_round, [process, owner.process], bench.rounds(20, 200))

    @rule(
        "LIFE-10", "A process ends with status 0, whether its agents were closed or are still open."
    )
    def test_process_ends(self, bench: Bench) -> None:
        for closes in (True, False):
            agent = bench.agent()
            use_once(bench, agent, bench.there)
            if closes:
                agent.close()
            word = "closed" if closes else "open"
            expect_equal(f"exit status of a process with a {word} agent", agent.process.exit(), 0)
