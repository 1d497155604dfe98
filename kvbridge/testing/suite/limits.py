"""LIMIT: what is declared is true, up to the last byte."""

from contextlib import suppress

from kvbridge.errors import NotSupportedError
from kvbridge.testing.bench import ARENA_NBYTES, MIB, Bench
from kvbridge.testing.rules import rule
from kvbridge.testing.suite.moves import check_copies
from kvbridge.testing.suite.notifications import expect_payloads, receive
from kvbridge.testing.violations import expect, expect_equal, expect_in, expect_raises
from kvbridge.transport import Capabilities

DESCRIPTORS_TRIED_MAX = 1 << 16
PIECE_NBYTES = 128


def contradictions(can: Capabilities) -> list[str]:
    """Say what cannot be true of any transport."""
    wrong = []
    if bool(can.notify_max_bytes) != (can.notify or can.notify_with_transfer):
        wrong.append(
            f"notify_max_bytes is {can.notify_max_bytes} with notify={can.notify} and "
            f"notify_with_transfer={can.notify_with_transfer}"
        )
    if can.notify_with_transfer and not (can.read or can.write):
        wrong.append("notify_with_transfer without read or write")
    if (can.read or can.write) and not can.memory_kinds:
        wrong.append("read or write without any memory kind")
    if can.preferred_direction != "either" and not getattr(can, can.preferred_direction):
        wrong.append(f"preferred_direction is {can.preferred_direction!r}, which is not declared")
    names = ("descriptors_max", "inflight_max", "transfer_max_bytes", "merge_helps_below")
    wrong += [f"{name} is {getattr(can, name)}" for name in names if getattr(can, name) < 0]
    return wrong


class LimitRules:
    """LIMIT."""

    @rule(
        "LIMIT-01",
        "What a transport declares does not contradict itself and stays the same, for its peers "
        "too.",
    )
    def test_declaration(self, bench: Bench) -> None:
        here = bench.here
        can: Capabilities = here.call("capabilities")
        expect(isinstance(can, Capabilities), f"capabilities: is {type(can).__name__}")
        expect_equal("capabilities when asked again", here.call("capabilities"), can)
        for what in (can, bench.can):
            wrong = contradictions(what)
            expect(not wrong, f"capabilities contradict themselves: {'; '.join(wrong)}")
            expect_in("peer_loss", what.peer_loss, ("event", "on_use", "none"))
            expect_in("preferred_direction", what.preferred_direction, ("read", "write", "either"))

    @rule(
        "LIMIT-02",
        "A notification of exactly notify_max_bytes arrives; one byte more is refused with "
        "NotSupportedError.",
        needs=("notify",),
    )
    def test_notification_size(self, bench: Bench) -> None:
        most = bench.can.notify_max_bytes
        payload = bytes(k % 251 for k in range(most))
        bench.there.notifications(1000, 0.02)
        bench.here.notify(bench.peer, payload)
        with expect_raises(f"notify of {most + 1} bytes", NotSupportedError):
            bench.here.notify(bench.peer, payload + b"x")
        seen = receive(bench, bench.here, bench.there, 1)
        expect_payloads("the largest notification", seen, [payload])

    @rule(
        "LIMIT-03",
        "A notification of exactly notify_max_bytes arrives with its transfer; one byte more is "
        "refused with NotSupportedError, and nothing moves.",
        needs=("notify_with_transfer",),
    )
    def test_tied_notification_size(self, bench: Bench) -> None:
        here, there, op, most = bench.here, bench.there, bench.any_op(), bench.can.notify_max_bytes
        payload = bytes(k % 251 for k in range(most))
        there.notifications(1000, 0.02)
        here.data[:10], there.data[:10] = 1, 2
        with expect_raises(f"{op} with a notification of {most + 1} bytes", NotSupportedError):
            here.submit(op, bench.peer, [(0, 10)], [(0, 10)], payload + b"x")
        expect_equal("bytes after the refusal", (here.data[0], there.data[0]), (1, 2))
        here.finish(here.submit(op, bench.peer, [(0, 10)], [(0, 10)], payload), op)
        expect_payloads("the largest notification", receive(bench, here, there, 1), [payload])

    @rule(
        "LIMIT-04",
        "An operation of exactly descriptors_max pieces works; one piece more is refused with "
        "NotSupportedError.",
        needs=("descriptors_max",),
    )
    def test_descriptors(self, bench: Bench) -> None:
        op, most = bench.any_op(), bench.can.descriptors_max
        pieces = [(k % 1000 * PIECE_NBYTES, 1) for k in range(most + 1)]
        if most <= DESCRIPTORS_TRIED_MAX:
            check_copies(bench, op, [(k, 2 * k, 1) for k in range(most)])
        with expect_raises(f"{op} of {most + 1} pieces", NotSupportedError):
            bench.here.submit(op, bench.peer, pieces, pieces)

    @rule(
        "LIMIT-05",
        "An operation of exactly transfer_max_bytes works; one byte more is refused with "
        "NotSupportedError.",
        needs=("transfer_max_bytes",),
    )
    def test_bytes(self, bench: Bench) -> None:
        op, most = bench.any_op(), bench.can.transfer_max_bytes
        if most <= ARENA_NBYTES - 2 * MIB:
            check_copies(bench, op, [(3, 1, most)])
        # The same memory as often as it takes: it is refused for its length alone.
        whole, rest = divmod(most + 1, 32 * MIB)
        pieces = [(0, 32 * MIB)] * whole + [(0, rest)]
        if len(pieces) > (bench.can.descriptors_max or len(pieces)):
            bench.not_applicable("descriptors_max pieces cannot hold so many bytes here")
        with expect_raises(f"{op} of {most + 1} bytes", NotSupportedError):
            bench.here.submit(op, bench.peer, pieces, pieces)

    @rule(
        "LIMIT-06",
        "inflight_max operations may be in flight at once; one more is refused with "
        "NotSupportedError, or waits its turn.",
        needs=("inflight_max",),
    )
    def test_inflight(self, bench: Bench) -> None:
        here, op, most = bench.here, bench.any_op(), min(bench.can.inflight_max, 4096)
        nbytes = bench.fit(64 << 10)
        pieces = [(0, nbytes)]
        # Nothing polls meanwhile, so none is reported as ended before all of them are submitted.
        here.call("set_polling", False)
        handles = [here.submit(op, bench.peer, pieces, pieces) for _ in range(most)]
        with suppress(NotSupportedError):
            handles.append(here.submit(op, bench.peer, pieces, pieces))
        here.call("set_polling", True)
        for handle in handles:
            here.finish(handle, f"a {op} among {most}")
