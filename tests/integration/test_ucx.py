"""What holds for the transport ``ucx`` beyond what every transport must do."""

import mmap
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbridge.errors import (
    ConfigError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvbridge.transport import (
    Descriptors,
    Op,
    Region,
    State,
    Transport,
    open_transport,
)
from kvbridge_ucx import UcxTransport
from kvbridge_ucx.connections import Connection
from kvbridge_ucx.context import Context
from kvbridge_ucx.job import NBYTES_AT_ONCE, PIECES_AT_ONCE
from kvbridge_ucx.peering import AgentCard
from kvbridge_ucx.worker import PIECES_IN_FLIGHT_MAX, Worker
from tests.conformance.peer_process import Agent, PeerProcess
from tests.integration.drivers import (
    KIB,
    MIB,
    OPS,
    MakeAgent,
    agents,
    everything,
    listening,
    run,
    two_agents,
    until,
    without_package,
)

pytestmark = pytest.mark.multi_process

PATHS = pytest.mark.parametrize("options", [{}, {"tls": "tcp"}], ids=["cma", "tcp"])
# Two kills for each seed; the full tier makes fifty of each kind.
KILLS = 2
SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=[pytest.mark.full]) for seed in range(1, 25))]
)

TWO_AGENTS = two_agents("ucx")


@pytest.fixture(autouse=True)
def _ucx(usable_transport: Callable[[str], type[Transport]]) -> None:
    usable_transport("ucx")


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    yield from agents("ucx")


def worker_of(agent: Agent) -> Worker:
    assert isinstance(agent.transport, UcxTransport)
    return agent.transport._opened().worker


def context_of(agent: Agent) -> Context:
    return worker_of(agent)._context


def connections_of(agent: Agent) -> list[Connection]:
    return list(worker_of(agent)._connections)


# ------------------------------------------------------------------------------ the library


def test_loading_leaves_environment_signals_and_output_alone() -> None:
    code = """
import os
def caught():
    line, = [l for l in open("/proc/self/status") if l.startswith("SigCgt")]
    return int(line.split()[1], 16) & 0x7fffffff  # the next two belong to the threads of libc
before = dict(os.environ), caught()
"""
    ended = run(code + TWO_AGENTS + "assert (dict(os.environ), caught()) == before")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("end", ["reader.close(); owner.close()", ""], ids=["closed", "not closed"])
