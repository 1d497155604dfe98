"""NOTIFY: small messages, alone or tied to a transfer."""

from collections import Counter
from collections.abc import Sequence

from kvbridge.testing.bench import MIB, Bench
from kvbridge.testing.memory import pattern
from kvbridge.testing.remote import RemoteAgent
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.moves import in_order, tail_first
from kvbridge.testing.violations import expect, expect_bytes, expect_equal
from kvbridge.transport import Op, State

BOTH = ("processes", "threads")


def expect_payloads(what: str, seen: Sequence[bytes], sent: Sequence[bytes]) -> None:
    """Break the rule unless exactly these came, in any order."""
    missing, surplus = Counter(sent) - Counter(seen), Counter(seen) - Counter(sent)
    expect(
        not missing and not surplus,
        f"{what}: {missing.total()} of {len(sent)} did not come and {surplus.total()} came that "
        f"were not sent; missing {[p[:20] for p in list(missing)[:3]]}, "
        f"surplus {[p[:20] for p in list(surplus)[:3]]}",
    )


def receive(bench: Bench, sender: RemoteAgent, owner: RemoteAgent, count: int) -> list[bytes]:
    """Wait for so many notifications, and a little longer for one too many."""
    waiting = owner.start("take_notifications", count, bench.harness.patience_s)
    sender.call("poll_for", 0.05)
    taken, _ = waiting.result(bench.harness.patience_s + 10)
    more, _ = owner.notifications(1, 0.05)
    return [payload for _, payload in taken + more]


def check_after_its_bytes(bench: Bench, op: Op) -> None:
    """The picture is taken by the owner's process, right when its poll returns the message."""
    here, there = bench.here, bench.there
    nbytes = bench.fit(8 * MIB)
    target, source = (here, there) if op == "read" else (there, here)
    there.notifications(1000, 0.02)
    for seed in range(bench.rounds(5, 50)):
        source.data[:nbytes] = pattern(seed, nbytes)
        target.data[:nbytes] = 0xEE
        waiting = there.start(
            "take_notifications", 1, bench.harness.patience_s, tail_first(target, nbytes)
        )
        handle = here.submit(op, bench.peer, [(0, nbytes)], [(0, nbytes)], b"now")
        here.finish(handle, f"a {op} with a notification")
        here.call("poll_for", 0.02)
        taken, seen = waiting.result(bench.harness.patience_s + 10)
        expect_equal("notifications that came", [p for _, p in taken], [b"now"])
        what = f"destination when the {op}'s notification came"
        expect_bytes(what, in_order(seen), pattern(seed, nbytes))


class NotificationRules:
    """NOTIFY."""

    @rule(
        "NOTIFY-01",
        "Every notification arrives exactly once with its own bytes, whatever their values and "
        "number, none included.",
        needs=("notify",),
        placements=BOTH,
    )
    def test_payloads(self, bench: Bench) -> None:
        most = bench.can.notify_max_bytes
        sent = [bytes((i + k) % 256 for k in range(min(most, i % 257))) for i in range(998)]
        sent += [bytes(range(256))[:most], b"\xff" * most, b"\0" * most]
        bench.there.notifications(1000, 0.02)
        for start in range(0, len(sent), 100):
            bench.here.notify(bench.peer, *sent[start : start + 100])
        seen = receive(bench, bench.here, bench.there, len(sent))
        expect_payloads("notifications of all byte values", seen, sent)

    @rule(
        "NOTIFY-02",
        "The sender of a notification is the name under which add_peer knows that agent.",
        needs=("notify",),
        placements=BOTH,
    )
    def test_sender(self, bench: Bench) -> None:
        name = bench.there.add_peer(bench.here).agent
        bench.there.notifications(1000, 0.02)
        bench.here.notify(bench.peer, b"who")
        bench.here.call("poll_for", 0.02)
        taken, _ = bench.there.notifications(1)
        expect_equal("sender and payload", taken, [(name, b"who")])

    @rule(
        "NOTIFY-03",
        "Ten thousand notifications to a peer that does not poll meanwhile all arrive, each once.",
        needs=("notify",),
    )
    def test_ten_thousand(self, bench: Bench) -> None:
        owner = bench.agent(polls_when_idle=False)
        agent = bench.agent()
        peer = agent.add_peer(owner)
        most = bench.can.notify_max_bytes
        sent = [(str(i).encode() * (1 + i % 50))[: max(5, most)] for i in range(10_000)]
        agent.notify(peer, *sent)
        expect_payloads("of 10,000 notifications", receive(bench, agent, owner, len(sent)), sent)

    @rule(
        "NOTIFY-04",
        "A notification tied to a write comes when the owner can see every byte of it, not before.",
        needs=("write", "notify_with_transfer"),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_after_a_write(self, bench: Bench) -> None:
        check_after_its_bytes(bench, "write")

    @rule(
        "NOTIFY-05",
        "A notification tied to a read comes when every byte has been read, not before.",
        needs=("read", "notify_with_transfer"),
        placements=BOTH,
        tiers=("quick", "full"),
    )
    def test_after_a_read(self, bench: Bench) -> None:
        check_after_its_bytes(bench, "read")

    @rule(
        "NOTIFY-06",
        "An operation without bytes still sends its notification, exactly once.",
        needs=("notify_with_transfer",),
    )
    def test_without_bytes(self, bench: Bench) -> None:
        here = bench.here
        bench.there.notifications(1000, 0.02)
        sent = []
        for op in bench.declared_ops() or (bench.any_op(),):
            for pieces in ([], [(0, 0), (7, 0)]):
                sent.append(f"{op} {len(pieces)}".encode())
                here.finish(here.submit(op, bench.peer, pieces, pieces, sent[-1]), "an empty list")
        seen = receive(bench, here, bench.there, len(sent))
        expect_payloads("notifications of operations without bytes", seen, sent)

    @rule(
        "NOTIFY-07",
        "Of many operations in flight each that is done has sent its own notification, exactly "
        "once.",
        needs=("notify_with_transfer",),
        placements=BOTH,
    )
    def test_many(self, bench: Bench) -> None:
        here, op = bench.here, bench.any_op()
        bench.there.notifications(1000, 0.02)
        sent = [f"number {k}".encode() for k in range(200)]
        flying: list[int] = []
        pieces = [(0, bench.fit(999))]
        for payload in sent:
            if len(flying) == (bench.can.inflight_max or 200):
                here.finish(flying.pop(0), "an operation with a notification")
            flying.append(here.submit(op, bench.peer, pieces, pieces, payload))
        for handle in flying:
            expect_equal("state of an operation", here.wait(handle).state, State.DONE)
        seen = receive(bench, here, bench.there, len(sent))
        expect_payloads("notifications of operations in flight", seen, sent)

    @rule(
        "NOTIFY-08",
        "Operations and notifications proceed although their sender does not poll.",
        needs=("notify",),
        lacks=("needs_polling_to_send",),
    )
    def test_without_polling(self, bench: Bench) -> None:
        agent, owner = bench.agent(polls_when_idle=False), bench.agent()
        peer = agent.add_peer(owner)
        sent = [b"alone"]
        agent.notify(peer, *sent)
        if bench.can.write and bench.can.notify_with_transfer:
            sent.append(b"tied")
            whole = [(0, bench.fit(MIB // 2))]
            agent.submit("write", peer, whole, whole, sent[-1])
        taken, _ = owner.notifications(len(sent))
        expect_payloads("from a sender that does not poll", [p for _, p in taken], sent)
