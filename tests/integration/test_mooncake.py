"""What only the Mooncake transport has: open ports, answers that lie, pointers for ids."""

import fcntl
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbridge.cli import main
from kvbridge.errors import (
    ConfigError,
    KVBridgeError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvbridge.namespaces import private_network
from kvbridge.transport import Op, Peer, State, Transport, open_transport
from kvbridge_mooncake import MooncakeTransport, library
from kvbridge_mooncake.agent import MooncakeAgent
from kvbridge_mooncake.channel import BACKLOG_MAX_BYTES
from kvbridge_mooncake.peering import EngineNames, MooncakePeer
from kvbridge_mooncake.sockets import _sockets, listening_ports
from kvbridge_mooncake.wire import NOTIFY_MAX_BYTES, AgentCard, encode, encode_hello
from tests.conformance.peer_process import Agent, PeerProcess
from tests.integration.drivers import (
    KIB,
    MIB,
    OPS,
    MakeAgent,
    agents,
    everything,
    run,
    two_agents,
    without_package,
)

pytestmark = pytest.mark.multi_process

OPTIONS = {"allow_open_data_port": True}

SIOCBRADDBR, SIOCBRDELBR = 0x89A0, 0x89A1

TWO_AGENTS = two_agents("mooncake", OPTIONS)


@pytest.fixture(autouse=True, scope="module")
def _alone(
    usable_transport: Callable[[str], type[Transport]], required_transports: frozenset[str]
) -> Iterator[None]:
    """Nobody but the agents of these tests may reach their ports."""
    usable_transport("mooncake")
    with ExitStack() as stack:
        try:
            stack.enter_context(private_network())
        except TransportUnavailableError as error:
            if "mooncake" in required_transports:
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    yield from agents("mooncake", OPTIONS)


@pytest.fixture
def make_owner() -> Iterator[Callable[..., PeerProcess]]:
    with ExitStack() as stack:
        yield lambda nbytes=64 * KIB: stack.enter_context(PeerProcess("mooncake", nbytes, OPTIONS))


def agent_of(agent: Agent) -> MooncakeAgent:
    assert isinstance(agent.transport, MooncakeTransport)
    return agent.transport._opened()


class Spy:
    """An engine that notes what it is asked."""

    def __init__(self, agent: Agent) -> None:
        self.engine, self.worker = agent_of(agent).engine, agent_of(agent).worker
        self.posted: list[tuple[Any, ...]] = []  # the arguments, and the id
        self.statuses: list[tuple[int, int]] = []
        self.worker._engine = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def batch_transfer_async_read(self, *what: Any) -> int:
        return self._post(self.engine.batch_transfer_async_read, *what)

    def transfer_submit_write(self, *what: Any) -> int:
        return self._post(self.engine.transfer_submit_write, *what)

    def transfer_check_status(self, piece: int) -> int:
        status: int = self.engine.transfer_check_status(piece)
        self.statuses.append((piece, status))
        return status

    def _post(self, post: Callable[..., int], *what: Any) -> int:
        piece = post(*what)
        self.posted.append((*what, piece))
        return piece


def blocks(nbytes: int, block: int = 4 * KIB) -> list[tuple[int, int]]:
    return [(offset, block) for offset in range(0, nbytes, block)]


def card_of(owner: PeerProcess | Agent) -> AgentCard:
    return AgentCard.unseal("mooncake", owner.address_card[0])


def check_quiet(agent: Agent, handle: Any, seconds: float) -> None:
    """An operation is not reported for so long."""
    with pytest.raises(TimeoutError):
        agent.wait(handle, timeout_s=seconds)


def check_reads(agent: Agent, peer: Peer, offset: int = 0) -> None:
    done = agent.wait(agent.submit("read", peer, [(offset, 10)], [(offset, 10)]))
    assert done.state is State.DONE, done.reason


# ------------------------------------------------------------------------------ the open ports


@pytest.fixture
def _way_out() -> Iterator[None]:
    """One more interface beside the loopback device, which is enough that others may come in."""
    name = b"kvbridge-test"
    with private_network(), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCBRADDBR, name)
        except OSError as error:
            pytest.skip(f"the kernel makes no bridge here: {error}")
        try:
            yield
        finally:
            fcntl.ioctl(any_socket, SIOCBRDELBR, name)