def test_a_process_with_agents_ends_well_and_says_nothing(end: str) -> None:
    ended = run(TWO_AGENTS + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_other_users_of_ucx_set_does_not_cost_the_fast_path() -> None:
    # This is what importing ucxx does.
    ended = run(TWO_AGENTS + "print(peer.path)", UCX_RNDV_THRESH="8192")
    assert (ended.returncode, ended.stdout) == (0, "cma\n"), ended.stderr


def test_importing_the_driver_loads_no_library() -> None:
    code = "import sys, kvbridge_ucx as k; print(k.UcxTransport.probe().ok)\n"
    code += "print('libucp' in open('/proc/self/maps').read(), 'libucx' in sys.modules)"
    assert run(code).stdout.split() == ["True", "False", "False"]


def test_without_the_library_probe_says_how_to_install_it() -> None:
    code = without_package("libucx", "kvbridge_ucx:UcxTransport")
    first, second = run(code).stdout.splitlines()
    assert first.startswith("False|neither the package libucx nor a libucp of the system")
    assert first.endswith(second)
    assert "pip install 'kvbridge[ucx]'" in second


def test_a_status_of_ucx_is_one_byte(make_agent: MakeAgent) -> None:
    with pytest.raises(TransportUnavailableError, match=r"No such device' \(-14\)"):
        make_agent(tls="rc")


@pytest.mark.parametrize("library", ["/nowhere/libucp.so.0", "/proc/self/exe"])
def test_a_library_that_is_none_is_refused(library: str, make_agent: MakeAgent) -> None:
    with pytest.raises(TransportUnavailableError, match="cannot be loaded"):
        make_agent(library=library)


def test_nixl_in_the_same_process_keeps_its_fast_path_and_leaves_ours(
    usable_transport: Callable[[str], type[Transport]],
) -> None:
    usable_transport("nixl")
    for first, second in (("ucx", "nixl"), ("nixl", "ucx")):
        code = "".join(two_agents(name) + "print(peer.path)\n" for name in (first, second))
        ended = run(code)
        assert (ended.returncode, ended.stdout) == (0, "cma\ncma\n"), ended.stderr


# ------------------------------------------------------------------------------- the device


def test_it_listens_on_loopback_only(make_agent: MakeAgent) -> None:
    before = listening()
    make_agent()
    opened = listening() - before
    assert opened
    assert {address for address, _ in opened} == {"0100007F"}


def test_a_device_must_exist(make_agent: MakeAgent) -> None:
    with pytest.raises(ConfigError, match=r"device='nosuch0': this host has .*lo"):
        make_agent(device="nosuch0")


@pytest.mark.parametrize(
    ("options", "path", "passive"),
    [
        ({}, "cma", True),
        ({"read_mode": "served"}, "cma", False),
        ({"tls": "tcp"}, "tcp", False),
        ({"tls": "tcp", "read_mode": "native"}, "tcp", False),
    ],
)
def test_the_path_is_what_carries_the_bytes(
    options: dict[str, str], path: str, passive: bool, make_agent: MakeAgent
) -> None:
    with PeerProcess("ucx", 64 * KIB, options) as owner:
        here = make_agent(**options)
        peer = here.add(owner.address_card)
        assert peer.path == path
        assert peer.capabilities.owner_passive == passive
        assert peer.capabilities.preferred_direction == ("either" if passive else "write")
        owner.call("fill", 3, 64 * KIB)
        done = here.wait(here.submit("read", peer, everything(here), everything(here)))
        assert done.state is State.DONE, done.reason
        assert here.arena.data.tobytes() == owner.call("dump", 0, 64 * KIB)


def test_a_peer_that_loopback_does_not_lead_to_is_refused(
    make_agent: MakeAgent,
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    card = AgentCard.unseal("ucx", info)
    elsewhere = msgspec.structs.replace(card, network="another host")
    with pytest.raises(TransportError, match="option 'device'"):
        here.add((elsewhere.seal("ucx"), regions))


# ---------------------------------------------------------------------------- agents and peers


def test_garbled_addresses_never_reach_ucx(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    context, given = context_of(here), []
    connect = context.connect

    def spy(address: bytes) -> int:
        given.append(address)
        return connect(address)

    monkeypatch.setattr(context, "connect", spy)
    garbled = [info[:n] for n in (0, 1, len(info) - 1)]
    garbled += [bytes([*info[:i], info[i] ^ 4, *info[i + 1 :]]) for i in range(0, len(info), 7)]
    for blob in garbled:
        with pytest.raises(TransportError):
            here.add((blob, regions))
    assert given == []
    peer = here.add((info, regions))
    assert len(given) == 1
    done = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert done.state is State.DONE


def test_a_region_that_the_info_does_not_have_is_refused(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    info, (region,) = there.address_card
    with pytest.raises(TransportError, match="fetch its agent info again"):
        here.add((info, (Region(region.address, region.nbytes - 1),)))


@PATHS
def test_a_peer_that_does_not_answer_can_be_added_once_it_does(
    options: dict[str, str], make_agent: MakeAgent
) -> None:
    here = make_agent(**options)
    with PeerProcess("ucx", 64 * KIB, options) as owner:
        owner.signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(PeerLostError, match="does not answer in time"):
                here.transport.add_peer(*owner.address_card, timeout_s=0.5)
        finally:
            owner.signal(signal.SIGCONT)
        assert time.monotonic() - start < 5
        peer = here.add(owner.address_card)
        done = here.wait(here.submit("read", peer, everything(here), everything(here)))
        assert done.state is State.DONE


def test_another_agent_in_place_of_the_old_one_is_found_out(
    make_agent: MakeAgent,
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    card = AgentCard.unseal("ucx", info)
    old = msgspec.structs.replace(card, agent="ucx-of-yesterday")
    with pytest.raises(PeerLostError, match="does not answer"):
        here.transport.add_peer(old.seal("ucx"), regions, timeout_s=0.6)
    assert here.add((info, regions)).agent == card.agent


def test_a_connection_that_broke_is_made_anew(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    first = here.add(there.address_card)
    there.add(here.address_card)
    worker, (connection,) = worker_of(here), connections_of(here)
    worker.call(lambda: worker._connections.lose(connection, "a cable was pulled"))
    with pytest.raises(PeerLostError, match="a cable was pulled"):
        here.submit("read", first, everything(here), everything(there))
    back = there.add(here.address_card)  # that side may not have noticed yet
    second = here.add(there.address_card)
    done = there.wait(there.submit("read", back, everything(there), everything(here)))
    assert done.state is State.DONE, done.reason
    done = here.wait(here.submit("write", second, everything(here), everything(there), b"anew"))
    assert done.state is State.DONE, done.reason
    assert [n.payload for n in there.wait_notifications(1)] == [b"anew"]


def test_retired_memory_stays_with_ucx_while_there_are_peers(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    here, there = make_agent(tls="tcp"), make_agent(tls="tcp")
    peer = here.add(there.address_card)
    context, unmapped = context_of(there), []
    unmap = context.unmap

    def spy(mapped: Any) -> None:
        unmapped.append(mapped)
        unmap(mapped)

    monkeypatch.setattr(context, "unmap", spy)
    there.transport.unregister([there.arena.region])
    # The peer does not know yet; its read is refused by the owner, who goes on.
    end = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert end.state is State.FAILED
    assert "outside the 0 registered regions" in end.reason
    assert unmapped == []
    there.transport.register([there.arena.region])
    done = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert done.state is State.DONE, done.reason
    here.close()
    there.transport.unregister([there.arena.region])
    until(lambda: len(unmapped) == 2)


# ------------------------------------------------------------------------------- operations


def test_pieces_are_posted_in_batches_and_large_ones_cut(make_agent: MakeAgent) -> None:
    nbytes = 2 * NBYTES_AT_ONCE + 3
    here, there = make_agent(nbytes), make_agent(nbytes)
    there.arena.data[:] = np.arange(nbytes) % 251
    peer = here.add(there.address_card)
    done = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data == there.arena.data).all()
    here.arena.data[:] = 0
    count = PIECES_IN_FLIGHT_MAX + 3 * PIECES_AT_ONCE + 1
    pieces = [(k * 401, 401 if k % 3 else 0) for k in range(count)]
    done = here.wait(here.submit("read", peer, pieces, pieces))
    assert done.state is State.DONE, done.reason
    assert here.arena.guards_intact()
    moved = np.repeat(np.arange(count) % 3 != 0, 401)
    expected = np.where(moved, there.arena.data[: count * 401], 0)
    assert (here.arena.data[: count * 401] == expected).all()
    until(lambda: not connections_of(here)[0].pieces_in_flight)
    assert not connections_of(here)[0].nbytes_in_flight


def test_submit_does_not_wait_for_the_bytes(make_agent: MakeAgent) -> None:
    nbytes = 256 * MIB
    here = make_agent(nbytes)
    with PeerProcess("ucx", nbytes) as owner:
        peer = here.add(owner.address_card)
        offsets = np.arange(0, nbytes, 4 * KIB, dtype=np.uint64)
        lengths = np.full(offsets.size, 4 * KIB)
        local = Descriptors(offsets + np.uint64(here.arena.address), lengths)
        remote = Descriptors(offsets + np.uint64(peer.table.regions[0].address), lengths)
        handle = here.transport.submit("read", peer, local, remote)
        here.pump()
        assert handle not in here.finished
        assert here.wait(handle).state is State.DONE


def test_an_idle_agent_uses_no_processor(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    assert here.wait(here.submit("read", peer, [(0, 10)], [(0, 10)])).state is State.DONE
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.1


@PATHS
def test_notifications_of_all_sizes_arrive_once_and_intact(
    options: dict[str, str], make_agent: MakeAgent
) -> None:
    here, there = make_agent(**options), make_agent(**options)
    peer = here.add(there.address_card)
    sizes = [1, 2, 100, 8191, 8192, 8193, 65_535, 65_536]
    payloads = [random.Random(n).randbytes(n) for n in sizes] + [bytes(500), b"\xff" * 500]
    for payload in payloads:
        here.transport.notify(peer, payload)
    name = worker_of(here).memory.card.agent
    got = there.wait_notifications(len(payloads))
    assert sorted(got) == sorted((name, payload) for payload in payloads)
    assert there.wait_notifications(1, timeout_s=0.1) == []


def test_a_stopped_reader_holds_up_no_other(make_agent: MakeAgent) -> None:
    here = make_agent(32 * MIB, tls="tcp")
    with (
        PeerProcess("ucx", 32 * MIB, {"tls": "tcp"}) as stuck,
        PeerProcess("ucx", 32 * MIB, {"tls": "tcp"}) as other,
    ):
        for reader in (stuck, other):
            reader.call("add_peer", *here.address_card)
        pieces = [(k * 4096, 4096) for k in range(8192)]
        stuck.start("transfer_for_ever", "read", pieces, pieces)
        time.sleep(0.1)
        stuck.signal(signal.SIGSTOP)
        try:
            assert other.call("transfer", "read", pieces, pieces, b"") == "done"
        finally:
            stuck.signal(signal.SIGCONT)
            stuck.kill()


# ---------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("op", OPS)
def test_memory_that_is_gone_fails_the_operation_and_nobody_else(
    op: Op, make_agent: MakeAgent
) -> None:
    here = make_agent()
    there = open_transport({"transport": "ucx"})
    pages = mmap.mmap(-1, 64 * KIB)
    view = np.frombuffer(pages, np.uint8)
    region = Region(view.ctypes.data, view.nbytes)
    there.register([region])
    peer = here.add((there.agent_info(), (region,)))
    there.unregister([region])
    del view
    pages.close()
    here.arena.data[:] = 5
    end = here.wait(here.submit(op, peer, everything(here), everything(here), b"never"))
    assert end.state is State.FAILED
    assert end.reason
    assert (here.arena.data == 5).all()
    assert there.poll().notifications == ()
    there.close()


def test_a_flush_that_says_ok_is_not_believed_where_the_endpoint_fails(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    context, (connection,) = context_of(here), connections_of(here)

    progress, flushed = context.progress, []

    def flush(endpoint: int, ended: Callable[[int], object]) -> None:
        context._events.append(lambda: flushed.append(ended(0)))

    def progress_and_fail() -> int:
        if flushed:  # as UCX does: at the latest in the progress after the one that told of it
            flushed.clear()
            context._events.append(lambda: context._failed(connection.endpoint, -25))
        return progress()

    monkeypatch.setattr(context, "flush", flush)
    monkeypatch.setattr(context, "progress", progress_and_fail)
    end = here.wait(here.submit("read", peer, everything(here), everything(there)))
    assert end.state is State.FAILED
    assert "(-25)" in end.reason


@PATHS
@pytest.mark.parametrize("op", OPS)
@SEEDS
def test_the_owner_survives_those_who_are_killed(
    seed: int, op: Op, options: dict[str, str], make_agent: MakeAgent
) -> None:
    chance = random.Random(seed)
    here = make_agent(32 * MIB, **options)
    for number in range(KILLS):
        with PeerProcess("ucx", 32 * MIB, options) as victim:
            victim.call("add_peer", *here.address_card)
            pieces = [(k * 16384, 16384) for k in range(2048)] if number % 2 else everything(here)
            victim.start("transfer_for_ever", op, pieces, pieces)
            time.sleep(chance.uniform(0.005, 0.08))
            victim.kill()
        here.pump()
    until(lambda: not (connections_of(here) or here.transport.memory.busy))
    with PeerProcess("ucx", 4 * KIB, options) as survivor:
        survivor.call("add_peer", *here.address_card)
        assert survivor.call("transfer", "read", [(0, 4096)], [(0, 4096)], b"") == "done"


@PATHS
@pytest.mark.parametrize("op", OPS)
@SEEDS
def test_the_one_who_asks_survives_an_owner_that_is_killed(
    seed: int, op: Op, options: dict[str, str], make_agent: MakeAgent
) -> None:
    chance = random.Random(seed)
    here = make_agent(32 * MIB, **options)
    failed = 0
    for number in range(KILLS):
        with PeerProcess("ucx", 32 * MIB, options) as victim:
            peer = here.add(victim.address_card)
            pieces = [(k * 16384, 16384) for k in range(2048)] if number % 2 else everything(here)
            handles = [here.submit(op, peer, pieces, pieces) for _ in range(12)]
            here.wait(handles[0])
            time.sleep(chance.uniform(0, 0.01))
            victim.kill()
            ends = [here.wait(handle) for handle in handles]
        failed += sum(end.state is State.FAILED for end in ends)
        assert all(end.reason for end in ends if end.state is State.FAILED)
        here.arena.data[:] = 7
        time.sleep(0.05)
        assert (here.arena.data == 7).all()
        with pytest.raises(PeerLostError):
            here.transport.notify(peer, b"anybody?")
    assert failed, "each kill came too late to hit anything"
    assert connections_of(here) == []


@pytest.mark.parametrize("timeout_s", [0.01, 5.0])
def test_closing_with_pieces_in_the_queue_of_ucx(timeout_s: float, make_agent: MakeAgent) -> None:
    here = make_agent(32 * MIB)
    with PeerProcess("ucx", 32 * MIB) as owner:
        peer = here.add(owner.address_card)
        handles = [here.submit("read", peer, everything(here), everything(here)) for _ in range(16)]
        assert here.transport.close(timeout_s=timeout_s) == ()
        here.arena.data[:] = 7
        here.pump()
        assert set(here.finished) == set(handles)
        assert (here.arena.data == 7).all()


@PATHS
def test_closing_does_not_wait_for_a_stopped_peer(
    options: dict[str, str], make_agent: MakeAgent
) -> None:
    here = make_agent(32 * MIB, **options)
    with PeerProcess("ucx", 32 * MIB, options) as owner:
        peer = here.add(owner.address_card)
        owner.signal(signal.SIGSTOP)
        try:
            for op in OPS:
                here.submit(op, peer, everything(here), everything(here))
            here.transport.notify(peer, b"anybody?")
            start = time.monotonic()
            assert here.transport.close(timeout_s=0.3) == ()
            assert time.monotonic() - start < 5
            assert here.transport.memory.busy == ()
        finally:
            owner.signal(signal.SIGCONT)
