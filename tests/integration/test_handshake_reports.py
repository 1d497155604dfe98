"""Reports about engines that meet, each with its small input and the right value."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from kvbridge.connector import ConnectorConfig, scheduler_connector, worker_connector
from kvbridge.connector.bridge import BridgeConnector
from kvbridge.errors import ConfigError
from kvbridge.handshake import HandshakeServer
from kvbridge.model import CacheGroup, opaque_layer
from tests.integration.tiny_engine import (
    PAGES,
    Make,
    TinyEngine,
    place,
    run,
    scheduler_of,
    worker_of,
)

LOCAL = {"transport": "local"}
IMPATIENT = {**LOCAL, "handshake": {"timeout_s": 1.0}}


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of something that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


def params_at(port: int, engine_id: str = "dead") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_block_ids": [[1]],
        "remote_num_tokens": 4,
    }


def test_b42_requests_to_a_dead_peer_fail_once_each_and_others_go_on(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", IMPATIENT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    d.load("r1", [2], 4, params_at(port, "late"))
    d.load("r2", [3], 4, params_at(port, "late"))
    d.load("r3", [4], 4, p.prefill("r3", [5], 4))
    run([p, d], lambda: len(d.loaded) == 3)
    assert d.loaded["r3"].ok
    for failed in ("r1", "r2"):
        assert "no answer from" in d.loaded[failed].error
    # The engine is there now: a later request may succeed, once the pause is over.
    late = engine("late", {**LOCAL, "handshake": {"port": port}})
    deadline_s, tries = time.monotonic() + 20, 0
    while time.monotonic() < deadline_s:
        request_id = f"again-{(tries := tries + 1)}"
        d.load(request_id, [2], 4, late.prefill(request_id, [6], 4))
        run([late, d], lambda: request_id in d.loaded)  # noqa: B023
        if d.loaded[request_id].ok:
            return
        time.sleep(0.1)
    pytest.fail(f"never met again in {tries} tries: {d.loaded[request_id].error}")


def test_b42_an_engine_that_has_registered_nothing_yet_is_asked_again(engine: Make) -> None:
    d = engine("d", LOCAL)
    starting = BridgeConnector.scheduler(ConnectorConfig(), engine_id="p")
    port = starting.scheduler_half.server.address.port
    d.load("r", [2], 4, params_at(port, "p"))
    deadline_s = time.monotonic() + 1.0
    while time.monotonic() < deadline_s:
        d.step()
    assert d.loaded == {}
    p = engine("p", LOCAL, scheduler=starting)
    p.fill([1])
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok


def test_b56_peers_that_take_their_time_stop_no_step(engine: Make, silent: int) -> None:
    """Three silent peers, a request to each and another to one of them; and one to a known peer."""
    p, d = engine("p", LOCAL), engine("d", {**LOCAL, "handshake": {"timeout_s": 6.0}})
    d.load("known", [2], 4, p.prefill("known", [5], 4))
    run([p, d], lambda: "known" in d.loaded)
    for i in range(3):
        d.load(f"slow-{i}", [6], 4, params_at(silent, f"slow-{i}"))
    d.load("slow-too", [7], 4, params_at(silent, "slow-0"))
    d.load("r", [3], 4, p.prefill("r", [5], 4))
    longest_s, known_s, started_s = 0.0, 60.0, time.monotonic()
    while len(d.loaded) < 6:
        assert time.monotonic() < started_s + 30
        p.step()
        before_s = time.monotonic()
        d.step()
        longest_s = max(longest_s, time.monotonic() - before_s)
        if "r" in d.loaded:
            known_s = min(known_s, time.monotonic() - started_s)
    assert d.loaded["r"].ok
    assert known_s < 5, "a request to a known peer waited for the others"
    assert longest_s < 3, "a step waited for a peer"
    introductions = worker_of(d.workers[0, 0])._introductions
    assert introductions is not None
    known = sorted(engine_id for engine_id, _ in introductions._known)
    assert known == ["p", "slow-0", "slow-1", "slow-2"]


def test_b61_many_requests_to_one_peer_take_no_more_than_one(engine: Make) -> None:
    process = psutil.Process()
    idle = (process.num_fds(), threading.active_count())
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    busy = []
    for i in range(500):
        d.load(f"r{i}", [2], 4, p.prefill(f"r{i}", [5], 4))
        run([p, d], lambda: f"r{i}" in d.loaded and f"r{i}" in p.sent)  # noqa: B023
        if i in {10, 499}:
            busy.append((process.num_fds(), threading.active_count()))
    assert busy[0] == busy[1]
    p.close()
    d.close()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if (process.num_fds(), threading.active_count()) <= idle:
            break
        time.sleep(0.05)
    assert (process.num_fds(), threading.active_count()) <= idle


def test_b71_each_kind_of_failure_has_a_count_of_its_own(engine: Make, silent: int) -> None:
    faulty = {
        "name": "local",
        "transport": "faulty",
        "options": {"inner": LOCAL, "operations": [{"what": "fail", "at": [0]}]},
    }
    p = engine("p", {**LOCAL, "lease_s": 0.5})
    d = engine("d", {**faulty, "handshake": {"timeout_s": 1.0}})
    d.load("transfer", [2], 4, p.prefill("transfer", [5], 4))
    d.load("handshake", [2], 4, params_at(silent, "silent"))
    d.load("notice", [2], 4, params_at(silent, "silent too"), here=4)
    for request_id in ("expires", "expires too"):
        p.prefill(request_id, [5], 4)
    run([p, d], lambda: len(d.loaded) == 2 and len(p.sent) == 3)
    reader, holder = d.workers[0, 0].stats, p.workers[0, 0].stats
    run([p, d], lambda: reader().value("kvbridge_notices_lost_total") == 1)
    for reason in ("transport", "handshake"):
        labels = {"outcome": "failed", "reason": reason}
        assert reader().value("kvbridge_transfers_total", **labels) == 1
    assert reader().value("kvbridge_transfers_total", outcome="failed") == 2
    assert reader().value("kvbridge_leases_expired_total") == 0
    assert holder().value("kvbridge_leases_expired_total") == 2
    assert "a fault that was asked for" in d.loaded["transfer"].error
    assert "no answer" in d.loaded["handshake"].error


def test_sizes_that_a_request_claims_poison_nothing(engine: Make) -> None:
    """Shapes come from the engine itself, whatever a proxy has written into the request."""
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    wrong = {**p.prefill("r", [3], 4), "tp_size": 64, "pp_size": 9}
    d.load("r", [2], 4, wrong)
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok
    session = worker_of(d.workers[0, 0]).agent.sessions["p"]
    assert session.plan.readers.keys() == {(0, 0), (0, 1)}


def test_a_peer_that_was_only_told_something_can_be_read_later(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    assert d.load("hit", [2], 4, p.prefill("hit", [5], 4), here=4) == 0
    run([p, d], lambda: "hit" in p.sent)
    d.load("r", [2], 4, p.prefill("r", [5], 4))
    run([p, d], lambda: "r" in d.loaded)
    assert d.loaded["r"].ok


class Opaque(TinyEngine):
    """An engine whose pages hold what nobody can cut, for so many tokens each."""

    page_tokens = 4

    def cache(self, rank: Any, layers: int, heads: int) -> Any:
        group = CacheGroup("attention", self.page_tokens)
        pages = self.memory[rank].view(np.uint8).reshape(layers, PAGES, -1)
        opaque = tuple(opaque_layer(pages[i], layer=i, name=f"layers.{i}") for i in range(layers))
        return replace(super().cache(rank, layers, heads), layers=opaque, groups=(group,))


class OpaqueOf8(Opaque):
    page_tokens = 8


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in taken]


def knows(own: int, *others: int, **more: Any) -> dict[str, Any]:
    peers = [f"127.0.0.1:{port}" for port in others]
    return {**LOCAL, "handshake": {"port": own, "peers": peers, "timeout_s": 2.0}, **more}


def wait_until(done: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("roles", [("both", "both"), ("producer", "consumer")], ids=str)
def test_b50_engines_that_know_each_other_are_not_ready_if_their_pages_do_not_fit(
    roles: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Pages of 4 and 8 tokens: both sides say so, with both numbers, before any request."""
    at_p, at_d = free_ports(2)
    p = Opaque("p", knows(at_p, at_d, role=roles[0]))
    d = OpaqueOf8("d", knows(at_d, at_p, role=roles[1]))
    try:
        wait_until(lambda: bool(p.scheduler.refusals() and d.scheduler.refusals()))
        assert not p.scheduler.ready
        assert not d.scheduler.ready
        on_p, on_d = (each.scheduler.refusals() for each in (p, d))
        of_both = r"a page has \(tokens, token share\) \({}, .*here and \({}, .* there"
        assert re.search(of_both.format(4, 8), on_p[f"127.0.0.1:{at_d}"])
        assert re.search(of_both.format(8, 4), on_d[f"127.0.0.1:{at_p}"])
        assert f"engine d is not ready: its peer at 127.0.0.1:{at_p} does not fit" in caplog.text
    finally:
        p.close()
        d.close()


