"""REG: which memory may be touched, and when it may be taken back."""

import numpy as np

from kvbridge.errors import MemoryBusyError, OutOfBoundsError
from kvbridge.testing.bench import MIB, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.rounds import check_rounds
from kvbridge.testing.violations import (
    expect,
    expect_bytes,
    expect_equal,
    expect_raises,
)
from kvbridge.transport import Region


class RegistrationRules:
    """REG."""

    @rule(
        "REG-01",
        "A region that overlaps a registered one, or another of the same call, is refused with "
        "OutOfBoundsError, and nothing of that call is registered.",
        needs=("dram",),
    )
    def test_overlap(self, bench: Bench) -> None:
        agent = bench.agent()
        base, size = agent.region.end - 4096, 2048
        agent.unregister(agent.region)
        agent.register(Region(base, size))
        free = Region(base - 8192, 1024)
        for other in (
            Region(base, size),
            Region(base + 10, 10),
            Region(base - 5, 10),
            Region(base + size - 1, 1),
            Region(base - 5, size + 10),
        ):
            with expect_raises(f"register of {other} beside {base:#x}+{size}", OutOfBoundsError):
                agent.register(free, other)
        with expect_raises("register of one region twice in one call", OutOfBoundsError):
            agent.register(free, free)
        agent.register(free)  # so nothing of it was left by the calls above
        agent.unregister(free)

    @rule(
        "REG-02",
        "Unregistering what is not registered is refused with OutOfBoundsError, and nothing of "
        "that call is unregistered.",
        needs=("dram",),
    )
    def test_unknown(self, bench: Bench) -> None:
        agent = bench.agent()
        whole = agent.region
        for unknown in (
            Region(whole.address, whole.nbytes - 1),
            Region(whole.address + 1, whole.nbytes - 1),
            Region(whole.end, 100),
        ):
            with expect_raises(f"unregister of {unknown}", OutOfBoundsError):
                agent.unregister(whole, unknown)
        agent.unregister(whole)
        with expect_raises("the second unregister", OutOfBoundsError):
            agent.unregister(whole)

    @rule(
        "REG-03",
        "Memory that was unregistered is refused with OutOfBoundsError, and can be used again "
        "once it is registered again.",
        needs=("dram",),
    )
    def test_unregistered_is_refused(self, bench: Bench) -> None:
        op = bench.any_op()
        agent = bench.agent()
        peer = agent.add_peer(bench.there)
        for _ in range(3):
            agent.unregister(agent.region)
            with expect_raises(f"{op} with memory that was unregistered", OutOfBoundsError):
                agent.submit(op, peer, [(0, 10)], [(0, 10)])
            agent.register(agent.region)
            agent.move(op, peer, [(0, 10)], [(0, 10)])

    @rule(
        "REG-04",
        "Memory of an operation in flight is not unregistered: MemoryBusyError, until the "
        "operation has ended.",
        needs=("dram",),
    )
    def test_busy(self, bench: Bench) -> None:
        here, region = bench.here, bench.here.region
        nbytes = bench.fit(32 * MIB)
        for op in bench.declared_ops() or (bench.any_op(),):
            for _ in range(5):
                handles = [
                    here.submit(op, bench.peer, [(0, nbytes)], [(0, nbytes)])
                    for _ in range(min(4, bench.can.inflight_max or 4))
                ]
                refused = True
                try:
                    here.unregister(region)
                    refused = False
                except MemoryBusyError:
                    pass
                pending = here.call("pending", handles)
                for handle in handles:
                    here.finish(handle, f"{op} whose memory was asked back")
                if refused:
                    break
                here.register(region)
                expect(not pending, f"unregister: took memory of a {op} that was still pending")
            else:
                bench.not_applicable("operations end before unregister can be called")
            here.unregister(region)
            here.register(region)

    @rule(
        "REG-05",
        "Hundreds of regions may be registered at once, and one operation may touch all of them.",
        needs=("dram",),
    )
    def test_many_regions(self, bench: Bench) -> None:
        op = bench.any_op()
        count, step, size = 300, 3001, 1000
        agents = [bench.unopened(nbytes=MIB) for _ in range(2)]
        for agent in agents:
            agent.open(bench.harness.options)
            agent.register(*(Region(agent.address + k * step, size) for k in range(count)))
        here, there = agents
        here.data[:], there.data[:] = pattern(1, MIB), pattern(2, MIB)
        target, source = (here, there) if op == "read" else (there, here)
        model = target.data.copy()
        for k in range(count):
            model[k * step : k * step + size] = source.data[k * step : k * step + size]
        pieces = [(k * step, size) for k in range(count)]
        bench.move(op, pieces, pieces, agent=here, peer=here.add_peer(there))
        expect_bytes(f"destination of a {op} over {count} regions", target.data, model)

    @rule(
        "REG-06",
        "A piece that lies in two neighbouring regions is refused with OutOfBoundsError.",
        needs=("dram",),
    )
    def test_neighbours(self, bench: Bench) -> None:
        op = bench.any_op()
        agent = bench.agent()
        half = agent.extent.nbytes // 2
        agent.unregister(agent.region)
        agent.register(Region(agent.address, half), Region(agent.address + half, half))
        peer = agent.add_peer(bench.there)
        agent.move(op, peer, [(half - 10, 10), (half, 10)], [(0, 10), (10, 10)])
        with expect_raises(f"{op} with a piece across two regions", OutOfBoundsError):
            agent.submit(op, peer, [(half - 10, 20)], [(0, 20)])

    @rule(
        "REG-07",
        "Memory that an owner registers later is reached after its peer was added again.",
        needs=("dram",),
    )
    def test_registered_later(self, bench: Bench) -> None:
        op = bench.any_op()
        here, owner = bench.agent(), bench.agent()
        first, second = Region(owner.address, 4096), Region(owner.address + 8192, 4096)
        owner.unregister(owner.region)
        owner.register(first)
        old = here.add_peer(owner)
        owner.register(second)
        with expect_raises(f"{op} of what the peer had not registered yet", OutOfBoundsError):
            here.submit(op, old, [(0, 10)], [(8192, 10)])
        here.data[:], owner.data[:] = 1, 2
        here.move(op, here.add_peer(owner), [(0, 4096)], [(8192, 4096)])
        target = here.data[:4096] if op == "read" else owner.data[8192 : 8192 + 4096]
        wanted = np.full(4096, 2 if op == "read" else 1, np.uint8)
        expect_bytes(f"destination of a {op} of memory registered later", target, wanted)

    @rule(
        "REG-08",
        "Registering and unregistering leaves no descriptor, thread or memory behind.",
        needs=("dram",),
        tiers=("quick", "full"),
    )
    def test_register_rounds(self, bench: Bench) -> None:
        agent = bench.agent()

        def one_round() -> None:
            agent.unregister(agent.region)
            agent.register(agent.region)

        check_rounds(one_round, [agent.process], bench.rounds(100, 5000))
        expect_equal("regions registered in the end", len(agent.registered), 1)
