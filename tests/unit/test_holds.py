"""How long a producer keeps blocks, and how a consumer has them kept for longer."""

from concurrent.futures import Future

import pytest

from kvbridge.connector.holds import Holds
from kvbridge.connector.params import RemoteRequest
from kvbridge.connector.renewals import Renewals
from kvbridge.errors import HandshakeError
from kvbridge.handshake import EngineAddress, RenewalReply, RenewalRequest
from kvbridge.session import Lease
from kvbridge.session.leases import SLOTS

LEASE_S, LONGEST_S = 30.0, 100.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holds(clock: Clock) -> Holds:
    return Holds(LEASE_S, LONGEST_S, clock)


def test_what_is_kept_ends_once_its_time_is_over(holds: Holds, clock: Clock) -> None:
    assert holds.grant("r", "r#1") is not None
    assert [hold.transfer_id for hold in holds.take()[0]] == ["r#1"]
    clock.now_s = 20.0
    assert holds.keep(["r#1", "never heard of"]) == ([True, False], LEASE_S)
    clock.now_s = 49.9
    assert holds.take() == ((), ())
    clock.now_s = 50.0
    assert holds.take() == ((), ("r#1",))
    assert holds.take() == ((), ())
    assert "r" in holds, "the workers have not let go yet"


def test_what_the_workers_let_go_of_is_not_renewed(holds: Holds, clock: Clock) -> None:
    holds.grant("r", "r#1")
    clock.now_s = 31.0
    assert holds.keep(["r#1"])[0] == [True], "nobody has let go of it, in a step as long as that"
    clock.now_s = 61.0
    assert holds.take()[1] == ("r#1",)
    assert holds.keep(["r#1"])[0] == [False]


def test_leases_end_by_their_deadlines_whatever_was_first(holds: Holds, clock: Clock) -> None:
    for clock.now_s, name in ((0.0, "a"), (1.0, "b"), (2.0, "c")):
        holds.grant(name, name)
    clock.now_s = 15.0
    assert holds.keep(["a"])[0] == [True]
    clock.now_s = 31.5
    assert holds.take()[1] == ("b",)
    holds.sent(["c"])
    clock.now_s = 45.0
    assert holds.take()[1] == ("a",)


def test_nothing_is_kept_for_ever(holds: Holds, clock: Clock) -> None:
    holds.grant("r", "r#1")
    while holds.keep(["r#1"])[0] == [True] and not holds.take()[1]:
        clock.now_s += 1.0
    assert clock.now_s == LONGEST_S


def test_an_answer_says_how_long_at_least(holds: Holds, clock: Clock) -> None:
    holds.grant("r", "r#1")
    for clock.now_s in (20.0, 40.0, 60.0):
        assert holds.keep(["r#1"]) == ([True], LEASE_S)
    clock.now_s = 80.0
    assert holds.keep(["r#1"]) == ([True], 20.0)


def test_a_drained_engine_keeps_nothing_for_longer(holds: Holds, clock: Clock) -> None:
    holds.grant("r", "r#1")
    holds.take()
    clock.now_s = 10.0
    holds.drain(25.0)
    assert holds.draining
    assert holds.keep(["r#1"]) == ([True], 25.0)
    assert holds.take() == ((), ())
    clock.now_s = 35.0
    assert holds.keep(["r#1"])[0] == [False]
    assert holds.take() == ((), ("r#1",))


def test_slots_come_back_and_run_out(holds: Holds) -> None:
    for i in range(SLOTS):
        assert holds.grant(f"r{i}", f"r{i}#1") is not None
    assert holds.grant("one more", "one more#1") is None
    holds.sent({"r7", "never heard of"})
    assert "r7" not in holds
    assert holds.keep(["r7#1"])[0] == [False]
    lease = holds.grant("one more", "one more#1")
    assert lease is not None
    assert len(holds) == SLOTS


# --- the consumer's side -------------------------------------------------------------------------


class Asked:
    """Answers when told to."""

    def __init__(self) -> None:
        self.questions: list[tuple[RenewalRequest, Future[RenewalReply]]] = []
        self.broken = False

    def renew(
        self, address: EngineAddress | None, request: RenewalRequest, *, timeout_s: float
    ) -> "Future[RenewalReply]":
        if self.broken:
            raise HandshakeError("the dialer is closed")
        answer: Future[RenewalReply] = Future()
        self.questions.append((request, answer))
        return answer

    def close(self) -> None:
        self.broken = True