@pytest.mark.usefixtures("_way_out")
def test_without_consent_it_refuses_and_listens_nowhere() -> None:
    before = listening_ports()
    for options in ({}, {"allow_open_data_port": False}):
        with pytest.raises(ConfigError, match="every interface, without authentication") as said:
            open_transport({"transport": "mooncake", "options": options})
        assert "allow_open_data_port=true" in str(said.value)
    assert listening_ports() == before


def test_where_nobody_else_is_it_needs_no_consent() -> None:
    open_transport({"transport": "mooncake"}).close(timeout_s=5)


def test_the_reason_for_the_consent_still_holds(make_agent: MakeAgent) -> None:
    agent = make_agent()
    hub, card = agent_of(agent).hub, agent_of(agent).card
    listening = run("print(open('/proc/net/tcp').read(), open('/proc/net/tcp6').read())").stdout
    bound = {row.split()[1] for row in listening.splitlines() if " 0A " in row}
    assert f"00000000:{card.engine_port:04X}" in bound
    for port in hub.data_ports - {card.engine_port}:
        assert f"{'0' * 32}:{port:04X}" in bound
    assert f"0100007F:{hub.port:04X}" in bound  # ours is where the option says


@pytest.mark.parametrize("host", ["0.0.0.0", "no-such-host.invalid", "256.1.1.1", ""])
def test_the_host_must_be_an_address_to_reach(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        MooncakeTransport().open(OPTIONS | {"host": host})


def test_a_host_of_somebody_else_is_refused() -> None:
    with pytest.raises(TransportUnavailableError, match=r"cannot listen on 192\.0\.2\.1"):
        MooncakeTransport().open(OPTIONS | {"host": "192.0.2.1"})


# ------------------------------------------------------------------------------- the library


def test_variables_are_set_only_if_unset() -> None:
    code = "import os; from kvbridge_mooncake import library; library.load(); print(os.environ)"
    seen = run(code, MC_TCP_STATUS_TIMEOUT_SEC="7").stdout
    assert "'MC_TCP_STATUS_TIMEOUT_SEC': '7'" in seen
    for name, value in library.ENVIRONMENT.items():
        if name != "MC_TCP_STATUS_TIMEOUT_SEC":
            assert f"'{name}': '{value}'" in seen
    assert "MC_LOG_LEVEL" not in seen  # processes that we start choose for themselves


@pytest.mark.parametrize("end", ["reader.close(); owner.close()", ""], ids=["closed", "not closed"])
def test_a_process_with_agents_ends_well_and_says_nothing(end: str) -> None:
    ended = run(TWO_AGENTS + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_log_level_of_the_user_is_obeyed() -> None:
    assert "transfer_engine" in run(TWO_AGENTS, MC_LOG_LEVEL="INFO").stderr


def test_our_log_level_is_mooncakes_too() -> None:
    code = "import logging; logging.basicConfig(level=logging.DEBUG)\n" + TWO_AGENTS
    assert "transfer_engine" in run(code).stderr


def test_importing_the_driver_loads_no_library() -> None:
    code = "import sys, kvbridge_mooncake as k; k.MooncakeTransport.probe(); print(*sys.modules)"
    loaded = run(code).stdout.split()
    assert not [name for name in loaded if name.split(".")[0] in ("mooncake", "torch")]


def test_without_the_library_probe_says_how_to_install_it() -> None:
    code = without_package("mooncake", "kvbridge_mooncake:MooncakeTransport", OPTIONS)
    first, second = run(code).stdout.splitlines()
    assert first.startswith("False|none of mooncake-transfer-engine-non-cuda, ")
    assert first.endswith(second)
    assert "pip install 'kvbridge[mooncake]'" in second


def test_without_system_libraries_probe_says_which_package_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(library.SYSTEM_LIBRARIES, "libnowhere.so.9", "libnowhere9")
    found = MooncakeTransport.probe()
    assert not found.ok
    assert "libnowhere.so.9" in found.reason
    assert found.hint.endswith("apt-get install --no-install-recommends libnowhere9")


def test_a_library_that_cannot_be_loaded_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> object:
        raise ImportError("libnuma.so.1: cannot open shared object file: No such file")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(TransportUnavailableError, match="cannot be loaded") as said:
        MooncakeTransport().open(OPTIONS)
    assert said.value.hint.endswith("libnuma1")


# ------------------------------------------------------------------------------ pieces and ids


def test_each_piece_is_a_batch_and_its_id_is_not_used_after_its_end(
    make_agent: MakeAgent,
) -> None:
    here, there = make_agent(4 * MIB), make_agent(4 * MIB)
    there.arena.fill(3, 4 * MIB)
    peer = here.add(there.address_card)
    spy = Spy(here)
    pieces = blocks(4 * MIB)
    done = here.wait(here.submit("read", peer, pieces, pieces))
    assert done.state is State.DONE, done.reason
    assert (here.arena.data == there.arena.data).all()
    assert [len(part) for post in spy.posted for part in post[1:4]] == [1] * 3 * len(pieces)
    live: set[int] = set()
    posted = iter(spy.posted)
    for piece, status in spy.statuses:  # an id is a pointer, so it comes again later
        while piece not in live:
            live.add(next(posted)[-1])
        if status:
            live.discard(piece)
    assert not live


def test_empty_pieces_are_not_posted(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    spy = Spy(here)
    pieces = [(0, 0), (5, 7), (9, 0)]
    assert here.wait(here.submit("write", peer, pieces, pieces)).state is State.DONE
    assert [post[3] for post in spy.posted] == [7]
    assert here.wait(here.submit("write", peer, [(0, 0)], [(0, 0)])).state is State.DONE
    assert len(spy.posted) == 1


def test_more_pieces_than_mooncake_queues_by_default(make_agent: MakeAgent) -> None:
    here, there = make_agent(2 * MIB), make_agent(2 * MIB)
    there.arena.fill(5, 2 * MIB)
    peers = [here.add(there.address_card) for _ in range(6)]
    pieces = blocks(2 * MIB, 512)
    handles = [here.submit("read", peer, pieces, pieces) for peer in peers]
    assert {here.wait(handle).state for handle in handles} == {State.DONE}
    assert (here.arena.data == there.arena.data).all()


def test_submit_does_not_wait_for_the_bytes(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(64 * MIB), make_owner(64 * MIB)
    peer = here.add(owner.address_card)
    handle = here.submit("read", peer, blocks(64 * MIB), blocks(64 * MIB))
    here.pump()
    assert handle not in here.finished
    assert here.wait(handle).state is State.DONE


# --------------------------------------------------------------------------- who is the peer


def test_garbled_agent_info_never_reaches_the_library(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    info, regions = there.address_card
    spy = Spy(here)
    calls = threading.active_count()
    garbled = [info[:n] for n in (0, 1, len(info) - 1)]
    garbled += [bytes([*info[:i], info[i] ^ 4, *info[i + 1 :]]) for i in range(len(info))]
    for blob in garbled:
        with pytest.raises(TransportError):
            here.add((blob, regions))
    assert (spy.posted, threading.active_count()) == ([], calls)
    check_reads(here, here.add((info, regions)))


def test_an_agent_is_not_its_own_peer(make_agent: MakeAgent) -> None:
    agent = make_agent()
    with pytest.raises(TransportError, match="this agent itself"):
        agent.add(agent.address_card)


@pytest.mark.parametrize("silent", ["control_port", "engine_port"])
def test_a_silent_host_takes_no_longer_than_allowed_and_stops_nobody(
    silent: str, make_agent: MakeAgent
) -> None:
    """Mooncake's own first contact would stop all operations of the engine for a minute."""
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        card = msgspec.structs.replace(card_of(there), **{silent: hung.getsockname()[1]})
        raised: list[BaseException] = []

        def add() -> None:
            try:
                here.transport.add_peer(card.seal("mooncake"), (), timeout_s=1.0)
            except KVBridgeError as error:
                raised.append(error)

        start = time.monotonic()
        adding = threading.Thread(target=add)
        adding.start()
        while adding.is_alive():
            check_reads(here, peer)
            time.sleep(0.01)
        assert 0.9 < time.monotonic() - start < 10
        check_reads(here, peer)
    assert isinstance(raised[0], PeerLostError), raised


def test_a_host_that_refuses_is_lost_at_once(make_agent: MakeAgent) -> None:
    here, there = make_agent(), make_agent()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for field in ("control_port", "engine_port"):
        card = msgspec.structs.replace(card_of(there), **{field: port})
        start = time.monotonic()
        with pytest.raises(PeerLostError):
            here.transport.add_peer(card.seal("mooncake"), (), timeout_s=20)
        assert time.monotonic() - start < 10


def test_another_agent_in_the_same_place_is_noticed(make_agent: MakeAgent) -> None:
    here, there, other = make_agent(), make_agent(), make_agent()
    card, others = card_of(there), card_of(other)
    moved = msgspec.structs.replace(card, control_port=others.control_port)
    with pytest.raises(PeerLostError, match=f"{card.agent} cannot be reached"):
        here.add((moved.seal("mooncake"), ()))
    moved = msgspec.structs.replace(card, engine_port=others.engine_port, beacon=others.beacon)
    with pytest.raises(PeerLostError, match=f"{others.agent}' answers in its place"):
        here.add((moved.seal("mooncake"), ()))
    check_reads(here, here.add(there.address_card))


def test_a_port_that_was_an_earlier_agents_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch, make_agent: MakeAgent
) -> None:
    """Mooncake never forgets the data port that it once heard for "address:port"."""
    here = make_agent()
    first = make_agent()
    here.add(first.address_card)
    second = make_agent()
    cards = [card_of(first), card_of(second)]
    names = [agent_of(here).names.name(card) for card in cards]
    assert names == [f"127.0.0.1:{card.engine_port}" for card in cards]
    # As if the second had been given the port of a third, which has ended.
    third = msgspec.structs.replace(cards[1], agent="ended")
    monkeypatch.setattr(agent_of(here), "names", EngineNames())
    agent_of(here).names.name(third)
    peer = here.add(second.address_card)
    assert isinstance(peer, MooncakePeer)
    assert peer.connection.engine == f"0x07f000001:{cards[1].engine_port}"
    check_reads(here, peer)


def test_strangers_are_shown_out_and_disturb_nobody(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    card = card_of(there)
    sayings = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        encode(b"n", b"no hello first"),
        encode_hello("me", bytes(32)),
        encode_hello("me", card.token) + encode(b"?", b"no such kind"),
        encode_hello("me", card.token) + (NOTIFY_MAX_BYTES + 1).to_bytes(4, "little") + b"n",
    ]
    with caplog.at_level(logging.WARNING):
        for saying in sayings:
            with socket.create_connection(("127.0.0.1", card.control_port), 5) as stranger:
                stranger.settimeout(5)
                stranger.sendall(saying)
                try:
                    while stranger.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
    assert len([r for r in caplog.records if "closed a connection" in r.message]) == len(sayings)
    here.transport.notify(peer, b"still here")
    assert [payload for _, payload in there.wait_notifications(1)] == [b"still here"]
    assert there.transport.poll() == ((), ())


# ------------------------------------------------------------------------------ notifications


def test_notifications_are_bytes_in_order_and_none_is_lost(
    make_agent: MakeAgent,
) -> None:
    """Mooncake's own are text, and the large ones vanish without an error."""
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    payloads = [bytes([i % 256]) * (i * 97 % 3000) for i in range(2000)]
    payloads[1000] = bytes(range(256)) * (NOTIFY_MAX_BYTES // 256)
    for payload in payloads:
        here.transport.notify(peer, payload)
    came = there.wait_notifications(len(payloads))
    assert [payload for _, payload in came] == payloads
    assert {sender for sender, _ in came} == {card_of(here).agent}


def test_a_peer_that_takes_no_notifications_blocks_nobody(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(), make_owner()
    peer = here.add(owner.address_card)
    owner.signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(TransportError, match="which takes none"):
            for _ in range(2 * BACKLOG_MAX_BYTES // NOTIFY_MAX_BYTES):
                here.transport.notify(peer, bytes(NOTIFY_MAX_BYTES))
        assert time.monotonic() - start < 10
    finally:
        owner.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while True:
        try:
            here.transport.notify(peer, b"again")
        except PeerLostError:
            raise
        except TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            break


# --------------------------------------------------------------------------- peers that fail


@pytest.mark.parametrize("op", OPS)
def test_a_stopped_peer_leaves_its_operations_pending_until_it_goes_on(
    op: Op, make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner, other = make_agent(9 * MIB), make_owner(9 * MIB), make_owner(9 * MIB)
    stopped, good = here.add(owner.address_card), here.add(other.address_card)
    owner.call("fill", 7, 8 * MIB)
    here.arena.fill(8, 8 * MIB)
    owner.signal(signal.SIGSTOP)
    try:
        time.sleep(0.1)
        handle = here.submit(op, stopped, [(0, 8 * MIB)], [(0, 8 * MIB)])
        for _ in range(20):
            check_reads(here, good, 8 * MIB)
        check_quiet(here, handle, 1.0)
    finally:
        owner.signal(signal.SIGCONT)
    assert here.wait(handle).state is State.DONE
    assert owner.call("dump", 0, 8 * MIB) == here.arena.data[: 8 * MIB].tobytes()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("op", OPS)
def test_a_peer_may_be_stopped_for_longer_than_mooncake_waits(
    op: Op, make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(8 * MIB), make_owner(8 * MIB)
    peer = here.add(owner.address_card)
    owner.call("fill", 7, 8 * MIB)
    here.arena.fill(8, 8 * MIB)
    owner.signal(signal.SIGSTOP)
    try:
        time.sleep(0.1)
        handle = here.submit(op, peer, everything(here), everything(here))
        check_quiet(here, handle, 35.0)
    finally:
        owner.signal(signal.SIGCONT)
    assert here.wait(handle).state is State.DONE
    assert owner.call("dump", 0, 8 * MIB) == here.arena.data.tobytes()


@pytest.mark.parametrize("op", OPS)
def test_a_killed_peer_fails_its_operations_and_delays_nobody(
    op: Op, make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner, other = make_agent(32 * MIB), make_owner(32 * MIB), make_owner(32 * MIB)
    lost, good = here.add(owner.address_card), here.add(other.address_card)
    handles = [here.submit(op, lost, blocks(32 * MIB), blocks(32 * MIB)) for _ in range(4)]
    time.sleep(0.05)
    owner.kill()
    start = time.monotonic()
    for _ in range(20):
        check_reads(here, good)
    assert time.monotonic() - start < 10  # a call to a dead peer takes a second
    ends = [here.wait(handle) for handle in handles]
    assert time.monotonic() - start < 10
    assert ends[-1].state is State.FAILED
    assert all(end.reason for end in ends if end.state is State.FAILED)
    with pytest.raises(PeerLostError):
        here.submit(op, lost, everything(here), everything(here))
    check_reads(here, good)


def test_the_end_of_an_idle_peer_is_an_event(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(), make_owner()
    peer = here.add(owner.address_card)
    check_reads(here, peer)
    owner.kill()
    time.sleep(0.5)
    with pytest.raises(PeerLostError, match="has ended"):
        here.transport.notify(peer, b"the very first that is sent")


def test_a_peer_killed_while_stopped_fails_what_was_pending(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(8 * MIB), make_owner(8 * MIB)
    peer = here.add(owner.address_card)
    owner.signal(signal.SIGSTOP)
    time.sleep(0.1)
    handles = [here.submit(op, peer, everything(here), everything(here)) for op in OPS]
    check_quiet(here, handles[0], 0.3)
    owner.kill()
    assert {here.wait(handle, timeout_s=10).state for handle in handles} == {State.FAILED}


def test_ended_peers_leave_no_sockets_behind(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    """Mooncake closes a socket only when it is used, and nobody uses those of the dead."""
    others = closed_by_others()  # of what has run in this process before
    here = make_agent(MIB)
    for drop_first in (True, False):
        owner = make_owner(MIB)
        peer = here.add(owner.address_card)
        done = here.wait(here.submit("read", peer, blocks(MIB), blocks(MIB)))
        assert done.state is State.DONE
        if drop_first:
            here.transport.drop_peer(peer)
        owner.kill()
        deadline = time.monotonic() + 10
        while (left := closed_by_others()) > others:
            assert time.monotonic() < deadline, f"{left - others} sockets are left"
            time.sleep(0.02)


def closed_by_others() -> int:
    """Sockets of this process that only it still holds open."""
    established, listens = 1, 10
    return sum(state not in (established, listens) for _, state in _sockets())


# --------------------------------------------------------------------------- what is quiet


@pytest.mark.parametrize("op", OPS)
def test_the_owner_refuses_what_it_has_not_registered_and_lives(
    op: Op, make_agent: MakeAgent
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    there.arena.data[:] = 1
    there.transport.unregister([there.arena.region])
    here.arena.data[:] = 2
    end = here.wait(here.submit(op, peer, everything(here), everything(there)), timeout_s=10)
    assert end.state is State.FAILED
    assert (here.arena.data == 2).all()
    assert (there.arena.data == 1).all()
    there.transport.register([there.arena.region])
    check_reads(here, peer)


def test_a_failure_is_reported_only_once_the_peer_says_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
    make_agent: MakeAgent,
    make_owner: Callable[..., PeerProcess],
) -> None:
    here, owner = make_agent(), make_owner()
    peer = here.add(owner.address_card)
    assert isinstance(peer, MooncakePeer)
    channel = peer.connection.channel
    asked: list[int] = []
    monkeypatch.setattr(channel, "is_quiet", asked.append)
    spy = Spy(here)
    monkeypatch.setattr(spy, "transfer_check_status", lambda piece: -1)
    handle = here.submit("write", peer, everything(here), everything(here))
    check_quiet(here, handle, 1.0)
    assert asked
    assert len(here.transport.memory.busy) == 1
    owner.kill()
    assert here.wait(handle, timeout_s=5).state is State.FAILED
    assert len(here.transport.memory.busy) == 0


LATE_BYTES = """
import os, signal, sys, time
from tests.conformance.peer_process import Agent, PeerProcess
from tests.integration.drivers import (
    KIB,
    MIB,
    OPS,
    MakeAgent,
    agents,
    everything,
    run,
    two_agents,
    without_package,
)
from kvbridge.transport import State
if __name__ == "__main__":
    options = {"allow_open_data_port": True}
    here = Agent("mooncake", 1 << 20, options)
    with PeerProcess("mooncake", 1 << 20, options) as owner:
        peer = here.add(owner.address_card)
        owner.call("fill", 1, 1 << 20)
        here.arena.data[:] = 7
        owner.signal(signal.SIGSTOP)
        time.sleep(0.1)
        handle = here.submit("write", peer, [(0, 1 << 16)], [(0, 1 << 16)])
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            here.pump()
            time.sleep(0.01)
        print("doubted", bool(peer.connection.doubtful), "reported", handle in here.finished)
        owner.signal(signal.SIGCONT)
        print(here.wait(handle).state.value)
        seen = owner.call("dump", 0, 1 << 16)
        print("moved", seen.count(7) > 60000)
        owner.call("fill", 3, 1 << 20)
        before = owner.call("dump", 0, 1 << 16)
        time.sleep(0.3)
        print("quiet", before == owner.call("dump", 0, 1 << 16))
    here.close()
"""


def test_bytes_that_come_after_mooncakes_failure_come_before_ours(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE_BYTES)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MC_")}
    ended = subprocess.run(
        [sys.executable, script],
        env={**clean, "MC_TCP_PROGRESS_TIMEOUT_SEC": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout.splitlines() == [
        "doubted True reported False",
        "failed",
        "moved True",
        "quiet True",
    ], ended.stderr


def test_closing_with_operations_in_flight_leaves_all_memory_quiet(
    make_agent: MakeAgent, make_owner: Callable[..., PeerProcess]
) -> None:
    here, owner = make_agent(32 * MIB), make_owner(32 * MIB)
    peer = here.add(owner.address_card)
    owner.signal(signal.SIGSTOP)
    try:
        time.sleep(0.1)
        for _ in range(4):
            here.submit("read", peer, everything(here), everything(here))
        start = time.monotonic()
        assert not here.transport.close(timeout_s=0.3)
        assert time.monotonic() - start < 8
        here.arena.data[:] = 7
    finally:
        owner.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert (here.arena.data == 7).all()


# ----------------------------------------------------------------------------- whole engines


def test_two_engines_of_different_shape_exchange_their_caches(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shapes = ["--prefill", "tp=1,page=16,layout=nhd", "--decode", "tp=1,page=32,layout=hnd"]
    assert main(["demo", "--transport", "mooncake", *shapes, "--tokens", "2", "--json"]) == 0
    assert msgspec.json.decode(capfd.readouterr().out)["equal"] is True
