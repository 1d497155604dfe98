"""Agents for the tests, in this process or in one of their own that can be told what to do.

Bytes are placed and looked at with numpy, never through the transport under test.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import KVBridgeError
from kvbridge.transport import (
    Descriptors,
    Finished,
    Handle,
    Notification,
    Op,
    Peer,
    Region,
    Transport,
    open_transport,
)

GUARD_NBYTES = 4096
GUARD_VALUE = 0xA5
PATIENCE_S = 20.0

Pieces = Sequence[tuple[int, int]]
"""Offset and length of each piece, within an arena."""


class Arena:
    """Memory between two guards; only what lies between them is meant to be registered."""

    def __init__(self, nbytes: int) -> None:
        self._whole = np.full(nbytes + 2 * GUARD_NBYTES, GUARD_VALUE, np.uint8)
        self.data = self._whole[GUARD_NBYTES:-GUARD_NBYTES]
        self.address = int(self.data.ctypes.data)
        self.region = Region(self.address, nbytes)

    def fill(self, seed: int, nbytes: int) -> None:
        self.data[:nbytes] = pattern(seed, nbytes)

    def guards_intact(self) -> bool:
        low, high = self._whole[:GUARD_NBYTES], self._whole[-GUARD_NBYTES:]
        return bool((low == GUARD_VALUE).all() and (high == GUARD_VALUE).all())


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Return bytes that look random and are the same for everyone."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def pieces_at(address: int, pieces: Pieces) -> Descriptors:
    """Return descriptors of pieces of the arena at an address."""
    array = np.array(pieces, np.uint64).reshape(-1, 2)
    return Descriptors(array[:, 0] + np.uint64(address), array[:, 1])


class Agent:
    """A transport with an arena, its one peer, and what poll has returned so far."""

    def __init__(self, name: str, nbytes: int, options: Mapping[str, Any] | None = None) -> None:
        self.transport: Transport = open_transport({"transport": name, "options": options or {}})
        self.arena = Arena(nbytes)
        self.transport.register([self.arena.region])
        self.finished: dict[Handle, Finished] = {}
        self.notifications: list[Notification] = []

    @property
    def address_card(self) -> tuple[bytes, tuple[Region, ...]]:
        return self.transport.agent_info(), (self.arena.region,)

    def add(self, card: tuple[bytes, tuple[Region, ...]]) -> Peer:
        info, regions = card
        return self.transport.add_peer(info, regions, timeout_s=PATIENCE_S)

    def submit(
        self, op: Op, peer: Peer, local: Pieces, remote: Pieces, notification: bytes = b""
    ) -> Handle:
        return self.transport.submit(
            op,
            peer,
            pieces_at(self.arena.address, local),
            pieces_at(peer.table.regions[0].address, remote),
            notification,
        )

    def pump(self) -> None:
        finished, notifications = self.transport.poll()
        for entry in finished:
            if entry.handle in self.finished:
                raise RuntimeError(f"operation {entry.handle.id} was reported twice")
            self.finished[entry.handle] = entry
        self.notifications.extend(notifications)

    def wait(self, handle: Handle, timeout_s: float = PATIENCE_S) -> Finished:
        deadline = time.monotonic() + timeout_s
        while handle not in self.finished:
            if time.monotonic() > deadline:
                raise TimeoutError(f"operation {handle.id} is pending after {timeout_s} s")
            self.pump()
            time.sleep(0)
        return self.finished[handle]

    def wait_notifications(self, count: int, timeout_s: float = PATIENCE_S) -> list[Notification]:
        deadline = time.monotonic() + timeout_s
        while len(self.notifications) < count and time.monotonic() < deadline:
            self.pump()
            time.sleep(0)
        taken, self.notifications = self.notifications, []
        return taken

    def close(self) -> tuple[Region, ...]:
        return self.transport.close()


class _Commands:
    """What the process of a peer can be told."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peer: Peer | None = None

    def fill(self, seed: int, nbytes: int) -> None:
        self._agent.arena.fill(seed, nbytes)

    def dump(self, offset: int, nbytes: int) -> bytes:
        return self._agent.arena.data[offset : offset + nbytes].tobytes()

    def guards_intact(self) -> bool:
        return self._agent.arena.guards_intact()

    def notifications(self, count: int, timeout_s: float = PATIENCE_S) -> list[tuple[str, bytes]]:
        return [
            (sender, payload)
            for sender, payload in self._agent.wait_notifications(count, timeout_s)
        ]

    def dump_at_notification(self, offset: int, nbytes: int) -> bytes:
        if not self._agent.wait_notifications(1):
            raise KVBridgeError("no notification came")
        return self.dump(offset, nbytes)

    def add_peer(self, info: bytes, regions: tuple[Region, ...]) -> str:
        self._peer = self._agent.add((info, regions))
        return self._peer.agent

    def transfer(self, op: Op, local: Pieces, remote: Pieces, notification: bytes) -> str:
        if self._peer is None:
            raise KVBridgeError("add_peer comes first")
        handle = self._agent.submit(op, self._peer, local, remote, notification)
        return self._agent.wait(handle).state.value

    def transfer_for_ever(self, op: Op, local: Pieces, remote: Pieces) -> None:
        while True:
            self.transfer(op, local, remote, b"")

    def resources(self) -> tuple[int, int]:
        return resources()

    def hang(self) -> None:
        threading.Event().wait()


def resources() -> tuple[int, int]:
    """Return how many file descriptors and threads this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _serve(
    pipe: Connection, name: str, nbytes: int, options: Mapping[str, Any], polls_when_idle: bool
) -> None:
    agent = Agent(name, nbytes, options)
    commands = _Commands(agent)
    pipe.send((True, agent.address_card))
    while True:
        if not pipe.poll(0.001):
            if polls_when_idle:
                agent.pump()
            continue
        try:
            command, *args = pipe.recv()
        except EOFError:
            break  # whoever started this process has ended
        if command == "exit":
            break
        try:
            answer = (True, getattr(commands, command)(*args))
        except (KVBridgeError, TimeoutError) as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)
    agent.close()


class PeerProcess:
    """A process with an agent, a transport and an arena of its own."""

    def __init__(
        self,
        name: str,
        nbytes: int,
        options: Mapping[str, Any] | None = None,
        *,
        polls_when_idle: bool = True,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, name, nbytes, options or {}, polls_when_idle), daemon=True
        )
        self.process.start()
        theirs.close()
        self.address_card: tuple[bytes, tuple[Region, ...]] = self.finish()

    def start(self, command: str, *args: Any) -> None:
        """Tell it to do something, without waiting."""
        self._pipe.send((command, *args))

    def finish(self, timeout_s: float = 2 * PATIENCE_S) -> Any:
        """Return what the command returned that was started last."""
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the peer process did not answer in {timeout_s} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def call(self, command: str, *args: Any) -> Any:
        self.start(command, *args)
        return self.finish()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        """End it the hard way: nothing is cleaned up."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pipe.closed:
            return
        try:
            self.start("exit")
            self.process.join(PATIENCE_S)
        except OSError:
            pass
        code = self.process.exitcode
        self.kill()
        if kind is None and code != 0:
            raise RuntimeError(f"the peer process ended with status {code}")
