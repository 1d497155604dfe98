"""Engines that are known beforehand: what speaks against being ready, and who is asked again."""

import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbridge.connector.peers import LONGEST_PAUSE_S, KnownPeers
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    Keys,
    Networks,
    RankPayload,
    factors_of,
    keys_of_secret,
)
from kvbridge.handshake.metadata import seal
from kvbridge.model import CacheGroup, Rank, RankCache, attention_layer, memory_region

SILENCE_S = 0.3


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def published(engine_id: str, dtype: str = "float32", *, incarnation: str = "1") -> Any:
    memory = np.zeros((4, 2, 4, 1, 8), dtype)
    layer = attention_layer(
        memory, axes="BKNHC", layer=0, name="layers.0", unit_start=0, unit_total=1
    )
    groups = (CacheGroup("attention", 4),)
    cache = RankCache(engine_id, 0, 0, (layer,), groups, (memory_region(memory),))
    factors = factors_of(cache, model="m", transport="local")
    payload = seal(factors, RankPayload(cache, b""), engine_id=engine_id, incarnation=incarnation)
    return {(0, 0): HandshakeMetadata(engine_id, incarnation, 0, 0, payload)}


Ask = Callable[..., tuple[KnownPeers, Clock]]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Make the peers of an engine, and ask them."""
    made = []

    def make(
        *addresses: EngineAddress,
        metadata: Mapping[Rank, HandshakeMetadata] | None = None,
        networks: tuple[str, ...] = ("127.0.0.0/8",),
        keys: Keys | None = None,
        timeout_s: float = 10.0,
    ) -> tuple[KnownPeers, Clock]:
        clock = Clock()
        peers = KnownPeers(
            addresses,
            Dialer(keys=keys, networks=Networks(networks)),
            asker="d",
            timeout_s=timeout_s,
            clock=clock,
            uniform=lambda _, high: high,
        )
        made.append(peers)
        assert not peers.ready, "nobody has been asked"
        peers.ask(published("d") if metadata is None else metadata)
        return peers, clock

    yield make
    for each in made:
        each.close()


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    with_another_dtype = HandshakeServer()
    with_another_dtype.set_xfer_handshake_metadata_pp_aware(published("p", "float16"))
    yield with_another_dtype
    with_another_dtype.close()


def wait_until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_one_that_refuses_is_asked_again_after_growing_pauses(
    ask: Ask, server: HandshakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    peers, clock = ask(server.address)
    times = []
    for asked in range(1, 9):
        wait_until(lambda: clock.now_s < peers._peers[0].again_s < math.inf)
        assert server.refused == asked
        assert not peers.ready
        times.append(clock.now_s)
        clock.now_s = peers._peers[0].again_s - 0.001
        assert not peers.ready
        assert server.refused == asked
        clock.now_s = peers._peers[0].again_s
        peers.poll()
    pauses_s = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses_s == pytest.approx([1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S])
    assert caplog.text.count("engine d is not ready") == 1, "said once"
    reason = peers.refusals()[str(server.address)]
    assert "dtype is {'kv': 'float32'} here and {'kv': 'float16'} there" in reason


def test_a_silent_one_holds_up_the_start_for_one_answers_time(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = EngineAddress("127.0.0.1", free.getsockname()[1])
    began_s = time.monotonic()
    peers, clock = ask(address, timeout_s=SILENCE_S)
    wait_until(lambda: peers.ready)
    assert time.monotonic() - began_s >= SILENCE_S
    assert peers.refusals() == {}
    late = HandshakeServer(port=address.port)
    try:
        late.set_xfer_handshake_metadata_pp_aware(published("p", "float16"))
        time.sleep(2 * SILENCE_S)
        assert peers.ready, "the pause is not over"
        clock.now_s = 60.0
        wait_until(lambda: not peers.ready)
    finally:
        late.close()
    # Perhaps it has been stopped to be mended, and waits for us to be ready.
    clock.now_s = 120.0
    wait_until(lambda: peers.ready)
    assert peers.refusals() == {}


def test_a_name_that_does_not_resolve_yet_is_as_one_that_is_silent(ask: Ask) -> None:
    peers, _ = ask(EngineAddress("no-such-host.invalid", 1))
    wait_until(lambda: peers.ready)
    assert "cannot be found" in peers._peers[0].why


def test_keys_and_networks_that_are_wrong_are_refusals(ask: Ask, server: HandshakeServer) -> None:
    peers, _ = ask(server.address, keys=keys_of_secret(b"sixteen bytes at least"))
    outside, _ = ask(EngineAddress("localhost", 1), networks=("10.0.0.0/8",))
    wait_until(lambda: bool(peers.refusals() and outside.refusals()))
    assert "do not believe each other" in peers.refusals()[str(server.address)]
    assert "add its network to allowed_networks" in outside.refusals()["localhost:1"]


def test_what_is_published_anew_is_compared_anew_at_once(ask: Ask, server: HandshakeServer) -> None:
    peers, clock = ask(server.address)
    wait_until(lambda: bool(peers.refusals()))
    peers.ask(published("d", "float16"))
    wait_until(lambda: peers.ready)
    clock.now_s += 1000
    assert peers.ready, "one that fits is not asked again"
    assert server.refused == 1
    peers.ask(published("d"))
    wait_until(lambda: not peers.ready)


def test_this_engine_itself_fits_and_another_of_its_name_does_not(
    ask: Ask, server: HandshakeServer
) -> None:
    ours = published("p", "float16")
    itself, _ = ask(server.address, metadata=ours)
    twin, _ = ask(server.address, metadata=published("p", "float16", incarnation="2"))
    wait_until(lambda: itself.ready and bool(twin.refusals()))
    assert "is called 'p' as this one is" in twin.refusals()[str(server.address)]


def test_one_that_contradicts_itself_is_refused(ask: Ask, server: HandshakeServer) -> None:
    data = published("p")[0, 0]
    server.set_xfer_handshake_metadata_pp_aware({(0, 0): replace(data, engine_id="q")})
    peers, _ = ask(server.address)
    wait_until(lambda: bool(peers.refusals()))
    assert "carries an envelope of 'p'" in peers.refusals()[str(server.address)]


def test_a_question_that_is_cut_off_says_nothing(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peers, _ = ask(EngineAddress("127.0.0.1", silent.getsockname()[1]))
        peers.close()
        peers.close()
    assert not peers.ready
    assert peers.refusals() == {}
    assert not caplog.records
