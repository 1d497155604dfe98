"""What only the transport ``local`` does: the copy itself, its probe, and its packets."""

import ctypes
import dataclasses
import errno
import gc
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import (
    NotSupportedError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvbridge.transport import Op, State, seal_agent_info
from kvbridge.transport.local import library, translate
from kvbridge.transport.local.driver import LocalTransport
from kvbridge.transport.local.library import ScatterCopy
from kvbridge.transport.local.wire import NOTIFICATION, AgentInfo, encode_hello
from kvbridge.transport.local.worker import LocalPeer
from tests.conformance.peer_process import Agent, Arena, PeerProcess, pattern, pieces_at

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def make_agent(usable_transport: Callable[[str], object]) -> Iterator[Callable[..., Agent]]:
    usable_transport("local")
    made: list[Agent] = []

    def make(nbytes: int = PAGE, **options: object) -> Agent:
        made.append(Agent("local", nbytes, options))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.002)


# ---------------------------------------------------------------- the copy


def short_call(real: Callable[..., int], most: list[int]) -> Callable[..., int]:
    """Move fewer bytes than asked for, as the kernel may."""

    def call(pid: int, local: int, count: int, remote: int, remote_count: int, flags: int) -> int:
        row = ctypes.c_uint64 * (2 * count)
        iovecs = np.ctypeslib.as_array(row.from_address(local)).reshape(-1, 2).copy()
        left = most.pop() if most else 1 << 30
        for i, nbytes in enumerate(iovecs[:, 1]):
            iovecs[i, 1] = min(int(nbytes), left)
            left -= int(iovecs[i, 1])
        return real(pid, iovecs.ctypes.data, count, remote, remote_count, flags)

    return call


