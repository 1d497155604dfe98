"""A rank meets the engines that its requests name: shared, in parallel, anew after a restart."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvbridge.errors import HandshakeError, HandshakeTimeoutError, IncompatibleError
from kvbridge.handshake import Dialer, EngineAddress, HandshakeServer, hand_over
from kvbridge.model import memory_region
from kvbridge.plan import BlockTable
from kvbridge.session import Introduction, Introductions, Transfer
from kvbridge.transport import State, open_transport
from tests.integration.test_session import Clock, Rank, make_rank

NOBODY = EngineAddress("127.0.0.1", 9)


class Consumer:
    """A rank with its introductions, on a clock that moves only when told."""

    def __init__(self, **options: Any) -> None:
        self.rank = make_rank(open_transport({"transport": "local"}), "d")
        self.clock = Clock()
        self.dialer = Dialer()
        options = {"timeout_s": 5.0, "uniform": lambda _, high: high, **options}
        self.introductions = Introductions(
            self.rank.agent, self.dialer, clock=self.clock, **options
        )

    def meet(self, engine_id: str, address: EngineAddress, **wanted: Any) -> Introduction:
        """Meet an engine, and wait until that is over."""
        introduction = self.introductions.meet(engine_id, address, **wanted)
        self.wait(lambda: introduction.state in {"live", "failed"})
        return introduction

    def pull(self, engine_id: str, page: int = 1) -> Transfer:
        table = [BlockTable([page])]
        transfer = self.rank.agent.pull(engine_id, "r", table, table, end_token=4)
        self.wait(lambda: transfer.state is not State.PENDING)
        return transfer

    def wait(self, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline_s, "it neither ends nor fails"
            self.introductions.poll()
            self.rank.agent.poll()
            time.sleep(0.001)

    def close(self) -> None:
        self.dialer.close()
        self.introductions.close()
        self.rank.agent.close()


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    consumer = Consumer()
    yield consumer
    consumer.close()


@pytest.fixture
def producer() -> Iterator[Callable[..., tuple[Rank, HandshakeServer]]]:
    made: list[tuple[Rank, HandshakeServer]] = []

    def make(engine_id: str = "p", port: int = 0, **changes: Any) -> tuple[Rank, HandshakeServer]:
        rank = make_rank(open_transport({"transport": "local"}), engine_id, **changes)
        server = HandshakeServer(port=port)
        hand_over(server, rank.metadata)
        made.append((rank, server))
        return made[-1]

    yield make
    for rank, server in made:
        server.close()
        rank.agent.close()


MakeProducer = Callable[..., tuple[Rank, HandshakeServer]]


def test_a_request_waits_for_nothing_while_engines_meet(
    consumer: Consumer, producer: MakeProducer
) -> None:
    rank, server = producer()
    rank.memory[1] = 7
    introduction = consumer.introductions.meet("p", server.address)
    assert introduction.state == "asking"
    consumer.wait(lambda: introduction.state == "live")
    assert consumer.pull("p").state is State.DONE
    assert (consumer.rank.memory[1] == 7).all()


def test_two_requests_share_one_introduction(consumer: Consumer, producer: MakeProducer) -> None:
    _, server = producer()
    one = consumer.introductions.meet("p", server.address)
    assert consumer.introductions.meet("p", server.address) is one
    consumer.wait(lambda: one.state == "live")
    assert consumer.introductions.meet("p", server.address) is one


def test_an_engine_that_is_not_there_holds_up_no_other(
    consumer: Consumer, producer: MakeProducer
) -> None:
    _, server = producer()
    dead = [consumer.introductions.meet(f"dead-{i}", NOBODY) for i in range(20)]
    assert consumer.meet("p", server.address).state == "live"
    assert {each.state for each in dead} == {"asking"}
    consumer.wait(lambda: all(each.state == "failed" for each in dead))
    assert all(isinstance(each.error, HandshakeTimeoutError) for each in dead)


def test_what_failed_is_not_tried_again_at_once(consumer: Consumer, producer: MakeProducer) -> None:
    """B47: the error names both ids and the address, and is not repeated without end."""
    _, server = producer("x")
    failed = consumer.meet("y", server.address)
    assert isinstance(failed.error, HandshakeError)
    assert "'y' was expected here, this is 'x'" in str(failed.error)
    served = server.refused
    for _ in range(50):
        assert consumer.introductions.meet("y", server.address) is failed
    assert server.refused == served
    pauses_s = []
    for _ in range(10):
        pauses_s.append(failed.retry_s - consumer.clock.now_s)
        consumer.clock.now_s = failed.retry_s
        failed = consumer.meet("y", server.address)
    assert pauses_s[:4] == pytest.approx([0.4, 0.8, 1.6, 3.2])
    assert pauses_s[-1] == pytest.approx(30.0)


def test_an_engine_that_comes_later_is_met_after_the_pause(
    consumer: Consumer, producer: MakeProducer
) -> None:
    _, server = producer("x")
    failed = consumer.meet("p", server.address)
    server.close()
    producer("p", port=server.port)
    consumer.clock.now_s = failed.retry_s
    assert consumer.meet("p", server.address).state == "live"


def test_engines_that_differ_are_refused_on_both_sides(
    consumer: Consumer, producer: MakeProducer
) -> None:
    """B50: at once, with both values, and nothing is left behind."""
    _, server = producer(name="other.0")
    failed = consumer.meet("p", server.address)
    assert isinstance(failed.error, IncompatibleError)
    assert failed.error.differences == {"layers": ([[0, "layers.0"]], [[0, "other.0"]])}
    assert "engine 'd' is incompatible: layers" in server.refusals[0]
    assert not consumer.rank.agent.sessions
    assert not consumer.rank.topology.remote_engines


def test_b48_an_engine_that_restarted_behind_its_address_is_met_anew(
    consumer: Consumer, producer: MakeProducer
) -> None:
    first, server = producer()
    consumer.meet("p", server.address)
    old = consumer.rank.agent.sessions["p"]
    server.close()
    first.agent.close()
    second, server = producer(port=server.port, incarnation="2")
    assert second.agent.incarnation != first.agent.incarnation
    second.memory[1], first.memory[:] = 9, 5
    # A request knows which start of the engine holds its blocks.
    wanted = second.agent.incarnation
    assert consumer.meet("p", server.address, incarnation=wanted).state == "live"
    assert consumer.rank.agent.sessions["p"] is not old
    assert consumer.pull("p").state is State.DONE
    assert (consumer.rank.memory[1] == 9).all()


def test_an_engine_that_registered_anew_is_followed(
    consumer: Consumer, producer: MakeProducer
) -> None:
    rank, server = producer()
    consumer.meet("p", server.address)
    moved = np.full_like(rank.memory, 3)
    at = moved.ctypes.data - rank.memory.ctypes.data
    layers = tuple(
        replace(layer, base_address=layer.base_address + at) for layer in rank.cache.layers
    )
    rank.agent.renew(replace(rank.cache, layers=layers, regions=(memory_region(moved),)))
    hand_over(server, rank.metadata)
    generation = rank.agent.generation
    assert generation == 2
    assert consumer.meet("p", server.address, generation=generation).state == "live"
    rank.memory[:] = 5
    assert consumer.pull("p").state is State.DONE
    assert (consumer.rank.memory[1] == 3).all()


def test_b48_after_kill_9_and_restart_the_third_request_succeeds(
    consumer: Consumer, tmp_path: Path
) -> None:
    """The second request may fail; nothing waits for ever, nothing lands at old addresses."""
    with EngineProcess(tmp_path, value=1) as first:
        port = first.port
        consumer.meet("p", EngineAddress("127.0.0.1", port))
        assert consumer.pull("p").state is State.DONE
        first.kill()
        failed = consumer.pull("p")
        assert failed.state is State.FAILED
        consumer.introductions.doubt("p")
    with EngineProcess(tmp_path, value=2, port=port):
        assert consumer.meet("p", EngineAddress("127.0.0.1", port)).state == "live"
        assert consumer.pull("p").state is State.DONE
        assert (consumer.rank.memory[1] == 2).all()


def test_nothing_is_kept_of_an_engine_that_is_gone(
    consumer: Consumer, producer: MakeProducer
) -> None:
    first, server = producer()
    consumer.meet("p", server.address)
    server.close()
    first.agent.close()
    consumer.introductions.doubt("p")
    assert consumer.meet("p", server.address).state == "failed"
    assert not consumer.rank.agent.sessions
    assert not consumer.rank.topology.remote_engines


def test_a_fault_of_ours_fails_the_introduction_and_not_the_step(
    consumer: Consumer, producer: MakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = producer()

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(consumer.rank.agent, "connect", broken)
    failed = consumer.meet("p", server.address)
    assert "meeting the engine failed: ZeroDivisionError: a bug" in str(failed.error)


def test_a_rank_that_hangs_while_it_is_joined_holds_up_no_other(
    consumer: Consumer, producer: MakeProducer, tmp_path: Path
) -> None:
    _, server = producer("q")
    with EngineProcess(tmp_path, value=1) as stuck:
        reply = consumer.dialer.fetch(EngineAddress("127.0.0.1", stuck.port), timeout_s=5).result()
        stuck.stop()
        relay = HandshakeServer()  # answers in its place, as a stopped engine's kernel would not
        try:
            hand_over(relay, reply.by_rank)
            introduction = consumer.introductions.meet("p", relay.address)
            consumer.wait(lambda: introduction.state == "joining")
            assert consumer.meet("q", server.address).state == "live"
            assert consumer.pull("q").state is State.DONE
            consumer.wait(lambda: introduction.state in {"live", "failed"})
        finally:
            relay.close()


class EngineProcess:
    """An engine of one rank in a process of its own, whose memory is full of one value."""

    def __init__(self, folder: Path, *, value: int, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(value), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve(value: int, port: int) -> None:
    transport = open_transport({"transport": "local"})
    rank = make_rank(transport, "p", incarnation=uuid.uuid4().hex)
    rank.memory[:] = value
    server = HandshakeServer(port=port)
    hand_over(server, rank.metadata)
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    while True:
        rank.agent.poll()
        time.sleep(0.005)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