def test_b50_a_peer_may_come_late_not_fit_and_come_back_mended(engine: Make) -> None:
    """Two children on each side, one of which knows the other engine's."""

    class Half(TinyEngine):
        def cache(self, rank: Any, layers: int, heads: int) -> Any:
            self.memory[rank] = self.memory[rank].astype(np.float16)
            return super().cache(rank, layers, heads)

    at_p, at_d = free_ports(2)

    def two(own: int, other: int) -> list[Any]:
        return [{"name": "a", **knows(own, other)}, {"name": "b", **LOCAL}]

    p = engine("p", two(at_p, at_d))
    assert not p.scheduler.ready, "the peer has not had the time to answer"
    wait_until(lambda: p.scheduler.ready)  # it may be waiting for us
    d = Half("d", two(at_d, at_p))
    wait_until(lambda: not p.scheduler.ready and bool(d.scheduler.refusals()))
    (reason,) = p.scheduler.refusals().items()
    assert reason[0] == f"a 127.0.0.1:{at_d}"
    assert "cell_bytes is {'kv': 64} here and {'kv': 32} there" in reason[1]
    assert "cell_bytes is {'kv': 32} here" in d.scheduler.refusals()[f"a 127.0.0.1:{at_p}"]
    assert not d.scheduler.ready
    d.close()
    mended = engine("d", two(at_d, at_p))
    wait_until(lambda: p.scheduler.ready and mended.scheduler.ready)
    assert not p.scheduler.refusals()
    mended.load("r", [2], 4, p.prefill("r", [5], 4))
    run([p, mended], lambda: "r" in mended.loaded)
    assert mended.loaded["r"].ok