@given(
    op=st.sampled_from(["read", "write"]),
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 5, 100, 4097]), min_size=1, max_size=30),
    step=st.integers(1, 3000),
    most=st.lists(st.integers(1, 2000), max_size=20),
    iovecs_max=st.integers(1, 8),
)
def test_a_copy_in_steps_and_short_calls_is_the_whole_copy(
    op: Op, sizes: list[int], step: int, most: list[int], iovecs_max: int
) -> None:
    total = sum(sizes) + 3 * len(sizes)
    here, there = Arena(total + 1), Arena(total + 1)
    here.fill(1, total)
    there.fill(2, total)
    at = np.cumsum([0, *(n + 3 for n in sizes[:-1])])
    target_at = np.cumsum([0, *(n + 3 for n in sizes[:0:-1])])[::-1]
    local_at, remote_at = (target_at, at) if op == "read" else (at, target_at)
    source, target = (there, here) if op == "read" else (here, there)
    model = target.data.copy()
    for start, to, nbytes in zip(at, target_at, sizes, strict=True):
        model[to : to + nbytes] = source.data[start : start + nbytes]
    local = pieces_at(here.address, [(int(a), n) for a, n in zip(local_at, sizes, strict=True)])
    remote = pieces_at(there.address, [(int(a), n) for a, n in zip(remote_at, sizes, strict=True)])
    copy = ScatterCopy(op, os.getpid(), local, remote)
    copy._call = short_call(copy._call, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "IOVECS_MAX", iovecs_max)
        while copy.done_nbytes < copy.nbytes:
            before = copy.done_nbytes
            copy.advance(step)
            assert copy.done_nbytes == min(before + step, copy.nbytes)
    np.testing.assert_array_equal(target.data, model)
    assert here.guards_intact()
    assert there.guards_intact()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_copy_stops_exactly_at_a_hole(op: Op) -> None:
    with mmap.mmap(-1, 3 * PAGE) as memory:
        memory[:] = bytes(range(1, 256)) * (3 * PAGE // 255) + bytes(3 * PAGE % 255)
        before = bytes(memory)
        window = np.frombuffer(memory, np.uint8)
        address = int(window.ctypes.data)
        libc = ctypes.CDLL(None)
        middle = ctypes.c_void_p(address + PAGE)
        here = Arena(3 * PAGE)
        copy = ScatterCopy(
            op,
            os.getpid(),
            pieces_at(here.address, [(0, 100), (100, 3 * PAGE - 100)]),
            pieces_at(address, [(0, 100), (100, 3 * PAGE - 100)]),
        )
        assert libc.mprotect(middle, PAGE, 0) == 0
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
                copy.advance(3 * PAGE)
        finally:
            libc.mprotect(middle, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
        assert copy.done_nbytes == PAGE
        moved = here.data[:PAGE].tobytes()
        assert bytes(memory) == before if op == "read" else bytes(memory[:PAGE]) == moved
        assert bytes(memory[PAGE:]) == before[PAGE:]
        assert op == "write" or moved == before[:PAGE]
        del window


def test_a_call_that_moves_nothing_cannot_loop_for_ever() -> None:
    arena = Arena(10)
    pieces = pieces_at(arena.address, [(0, 10)])
    copy = ScatterCopy("read", os.getpid(), pieces, pieces)
    copy._call = lambda *args: 0
    with pytest.raises(OSError, match="nothing was copied"):
        copy.advance(10)


def test_descriptors_cannot_be_changed_after_submit(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(64 * MIB, slice_bytes=MIB), make_agent(64 * MIB)
    peer = here.add(there.address_card)
    local = pieces_at(here.arena.address, [(0, 32 * MIB)])
    remote = pieces_at(there.arena.address, [(0, 32 * MIB)])
    handle = here.transport.submit("read", peer, local, remote)
    local.address[:] = 0
    remote.nbytes[:] = 0
    assert here.wait(handle).state is State.DONE


@pytest.mark.parametrize("payload", ["words", None, 7])
def test_a_notification_that_is_not_bytes_pins_nothing(
    payload: Any, make_agent: Callable[..., Agent]
) -> None:
    here, there = make_agent(4096), make_agent(4096)
    peer = here.add(there.address_card)
    with pytest.raises(NotSupportedError, match=f"must be bytes, got {type(payload).__name__}"):
        here.submit("read", peer, [(0, 8)], [(0, 8)], payload)
    with pytest.raises(NotSupportedError, match="must be bytes"):
        here.transport.notify(peer, payload)
    here.transport.unregister([here.arena.region])


def test_memory_that_is_gone_fails_with_a_reason(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(), make_agent()
    agent_info, (region,) = there.address_card
    unmapped = dataclasses.replace(region, address=PAGE)
    peer = here.add((agent_info, (unmapped,)))
    end = here.wait(here.submit("read", peer, [(0, 10)], [(0, 10)], b"never"))
    assert end.state is State.FAILED
    assert "not mapped" in end.reason
    assert there.wait_notifications(1, 0.05) == []


# -------------------------------------------------------- giving up between slices


def test_abandon_drop_and_close_take_effect_between_slices(
    make_agent: Callable[..., Agent],
) -> None:
    here, there = make_agent(64 * MIB, slice_bytes=4096), make_agent(64 * MIB)
    for give_up, said in (("abandon", "abandoned"), ("drop", "dropped"), ("close", "closed")):
        peer = here.add(there.address_card)
        handle = here.submit("read", peer, [(0, 64 * MIB)], [(0, 64 * MIB)], b"never")
        if give_up == "abandon":
            here.transport.abandon(handle)
        elif give_up == "drop":
            here.transport.drop_peer(peer)
        else:
            assert here.transport.close() == ()
        end = here.wait(handle)
        assert end.state is State.FAILED
        assert said in end.reason
        assert here.transport.memory.busy == ()
    assert there.wait_notifications(1, 0.05) == []


def test_a_number_that_was_given_to_another_process_is_not_touched(
    make_agent: Callable[..., Agent],
) -> None:
    here, there = make_agent(), make_agent()
    there.arena.fill(3, PAGE)
    peer = here.add(there.address_card)
    assert isinstance(peer, LocalPeer)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pidfd = os.pidfd_open(process.pid)
        process.kill()
    life = select.poll()
    life.register(pidfd, select.POLLIN)
    # As after a reuse: the number leads to a process with the right memory, but ours is dead.
    reused = dataclasses.replace(peer, life=life)
    assert isinstance(here.transport, LocalTransport)
    here.transport._peers[reused] = reused
    before = there.arena.data.copy()
    end = here.wait(here.submit("write", reused, [(0, PAGE)], [(0, PAGE)]))
    del here.transport._peers[reused]
    os.close(pidfd)
    assert (end.state, "peer gone" in end.reason) == (State.FAILED, True)
    assert (there.arena.data == before).all()


def test_not_quiet_memory_is_returned_by_close(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScatterCopy, "advance", lambda self, nbytes: time.sleep(0.5))
        handle = here.submit("read", peer, [(0, 10)], [(0, 10)])
        time.sleep(0.05)
        start = time.monotonic()
        assert here.transport.close(timeout_s=0.1) == (here.arena.region,)
        assert time.monotonic() - start < 0.4
    assert here.wait(handle).state is State.FAILED
    assert here.transport.close() == ()


# ------------------------------------------------------------------- the probe


def test_it_runs_here(usable_transport: Callable[[str], object]) -> None:
    usable_transport("local")


@pytest.mark.parametrize(
    ("scope", "capabilities", "ok"),
    [
        ("0", "0", True),
        ("1", "0", True),
        ("2", "0", False),
        ("2", f"{1 << 19:016x}", True),
        ("3", f"{1 << 19:016x}", False),
        ("nonsense", "0", True),
        ("2", "nonsense", False),
    ],
)
def test_the_probe_knows_yama(
    scope: str, capabilities: str, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yama, status = tmp_path / "yama", tmp_path / "status"
    yama.write_text(f"{scope}\n")
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(library, "_YAMA", yama)
    monkeypatch.setattr(library, "_STATUS", status)
    found = LocalTransport.probe()
    assert found.ok is ok
    if not ok:
        assert f"ptrace_scope is {scope}" in found.reason
        assert "kernel.yama.ptrace_scope=0" in found.hint


def test_a_forbidden_call_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> bytes:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(library, "read_bytes", forbidden)
    found = LocalTransport.probe()
    assert not found.ok
    assert "SYS_PTRACE" in found.hint
    with pytest.raises(TransportUnavailableError, match="SYS_PTRACE"):
        LocalTransport().open()


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_libc", None)
    assert "64-bit Linux" in LocalTransport.probe().reason


@pytest.mark.parametrize("number", [*errno.errorcode, 0, None])
def test_every_error_has_a_reason(number: int | None) -> None:
    error = OSError(number, "text")
    assert translate.reason(error)
    assert isinstance(translate.peer_error(error, "somebody"), TransportError)


# ------------------------------------------------------------ who the peer is


def info_of(agent: Agent) -> AgentInfo:
    return AgentInfo.unseal("local", agent.transport.agent_info())


def test_what_is_sealed_well_but_garbled_inside_is_refused(
    make_agent: Callable[..., Agent],
) -> None:
    here, there = make_agent(), make_agent()
    info = info_of(there)
    values = msgspec.to_builtins(info, builtin_types=(bytes,))
    bad: list[object] = [None, [], values[:-1], [*values, 1], [1, "", *values[2:]]]
    bad += [[*values[:3], -1], [*values[:2], b"short", values[3]]]
    for value in bad:
        with pytest.raises(TransportError, match="unknown fields"):
            here.add((seal_agent_info("local", msgspec.msgpack.encode(value)), ()))
    with pytest.raises(TransportError, match="version 2"):
        here.add((msgspec.structs.replace(info, version=2).seal("local"), ()))


def test_the_wrong_process_is_found_out(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(), make_agent()
    info = info_of(there)
    wrong = [
        msgspec.structs.replace(info, token=bytes(32)),
        msgspec.structs.replace(info, token_address=info.token_address + 1),
        msgspec.structs.replace(info, token_address=PAGE),
        msgspec.structs.replace(info, token_address=(1 << 64) - 1),
        msgspec.structs.replace(info, agent="nobody"),
    ]
    for one in wrong:
        with pytest.raises(PeerLostError, match="agent info again"):
            here.add((one.seal("local"), ()))


def test_a_name_taken_over_is_not_waited_for_for_ever(make_agent: Callable[..., Agent]) -> None:
    here, there = make_agent(), make_agent()
    card = there.address_card
    assert isinstance(there.transport, LocalTransport)
    agent = there.transport._opened()  # with the token that the caller looks for
    there.close()
    assert agent.card == AgentInfo.unseal("local", card[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(info_name := AgentInfo.unseal("local", card[0]).socket_name)
        taken.listen(0)
        assert info_name[:1] == b"\0"
        # The first caller is queued and never answered; then the queue is full.
        for _ in range(3):
            start = time.monotonic()
            with pytest.raises(PeerLostError, match="did not answer in time"):
                here.transport.add_peer(*card, timeout_s=0.2)
            assert time.monotonic() - start < 2


def test_another_user_is_told_what_to_do(make_agent: Callable[..., Agent]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    card = make_agent().address_card
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(20)
            os.setuid(65534)
            LocalTransport().open()
            other = LocalTransport()
            other.open()
            other.add_peer(*card, timeout_s=5)
        except TransportUnavailableError as error:
            os.write(writer, error.hint.encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        assert b"same user" in pipe.read()


def test_a_forked_child_may_open_its_own(make_agent: Callable[..., Agent]) -> None:
    card = make_agent().address_card
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(20)
            child = Agent("local", PAGE)
            end = child.wait(child.submit("read", child.add(card), [(0, 10)], [(0, 10)]))
            child.close()
            os._exit(0 if end.state is State.DONE else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# ------------------------------------------------------------- notifications


@pytest.mark.parametrize(
    "packets",
    [
        [b"garbage"],
        [NOTIFICATION + b"before the hello"],
        [b"h" + b"\xc1"],
        ["wrong token"],
        ["hello", b"x"],
        ["hello", "hello"],
        ["hello", NOTIFICATION + bytes(65537)],
        ["hello", NOTIFICATION + bytes(100_000)],
    ],
)
def test_malformed_packets_end_their_connection_only(
    make_agent: Callable[..., Agent], packets: list[bytes | str]
) -> None:
    here, there = make_agent(), make_agent()
    peer = here.add(there.address_card)
    info = info_of(there)
    words = {"hello": encode_hello("x", info.token), "wrong token": encode_hello("x", bytes(32))}
    transport = there.transport
    assert isinstance(transport, LocalTransport)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(10)
        stranger.connect(info.socket_name)
        for packet in packets:
            stranger.send(words[packet] if isinstance(packet, str) else packet)
        wait_until(lambda: transport._opened().hub.refused == 1)
    here.transport.notify(peer, b"still here")
    assert [n.payload for n in there.wait_notifications(1)] == [b"still here"]


@pytest.mark.parametrize("closes", [False, True])
def test_a_slow_peer_blocks_nobody_and_loses_nothing(
    make_agent: Callable[..., Agent], closes: bool
) -> None:
    here = make_agent()
    with PeerProcess("local", PAGE) as there:
        peer = here.add(there.address_card)
        there.signal(signal.SIGSTOP)
        start = time.monotonic()
        for i in range(3000):
            here.transport.notify(peer, str(i).encode() * 100)
        assert time.monotonic() - start < 3
        there.signal(signal.SIGCONT)
        if closes:  # which sends what is still queued
            here.close()
        received = there.call("notifications", 3000)
        assert [p for _, p in received] == [str(i).encode() * 100 for i in range(3000)]


def test_a_peer_that_takes_nothing_is_lost_in_the_end(make_agent: Callable[..., Agent]) -> None:
    here = make_agent(send_timeout_s=0.2)
    with PeerProcess("local", PAGE) as there:
        peer = here.add(there.address_card)
        there.signal(signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(PeerLostError, match=r"took no notification for 0.2 s"):
                for _ in range(1200):
                    here.transport.notify(peer, bytes(65536))
            with pytest.raises(PeerLostError):
                here.submit("read", peer, [(0, 1)], [(0, 1)])
            here.transport.close(timeout_s=0.5)
            assert time.monotonic() - start < 10
        finally:
            there.signal(signal.SIGCONT)


def test_nothing_is_left_of_a_killed_peer(make_agent: Callable[..., Agent]) -> None:
    here = make_agent()
    there = PeerProcess("local", PAGE)
    peer = here.add(there.address_card)
    assert peer.agent in Path("/proc/net/unix").read_text()
    there.kill()
    assert peer.agent not in Path("/proc/net/unix").read_text()


def test_a_closed_transport_is_freed() -> None:
    agent, other = Agent("local", PAGE), Agent("local", PAGE)
    handle = agent.submit("read", agent.add(other.address_card), [(0, 1)], [(0, 1)])
    agent.wait(handle)
    agent.close()
    other.close()
    gone = weakref.ref(agent.transport)
    del agent, handle
    gc.collect()
    assert gone() is None


def test_the_pattern_is_no_constant() -> None:
    assert (pattern(1, 100) != pattern(2, 100)).any()
