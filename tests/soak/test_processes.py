"""Thousands of requests between real processes, some of which are killed and started again."""

import multiprocessing
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.tiny_engine import PAGE
from tests.soak.engine_process import serve

REQUESTS, IN_FLIGHT = 10_000, 8
KILLS = 12
LEASE_S, TIMEOUT_S, MEET_S = 5.0, 4.0, 2.0
QUIET_S = 2 * LEASE_S + TIMEOUT_S


def free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        return int(any_socket.getsockname()[1])


class Engine:
    """An engine's process, which may be killed and started again behind the same port."""

    def __init__(
        self, engine_id: str, transport: str, direction: str, shape: dict[str, int]
    ) -> None:
        self.engine_id, self.shape = engine_id, shape
        self.config = {
            "transport": transport,
            "direction": direction,
            "lease_s": LEASE_S,
            "timeout_s": TIMEOUT_S,
            "handshake": {"port": free_port(), "timeout_s": MEET_S},
        }
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, self.engine_id, self.config, self.shape), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60), f"engine {self.engine_id} does not start"
        self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)
        assert not self.process.is_alive()
        self.pipe.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()


@dataclass(slots=True)
class Flight:
    """A request that has not ended."""

    tokens: int
    since_s: float
    asked: bool = False  # the decode engine knows of it; until then the prefill engine does


class Soak:
    """Sends requests through two engines, and counts what becomes of them."""

    def __init__(self, p: Engine, d: Engine, seed: int) -> None:
        self.p, self.d, self.rng = p, d, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.no_room = 0
        self.next = 0
        self.flying: dict[int, Flight] = {}
        self.recoveries: list[float] = []
        self.waits_since_s: float | None = None

    def run(self, requests: int, *, kills: int = 0) -> None:
        """Have so many more requests end, and kill an engine so many times meanwhile."""
        until = self.outcomes.total() + requests
        points = [self.outcomes.total() + self.rng.randrange(requests) for _ in range(kills)]
        points.sort(reverse=True)
        while self.outcomes.total() < until:
            while len(self.flying) < IN_FLIGHT and self.outcomes.total() + len(self.flying) < until:
                self._offer()
            for engine in (self.p, self.d):
                while engine.pipe.poll(0.0005):
                    self._heard(*engine.pipe.recv())
            late = [n for n, each in self.flying.items() if time.monotonic() > each.since_s + 60]
            assert not late, f"requests {late} neither end nor fail"
            if points and self.outcomes.total() >= points[-1]:
                points.pop()
                self._kill(self.rng.choice([self.p, self.d]))

    def status(self, engine: Engine) -> dict[str, int]:
        """Ask an engine what it holds."""
        engine.pipe.send(("status",))
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if engine.pipe.poll(0.1):
                what, *rest = engine.pipe.recv()
                if what == "status":
                    return dict(rest[0])
                self._heard(what, *rest)
        raise AssertionError(f"engine {engine.engine_id} does not answer")

    def _offer(self) -> None:
        flight = Flight(self.rng.randint(1, 6 * PAGE), time.monotonic())
        self.flying[self.next] = flight
        self.p.pipe.send(("offer", self.next, flight.tokens))
        self.next += 1

    def _heard(self, what: str, number: int, said: Any) -> None:
        flight = self.flying.get(number)
        assert flight is not None, f"request {number} has ended before, and now: {what} {said}"
        if what == "ended":
            self._ended(number, said)
        elif said is None:  # readers that have died hold what there is
            del self.flying[number]
            self.no_room += 1
            time.sleep(0.01)
        else:
            chance = self.rng.random()
            abort = "waiting" if chance < 0.025 else "loading" if chance < 0.05 else ""
            flight.asked = True
            self.d.pipe.send(("ask", number, flight.tokens, said, abort))

    def _ended(self, number: int, how: str) -> None:
        assert how != "WRONG BYTES", f"request {number}"
        del self.flying[number]
        known = how in {"ok", "aborted", "lost"}
        self.outcomes[how if known else "failed"] += 1
        if not known:
            self.reasons[how[:100]] += 1
        if how == "ok" and self.waits_since_s is not None:
            self.recoveries.append(time.monotonic() - self.waits_since_s)
            self.waits_since_s = None

    def _kill(self, victim: Engine) -> None:
        """Kill an engine. What it had is lost; the other one says what became of the rest."""
        victim.kill()
        for number, flight in list(self.flying.items()):
            if flight.asked == (victim is self.d):
                self._ended(number, "lost")
        victim.start()
        self.waits_since_s = time.monotonic()


@pytest.fixture(
    params=[(t, way) for t in ("local", "nixl") for way in ("auto", "push")], ids="-".join
)
def soak(request: pytest.FixtureRequest) -> Iterator[Soak]:
    transport, direction = request.param
    p = Engine("p", transport, direction, {"tp": 2})
    d = Engine("d", transport, direction, {"tp": 1, "pp": 2})
    yield Soak(p, d, seed=1)
    p.close()
    d.close()


@pytest.mark.soak
@pytest.mark.multi_process
@pytest.mark.timeout(2 * 3600)
def test_nothing_is_lost_stale_or_held_for_ever(
    soak: Soak, capsys: pytest.CaptureFixture[str]
) -> None:
    soak.run(REQUESTS // 2, kills=KILLS)
    soak.run(500)  # caches and pools have their size by now
    before = {engine.engine_id: soak.status(engine) for engine in (soak.p, soak.d)}
    soak.run(REQUESTS // 2 - 500)
    time.sleep(QUIET_S)
    after = {engine.engine_id: soak.status(engine) for engine in (soak.p, soak.d)}
    recovered = sorted(round(each, 2) for each in soak.recoveries)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{dict(soak.outcomes)}, {soak.no_room} times no room, first success after "
            f"{recovered} s\n{dict(soak.reasons)}\n"
            f"{before}\n{after}\n"
        )
    for name, status in after.items():
        assert (status["pages"], status["held"], status["loading"]) == (0, 0, 0)
        assert abs(status["descriptors"] - before[name]["descriptors"]) <= 4
        assert status["threads"] <= before[name]["threads"] + 2
        assert status["rss_kib"] < before[name]["rss_kib"] + 4_000
    assert soak.outcomes["ok"] > 0.7 * REQUESTS
    assert soak.recoveries
