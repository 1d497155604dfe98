"""What holds for the transport ``nixl`` beyond what every transport must do."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvbridge.errors import ConfigError, PeerLostError, TransportError
from kvbridge.transport import Descriptors, Region, State, Transport
from kvbridge_nixl import NixlTransport, library, worker
from kvbridge_nixl.card import AgentCard
from tests.conformance.peer_process import PeerProcess
from tests.integration.drivers import (
    KIB,
    MIB,
    MakeAgent,
    agents,
    everything,
    listening,
    run,
    two_agents,
    without_package,
)

pytestmark = pytest.mark.multi_process

PATIENCE_S = 20.0

TWO_AGENTS = two_agents("nixl")


@pytest.fixture(autouse=True)
def _nixl(usable_transport: Callable[[str], type[Transport]]) -> None:
    usable_transport("nixl")


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    yield from agents("nixl")


def agent_of(transport: Transport) -> Any:
    """NIXL's agent, to spy on."""
    assert isinstance(transport, NixlTransport)
    return transport._opened().worker._agent


# ------------------------------------------------------------------------------ the library


@pytest.mark.parametrize("end", ["reader.close(); owner.close()", ""], ids=["closed", "not closed"])
def test_a_process_with_agents_ends_well_and_says_nothing(end: str) -> None:
    ended = run(TWO_AGENTS + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_wait_finds_what_the_idle_thread_does_not_look_for(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make_agent(), make_agent()
    peer = there.add(here.address_card)
    monkeypatch.setattr(worker, "SLEEP_IDLE_MAX_S", 60.0)
    monkeypatch.setattr(worker, "SLEEP_MIN_S", 60.0)
    time.sleep(0.2)  # the threads sleep now
    start = time.monotonic()
    there.transport.notify(peer, b"wake up")
    here.transport.wait(PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S / 2
    assert [payload for _, payload in here.transport.poll().notifications] == [b"wake up"]


def test_importing_the_driver_loads_no_library() -> None:
    code = "import sys, kvbridge_nixl as k; k.NixlTransport.probe(); print(*sys.modules)"
    loaded = run(code).stdout.split()
    assert not {"nixl", "nixl_cu12", "nixl_cu13", "torch"} & set(loaded)


def test_without_the_library_probe_says_how_to_install_it() -> None:
    code = without_package("nixl", "kvbridge_nixl:NixlTransport")
    first, second = run(code).stdout.splitlines()
    assert first.startswith("False|none of nixl_cu12, nixl_cu13 is installed|")
    assert first.endswith(second)
    assert "pip install 'kvbridge[nixl]'" in second
    assert "pip install --no-deps nixl-cu12" in second


def test_loading_leaves_the_logging_of_the_process_alone() -> None:
    library.load()
    assert logging.raiseExceptions
    assert logging.getLogger("nixl").handlers == []


# ------------------------------------------------------------------------------- the device


def test_it_listens_on_loopback_only(make_agent: MakeAgent) -> None:
    before = listening()
    make_agent()
    opened = listening() - before
    assert opened
    assert {address for address, _ in opened} == {"0100007F"}


def test_a_device_must_exist_and_agree_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    with pytest.raises(ConfigError, match=r"device='nosuch0': this host has .*lo"):
        make_agent(device="nosuch0")
    monkeypatch.setenv("UCX_NET_DEVICES", "nosuch0")
    with pytest.raises(ConfigError, match="contradicts UCX_NET_DEVICES='nosuch0'"):
        make_agent(device="lo")


def test_a_peer_that_loopback_does_not_lead_to_is_refused(
    make_agent: MakeAgent,
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    card = AgentCard.unseal("nixl", info)
    elsewhere = msgspec.structs.replace(card, network="another host")
    with pytest.raises(TransportError, match="option 'device'"):
        here.add((elsewhere.seal("nixl"), regions))


@pytest.mark.parametrize(("lanes", "path"), [("all", "cma"), ("tcp", "tcp")])
def test_the_path_is_what_carries_the_bytes(
    lanes: str, path: str, monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    with PeerProcess("nixl", 64 * KIB) as owner:
        peer = make_agent().add(owner.address_card)
        assert peer.path == path
        assert peer.capabilities.owner_passive == (path == "cma")
        assert peer.capabilities.preferred_direction == ("either" if path == "cma" else "write")


# --------------------------------------------------------------------------------- metadata


def test_garbled_metadata_never_reaches_the_library(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    library_agent = agent_of(here.transport)
    given: list[bytes] = []
    add = library_agent.add_remote_agent

    def spy(metadata: bytes) -> object:
        given.append(metadata)
        return add(metadata)

    monkeypatch.setattr(library_agent, "add_remote_agent", spy)
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


def test_memory_registered_later_is_reached_after_adding_the_peer_again(
    make_agent: MakeAgent,
) -> None:
    here, there = make_agent(), make_agent()
    first = here.add(there.address_card)
    more = np.full(64 * KIB, 9, np.uint8)
    region = Region(more.ctypes.data, more.nbytes)
    there.transport.register([region])
    second = here.add((there.transport.agent_info(), (region,)))
    assert second.agent == first.agent
    here.transport.drop_peer(first)  # the connection stays for the second
    done = here.wait(here.submit("read", second, everything(here), everything(there)))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data == 9).all()
    with pytest.raises(PeerLostError):
        here.submit("read", first, everything(here), everything(there))


def test_memory_registered_anew_is_reached_again(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    for value in range(3):
        there.arena.data[:] = value
        peer = here.add(there.address_card)
        done = here.wait(here.submit("read", peer, everything(here), everything(there)))
        assert done.state is State.DONE, done.reason
        assert (here.arena.data == value).all()
        here.transport.drop_peer(peer)
        there.transport.unregister([there.arena.region])
        there.transport.register([there.arena.region])


# ------------------------------------------------------------------------------- operations


def test_submit_does_not_wait_for_the_bytes(make_agent: MakeAgent) -> None:
    nbytes = 256 * MIB
    here = make_agent(nbytes)
    with PeerProcess("nixl", nbytes) as owner:
        peer = here.add(owner.address_card)
        offsets = np.arange(0, nbytes, 4 * KIB, dtype=np.uint64)
        lengths = np.full(offsets.size, 4 * KIB)
        local = Descriptors(offsets + np.uint64(here.arena.address), lengths)
        remote = Descriptors(offsets + np.uint64(peer.table.regions[0].address), lengths)
        handle = here.transport.submit("read", peer, local, remote)
        here.pump()
        assert handle not in here.finished
        assert here.wait(handle).state is State.DONE


def test_several_threads_may_post(make_agent: MakeAgent) -> None:
    here, there = make_agent(4 * MIB, num_threads=2), make_agent(4 * MIB)
    there.arena.data[:] = np.arange(4 * MIB) % 251
    peer = here.add(there.address_card)
    pieces = [(offset, 777) for offset in range(0, 4 * MIB - 777, 777)]
    done = here.wait(here.submit("read", peer, pieces, pieces))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data[: len(pieces) * 777] == there.arena.data[: len(pieces) * 777]).all()


@pytest.mark.parametrize("lanes", ["all", "tcp"])
def test_a_killed_peer_leaves_the_agent_usable(
    lanes: str, monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    here = make_agent(32 * MIB)
    with PeerProcess("nixl", 32 * MIB) as owner, PeerProcess("nixl", 32 * MIB) as other:
        lost, good = here.add(owner.address_card), here.add(other.address_card)
        handles = [
            here.submit(op, lost, everything(here), everything(here))
            for op in ("read", "write") * 10
        ]
        owner.kill()
        states = {here.wait(handle).state for handle in handles}
        assert State.FAILED in states or lanes == "all"  # all may have been copied by then
        late = []
        with pytest.raises(PeerLostError):
            for _ in range(3):  # the loss may be noticed by the first that is posted
                late.append(here.submit("read", lost, everything(here), everything(here)))
                assert here.wait(late[-1]).state is State.FAILED
        done = here.wait(here.submit("read", good, everything(here), everything(here)))
        assert done.state is State.DONE


def test_a_peer_that_does_not_answer_can_be_added_once_it_does(
    make_agent: MakeAgent,
) -> None:
    here = make_agent()
    with PeerProcess("nixl", 64 * KIB) as owner:
        owner.signal(signal.SIGSTOP)
        start = time.monotonic()
        try:
            with pytest.raises(PeerLostError, match="does not answer in time"):
                here.transport.add_peer(*owner.address_card, timeout_s=0.5)
        finally:
            owner.signal(signal.SIGCONT)
        assert time.monotonic() - start < PATIENCE_S
        peer = here.add(owner.address_card)
        done = here.wait(here.submit("read", peer, everything(here), everything(here)))
        assert done.state is State.DONE


def test_what_may_still_move_stays_pending_and_close_names_its_memory(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    bindings = library.load().bindings

    def fail(request: object) -> str:
        raise bindings.nixlBackendError("something went wrong")

    monkeypatch.setattr(agent_of(here.transport), "transfer", fail)
    handle = here.submit("read", peer, everything(here), everything(there))
    here.transport.abandon(handle)
    with pytest.raises(TimeoutError):
        here.wait(handle, timeout_s=0.3)
    assert here.transport.close(timeout_s=0.2) == (here.arena.region,)
