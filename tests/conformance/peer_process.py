"""Agents for tests of one transport: in this process, to look inside, or in one of their own.

What every transport must do is in ``kvbridge.testing``, which these are made of.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvbridge.testing import TransportHarness
from kvbridge.testing.memory import GUARD_NBYTES, GUARD_VALUE, SharedMemory, pattern
from kvbridge.testing.poller import Poller
from kvbridge.testing.process import AgentProcess, Pending
from kvbridge.testing.remote import RemoteAgent, RemotePeer
from kvbridge.transport import (
    Descriptors,
    Finished,
    Handle,
    Notification,
    Op,
    Peer,
    Region,
    open_transport,
)

__all__ = ["PATIENCE_S", "Agent", "Arena", "PeerProcess", "Pieces", "pattern", "pieces_at"]

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


def pieces_at(address: int, pieces: Pieces) -> Descriptors:
    """Return descriptors of pieces of the arena at an address."""
    array = np.array(pieces, np.uint64).reshape(-1, 2)
    return Descriptors(array[:, 0] + np.uint64(address), array[:, 1])


class Agent(Poller):
    """A transport of this process, with an arena."""

    def __init__(self, name: str, nbytes: int, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(
            open_transport({"transport": name, "options": options or {}}), knows_all=False
        )
        self.arena = Arena(nbytes)
        self.transport.register([self.arena.region])

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

    def wait(self, handle: Handle, timeout_s: float = PATIENCE_S) -> Finished:
        return super().wait(handle, timeout_s)

    def wait_notifications(self, count: int, timeout_s: float = PATIENCE_S) -> list[Notification]:
        return super().wait_notifications(count, timeout_s)

    def close(self) -> tuple[Region, ...]:
        return self.transport.close()


class PeerProcess:
    """An agent in a process of its own that can be told what to do."""

    def __init__(
        self,
        name: str,
        nbytes: int,
        options: Mapping[str, Any] | None = None,
        *,
        polls_when_idle: bool = True,
    ) -> None:
        self._memory = SharedMemory.make()
        self.process = AgentProcess(TransportHarness(name), self._memory, None)
        self.agent = RemoteAgent(self.process, nbytes, PATIENCE_S)
        self.agent.open(options or {}, polls_when_idle=polls_when_idle)
        self.agent.register(self.agent.region)
        self.address_card = self.agent.agent_info(), self.agent.registered
        self._peer: RemotePeer | None = None
        self._pending: Callable[[], Any] = lambda: None
        self._commands: dict[str, Callable[..., Callable[[], Any]]] = {
            "add_peer": self._add_peer,
            "dump": lambda offset, nbytes: lambda: self._dump(offset, nbytes),
            "fill": self._fill,
            "notifications": self._notifications,
            "transfer": self._transfer,
            "transfer_for_ever": self._transfer_for_ever,
        }

    def start(self, command: str, *args: Any) -> None:
        """Tell it to do something, without waiting."""
        self._pending = self._commands[command](*args)

    def finish(self) -> Any:
        """Return what the command returned that was started last."""
        return self._pending()

    def call(self, command: str, *args: Any) -> Any:
        self.start(command, *args)
        return self.finish()

    def signal(self, number: signal.Signals) -> None:
        self.process.signal(number)

    def is_alive(self) -> bool:
        return self.process.exit_code is None

    def kill(self) -> None:
        """End it the hard way: nothing is cleaned up."""
        self.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        code = 0
        if not self.process.dead and kind is None:
            self.agent.close()
            code = self.process.exit()
        self.process.close()
        self._memory.close()
        if code:
            raise RuntimeError(f"the peer process ended with status {code}")

    def _result(self, pending: Pending) -> Any:
        return pending.result(2 * PATIENCE_S)

    def _fill(self, seed: int, nbytes: int) -> Callable[[], None]:
        self.agent.data[:nbytes] = pattern(seed, nbytes)
        return lambda: None

    def _dump(self, offset: int, nbytes: int) -> bytes:
        return self.agent.data[offset : offset + nbytes].tobytes()

    def _notifications(
        self, count: int, timeout_s: float = PATIENCE_S
    ) -> Callable[[], list[tuple[str, bytes]]]:
        pending = self.agent.start("take_notifications", count, timeout_s)
        return lambda: [(sender, payload) for sender, payload in self._result(pending)[0]]

    def _add_peer(self, info: bytes, regions: tuple[Region, ...]) -> Callable[[], str]:
        self._regions = regions
        self._peer = self.agent.add_peer_as(self.agent, info, regions)
        name = self._peer.agent
        return lambda: name

    def _submit_args(self, op: Op, local: Pieces, remote: Pieces) -> tuple[Any, ...]:
        if self._peer is None:
            raise RuntimeError("add_peer comes first")
        there = pieces_at(self._regions[0].address, remote)
        return op, self._peer.id, self.agent.pieces(local), there

    def _transfer(
        self, op: Op, local: Pieces, remote: Pieces, notification: bytes
    ) -> Callable[[], str]:
        args = self._submit_args(op, local, remote)
        handle = self.agent.call("submit", *args, notification)
        return lambda: str(self.agent.wait(handle).state.value)

    def _transfer_for_ever(self, op: Op, local: Pieces, remote: Pieces) -> Callable[[], None]:
        pending = self.agent.start("transfer_for_ever", *self._submit_args(op, local, remote), 1)
        return lambda: self._result(pending)
