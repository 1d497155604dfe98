"""An agent as the rules see it, and its peers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvbridge.testing.agent import Ended, Meeting, Span
from kvbridge.testing.memory import Bytes, Extent
from kvbridge.testing.process import GRACE_S, AgentProcess, Pending
from kvbridge.testing.serve import PROCESS
from kvbridge.testing.violations import expect, expect_equal
from kvbridge.transport import Capabilities, Descriptors, Op, Path, Region, State

Pieces = Sequence[tuple[int, int]]
"""Offset and length of each piece, within an agent's memory."""


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A peer that an agent has added.

    Attributes:
        id: Its number there.
        owner: Whose memory it is.
        agent: The name that the transport gave to it.
        path: What carries the bytes.
        capabilities: What holds for it.
        regions: Its regions, as the transport knows them.
    """

    id: int
    owner: "RemoteAgent"
    agent: str
    path: Path
    capabilities: Capabilities
    regions: tuple[Region, ...]


class Adding(NamedTuple):
    """A peer that is being added; ``result`` is the peer."""

    pending: Pending
    owner: "RemoteAgent"

    def result(self, timeout_s: float) -> RemotePeer:
        """Wait for the peer, or raise what ``add_peer`` raised."""
        met: Meeting = self.pending.result(timeout_s)
        return RemotePeer(met.id, self.owner, met.agent, met.path, met.capabilities, met.regions)


class RemoteAgent:
    """One agent in a process of its own, with memory of its own.

    Attributes:
        process: Where it lives.
        extent: Its place in the shared memory.
        data: Its memory, to place and to inspect bytes without the transport.
        registered: What it has registered.
    """

    def __init__(self, process: AgentProcess, nbytes: int, patience_s: float) -> None:
        """Make the agent; it is not open yet."""
        self.process = process
        self.patience_s = patience_s
        self.extent: Extent = process.memory.take(nbytes)
        self.data: Bytes = process.memory.view(self.extent)
        self.registered: tuple[Region, ...] = ()
        self._id = process.new_agent()

    @property
    def address(self) -> int:
        """Where its memory begins, in its own process."""
        return self.process.base + self.extent.offset

    @property
    def region(self) -> Region:
        """All of its memory."""
        return Region(self.address, self.extent.nbytes)

    def start(self, method: str, *args: Any, **more: Any) -> Pending:
        """Make any call without waiting for it."""
        return self.process.start(self._id, method, *args, **more)

    def call(self, method: str, *args: Any, **more: Any) -> Any:
        """Make any call."""
        return self.start(method, *args, **more).result(self.patience_s + GRACE_S)

    # --- the transport's calls -------------------------------------------------------------------

    def open(self, options: Any, *, polls_when_idle: bool = True) -> Capabilities:
        """Open it; returns what it declares."""
        self.call("open", dict(options), polls_when_idle)
        can: Capabilities = self.call("capabilities")
        return can

    def register(self, *regions: Region) -> None:
        """Register memory."""
        self.call("register", regions)
        self.registered += regions

    def unregister(self, *regions: Region) -> None:
        """Take memory back."""
        self.call("unregister", regions)
        self.registered = tuple(r for r in self.registered if r not in regions)

    def agent_info(self) -> bytes:
        """Return what peers need."""
        info: bytes = self.call("agent_info")
        return info

    def add_peer(self, owner: "RemoteAgent", *, timeout_s: float | None = None) -> RemotePeer:
        """Add another agent with all that it has registered."""
        return self.add_peer_as(owner, owner.agent_info(), owner.registered, timeout_s=timeout_s)

    def add_peer_as(
        self,
        owner: "RemoteAgent",
        info: bytes,
        regions: Sequence[Region],
        *,
        timeout_s: float | None = None,
    ) -> RemotePeer:
        """Add a peer with whatever is said of it."""
        limit_s = self.patience_s if timeout_s is None else timeout_s
        adding = self.start_adding(owner, info, regions, timeout_s=limit_s)
        return adding.result(limit_s + GRACE_S)

    def start_adding(
        self, owner: "RemoteAgent", info: bytes, regions: Sequence[Region], *, timeout_s: float
    ) -> Adding:
        """Add a peer beside all other calls, without waiting for it."""
        args = (info, tuple(regions), timeout_s)
        return Adding(self.process.start_aside(self._id, "add_peer", *args), owner)

    def drop_peer(self, peer: RemotePeer) -> None:
        """Drop a peer."""
        self.call("drop_peer", peer.id)

    def start_dropping(self, peer: RemotePeer) -> Pending:
        """Drop a peer beside all other calls, without waiting for it."""
        return self.process.start_aside(self._id, "drop_peer", peer.id)

    def submit(
        self, op: Op, peer: RemotePeer, local: Pieces, remote: Pieces, notification: bytes = b""
    ) -> int:
        """Submit; pieces are offsets into both agents' memory."""
        handle: int = self.call(
            "submit", op, peer.id, self.pieces(local), peer.owner.pieces(remote), notification
        )
        return handle

    def notify(self, peer: RemotePeer, *payloads: bytes) -> None:
        """Send notifications."""
        self.call("notify", peer.id, payloads)

    def abandon(self, handle: int) -> None:
        """Give up an operation."""
        self.call("abandon", handle)

    def close(self, timeout_s: float = 5.0, fill: Span | None = None) -> tuple[Region, ...]:
        """Close it; returns the regions that are not quiet."""
        regions: tuple[Region, ...] = self.call("close", timeout_s, fill)
        return regions

    def forget(self) -> None:
        """Let nothing refer to it any more, in its process or in the shared memory."""
        self.process.start(PROCESS, "forget_agent", self._id).result(self.patience_s)
        self.process.memory.give_back(self.extent)

    # --- waiting ---------------------------------------------------------------------------------

    def wait(self, handle: int, *, look: Sequence[Span] = (), fill: Span | None = None) -> Ended:
        """Wait until an operation has ended."""
        ended: Ended = self.call("wait", handle, self.patience_s, look, fill)
        return ended

    def finish(self, handle: int, what: str) -> Ended:
        """Wait for an operation that must succeed."""
        ended = self.wait(handle)
        expect(ended.state is State.DONE, f"{what} failed: {ended.reason}")
        return ended

    def move(self, op: Op, peer: RemotePeer, local: Pieces, remote: Pieces) -> None:
        """Submit, and wait for an operation that must succeed."""
        self.finish(self.submit(op, peer, local, remote), f"a {op} of {len(local)} pieces")

    def notifications(
        self, count: int, timeout_s: float | None = None, look: Sequence[Span] = ()
    ) -> tuple[list[tuple[str, bytes]], bytes]:
        """Return what has come, and a picture of memory at that moment."""
        limit_s = self.patience_s if timeout_s is None else timeout_s
        taken: tuple[list[tuple[str, bytes]], bytes] = self.call(
            "take_notifications", count, limit_s, look
        )
        return taken

    # --- memory ----------------------------------------------------------------------------------

    def pieces(self, pieces: Pieces) -> Descriptors:
        """Return descriptors of pieces of this agent's memory."""
        array = np.array(pieces, np.uint64).reshape(-1, 2)
        return Descriptors(array[:, 0] + np.uint64(self.address), array[:, 1])

    def span(self, offset: int, nbytes: int) -> Span:
        """Name a range of this agent's memory to any process."""
        return Span(self.extent.offset + offset, nbytes)

    def check_guards(self, what: str) -> None:
        """Break the rule where somebody wrote around this agent's memory."""
        expect_equal(
            f"{what}: the guard bytes around the memory are intact",
            self.process.memory.guards_intact(self.extent),
            True,
        )


def parts_within(
    local: Pieces, remote: Pieces, can: Capabilities
) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Cut two paired lists so that each part is within the limits of a transport."""
    most_bytes = can.transfer_max_bytes or 1 << 62
    most_pieces = can.descriptors_max or 1 << 62
    parts: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = [([], [])]
    room = most_bytes
    for (here, nbytes), (there, _) in zip(local, remote, strict=True):
        for start in itertools.chain(range(0, nbytes, most_bytes) or (0,)):
            size = min(nbytes - start, most_bytes)
            if size > room or len(parts[-1][0]) == most_pieces:
                parts.append(([], []))
                room = most_bytes
            parts[-1][0].append((here + start, size))
            parts[-1][1].append((there + start, size))
            room -= size
    return parts