def test_engines_that_fit_are_ready_and_one_list_may_name_them_all(engine: Make) -> None:
    ports = free_ports(2)
    p = engine("p", knows(ports[0], *ports))
    d = engine("d", knows(ports[1], *ports), tp=2)
    wait_until(lambda: p.scheduler.ready and d.scheduler.ready)
    assert not p.scheduler.refusals()
    twin = engine("p", knows(0, ports[0]))
    wait_until(lambda: bool(twin.scheduler.refusals()))
    assert "is called 'p' as this one is" in twin.scheduler.refusals()[f"127.0.0.1:{ports[0]}"]


def test_b22_caches_of_other_item_size_are_refused_with_both_values(engine: Make) -> None:
    class Half(TinyEngine):
        def cache(self, rank: Any, layers: int, heads: int) -> Any:
            self.memory[rank] = self.memory[rank].astype(np.float16)
            return super().cache(rank, layers, heads)

    p, d = engine("p", LOCAL), Half("d", LOCAL)
    try:
        d.load("r", [2], 4, p.prefill("r", [5], 4))
        run([p, d], lambda: "r" in d.loaded)
        for text in ("float16", "float32", "cell_bytes is {'kv': 32} here and {'kv': 64} there"):
            assert text in d.loaded["r"].error
        server = scheduler_of(p.scheduler).server
        assert isinstance(server, HandshakeServer)
        refusals = server.refusals
        assert "cell_bytes is {'kv': 64} here and {'kv': 32} there" in refusals[0]
        assert (d.memory[0, 0] == -1).all()
    finally:
        d.close()


def test_b49_another_cache_group_is_refused_and_a_drafter_without_a_cache_is_not(
    engine: Make,
) -> None:
    class More(TinyEngine):
        def cache(self, rank: Any, layers: int, heads: int) -> Any:
            cache = super().cache(rank, layers, heads)
            return replace(cache, groups=(*cache.groups, CacheGroup("sliding_window", 4, 1, 8)))

    p, d = engine("p", LOCAL), More("d", LOCAL)
    try:
        d.load("r", [2], 4, p.prefill("r", [5], 4))
        run([p, d], lambda: "r" in d.loaded)
        assert "cache_groups is [['attention', None], ['sliding_window', 8]] here" in (
            d.loaded["r"].error
        )
    finally:
        d.close()


def test_b47_an_address_that_nobody_can_dial_is_refused_at_the_start(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    listening = {"host": "0.0.0.0", "secret_file": str(tmp_path / "secret")}
    with pytest.raises(ConfigError, match="set advertise_host"):
        TinyEngine("p", {**LOCAL, "handshake": listening})


@pytest.mark.parametrize(
    "wrong",
    [
        {"advertise_host": "bad host"},
        {"registry": {"registry": "rediss"}},
        {"advertise_host": "0"},
    ],
    ids=str,
)
def test_a_scheduler_that_is_refused_leaves_no_port_behind(wrong: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = threading.active_count()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"advertise_host|rediss"):
            scheduler_connector({**LOCAL, "handshake": {"port": port, **wrong}}, engine_id="p")
    assert threading.active_count() == threads
    socket.create_server(("127.0.0.1", port)).close()


def test_ranks_that_have_not_agreed_on_an_incarnation_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 ranks and no incarnation"):
        worker_connector(LOCAL, place("p", (0, 0), tp=2, pp=1), model="m")


def test_b47_a_loopback_address_for_remote_peers_is_warned_of(
    engine: Make, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    listening = {
        "host": "0.0.0.0",
        "advertise_host": "127.0.0.1",
        "secret_file": str(tmp_path / "secret"),
    }
    engine("p", {**LOCAL, "handshake": listening})
    assert "leads every other machine to itself" in caplog.text