def remote(request_id: str, engine_id: str = "p", lease_s: float = LEASE_S) -> RemoteRequest:
    address = EngineAddress("127.0.0.1", 5600)
    return RemoteRequest(
        engine_id, request_id, address, ((0,),), 4, "incarnation", 1, Lease(0, 1), lease_s
    )


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def renewals(asked: Asked, clock: Clock) -> Renewals:
    return Renewals(asked, "d", timeout_s=5.0, clock=clock)


def test_what_waits_is_renewed_until_its_load_begins(
    renewals: Renewals, asked: Asked, clock: Clock
) -> None:
    renewals.wait("a", remote("a#1"))
    renewals.wait("b", remote("b#2"))
    renewals.wait("a", remote("a#1"))
    renewals.poll()
    assert not asked.questions, "there is time"
    clock.now_s = LEASE_S / 3
    renewals.poll()
    renewals.poll()
    (request, answer) = asked.questions.pop()
    assert not asked.questions, "one question for both, and once"
    assert (request.engine_id, request.requests, request.asker) == ("p", ("a#1", "b#2"), "d")
    renewals.forget("b")
    answer.set_result(RenewalReply((True, True), 60.0))
    clock.now_s += 5.0
    renewals.poll()
    assert not asked.questions
    clock.now_s += 20.0
    renewals.poll()
    assert asked.questions.pop()[0].requests == ("a#1",)
    assert renewals.counts.kept == 2


def test_engines_are_asked_each_for_its_own(renewals: Renewals, asked: Asked, clock: Clock) -> None:
    for i in range(100):
        renewals.wait(f"{i}", remote(f"{i}#1", engine_id="p" if i % 10 else "q"))
    clock.now_s = LEASE_S
    renewals.poll()
    by_engine = [(request.engine_id, len(request.requests)) for request, _ in asked.questions]
    assert sorted(by_engine) == [("p", 26), ("p", 64), ("q", 10)]


def test_no_answer_is_asked_for_again_and_a_refusal_is_not(
    renewals: Renewals, asked: Asked, clock: Clock
) -> None:
    renewals.wait("a", remote("a#1"))
    renewals.wait("b", remote("b#1"))
    clock.now_s = 10.0
    renewals.poll()
    asked.questions.pop()[1].set_exception(HandshakeError("silence"))
    clock.now_s = 15.0
    renewals.poll()
    asked.questions.pop()[1].set_result(RenewalReply((False, True), LEASE_S))
    clock.now_s = 26.0
    renewals.poll()
    assert asked.questions.pop()[0].requests == ("b#1",)
    asked.broken = True
    clock.now_s = 60.0
    renewals.poll()
    counts = renewals.counts
    assert (counts.kept, counts.refused, counts.failed) == (1, 1, 2)


def test_what_is_still_being_computed_is_asked_for_until_it_is_kept(
    renewals: Renewals, asked: Asked, clock: Clock
) -> None:
    """Its name is all that is known of it, and that it is not kept may mean not yet."""
    address = EngineAddress("127.0.0.1", 5600)
    renewals.wait("a", RemoteRequest("p", "chosen", address, (), 4, is_expected=True))
    clock.now_s = 1.0
    renewals.poll()
    (request, answer) = asked.questions.pop()
    assert (request.engine_id, request.incarnation, request.requests) == ("p", "", ("chosen",))
    answer.set_result(RenewalReply((False,), LEASE_S))
    clock.now_s = 2.0
    renewals.poll()
    renewals.poll()
    asked.questions.pop()[1].set_result(RenewalReply((True,), LEASE_S))
    renewals.poll()
    clock.now_s = 2.0 + LEASE_S / 3
    renewals.poll()
    asked.questions.pop()[1].set_result(RenewalReply((True,), LEASE_S))
    renewals.poll()
    counts = renewals.counts
    assert (counts.kept, counts.refused, counts.failed) == (2, 0, 0)


def test_blocks_without_a_lease_are_not_asked_for(
    renewals: Renewals, asked: Asked, clock: Clock
) -> None:
    renewals.wait("a", RemoteRequest("p", "a#1", None, ((0,),), 4))
    clock.now_s = 1000.0
    renewals.poll()
    assert not asked.questions
