"""One agent: a transport, and what its polls have returned so far. Lives in its own process."""

import itertools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.testing.memory import SharedMemory
from kvbridge.testing.poller import HangingError, Poller
from kvbridge.testing.violations import RuleViolationError
from kvbridge.transport import (
    Capabilities,
    Descriptors,
    Handle,
    Op,
    Path,
    Peer,
    Region,
    RegionTable,
    State,
    Transport,
)

FILL_VALUE = 7


class Meeting(NamedTuple):
    """What ``add_peer`` returned, as far as it can leave the process."""

    id: int
    agent: str
    path: Path
    capabilities: Capabilities
    regions: tuple[Region, ...]


class Ended(NamedTuple):
    """How an operation ended.

    Attributes:
        state: DONE or FAILED.
        reason: Why it failed.
        seen: The bytes that were asked for, as they were when ``poll`` reported the end.
    """

    state: State
    reason: str
    seen: bytes


class Span(NamedTuple):
    """A range of the shared file."""

    offset: int
    nbytes: int


class Agent:
    """Does what the suite says, one call at a time."""

    def __init__(self, transport: Transport, memory: SharedMemory) -> None:
        """Take a transport that is not open yet."""
        self._transport = transport
        self._memory = memory
        self._poller = Poller(transport)
        self._handles: dict[int, Handle] = {}
        self._peers: dict[int, Peer] = {}
        self._peer_numbers = itertools.count(1)
        self._polls = False
        self._trouble: Exception | None = None

    # --- the transport's own calls ---------------------------------------------------------------

    def probe(self) -> tuple[bool, str, str]:
        """Ask whether it can run."""
        return tuple(type(self._transport).probe())  # type: ignore[return-value]

    def open(self, options: Mapping[str, Any], polls_when_idle: bool = True) -> None:
        """Open, and poll from now on whenever there is nothing else to do."""
        self._transport.open(options)
        self._polls = polls_when_idle

    def capabilities(self) -> Capabilities:
        """Return what it declares."""
        return self._transport.capabilities

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory."""
        self._transport.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Take memory back."""
        self._transport.unregister(regions)

    def agent_info(self) -> bytes:
        """Return what peers need."""
        return self._transport.agent_info()

    def add_peer(self, info: bytes, regions: Sequence[Region], timeout_s: float) -> Meeting:
        """Add a peer; may run in several threads at once."""
        peer = self._transport.add_peer(info, regions, timeout_s=timeout_s)
        number = next(self._peer_numbers)
        self._peers[number] = peer
        return Meeting(number, peer.agent, peer.path, peer.capabilities, peer.table.regions)

    def drop_peer(self, peer: int) -> None:
        """Drop a peer; may run in several threads at once."""
        self._transport.drop_peer(self._peers[peer])

    def submit(
        self, op: Op, peer: int, local: Descriptors, remote: Descriptors, notification: bytes = b""
    ) -> int:
        """Submit; returns the number that stands for the handle."""
        return self._keep(
            self._transport.submit(op, self._peers[peer], local, remote, notification)
        )

    def submit_to_stranger(self, op: Op, regions: Sequence[Region], pieces: Descriptors) -> int:
        """Submit to a peer that this transport has not made."""
        stranger = Peer("stranger", RegionTable(regions), "unknown", self._transport.capabilities)
        return self._keep(self._transport.submit(op, stranger, pieces, pieces))

    def notify(self, peer: int, payloads: Sequence[bytes]) -> None:
        """Send notifications, one after the other."""
        for payload in payloads:
            self._transport.notify(self._peers[peer], payload)

    def abandon(self, handle: int) -> None:
        """Give up an operation."""
        self._transport.abandon(self._handles[handle])

    def close(self, timeout_s: float, fill: Span | None = None) -> tuple[Region, ...]:
        """Close; nothing polls on its own afterwards.

        Args:
            timeout_s: How long it may wait for operations in flight.
            fill: Memory to overwrite with 0x07 right afterwards.
        """
        self._polls = False
        regions = tuple(self._transport.close(timeout_s=timeout_s))
        if fill:
            self._fill(fill)
        return regions

    # --- waiting ---------------------------------------------------------------------------------

    def set_polling(self, polls_when_idle: bool) -> None:
        """Say whether to poll while there is nothing else to do."""
        self._polls = polls_when_idle

    def wait(
        self, handle: int, timeout_s: float, look: Sequence[Span] = (), fill: Span | None = None
    ) -> Ended:
        """Poll until an operation has ended.

        Args:
            handle: Which one.
            timeout_s: How long it may take.
            look: What to take a picture of at that very moment.
            fill: Memory to overwrite with 0x07 right afterwards.
        """
        self._check_trouble()
        end = self._poller.wait(self._handles[handle], timeout_s)
        seen = self._picture(look)
        if fill:
            self._fill(fill)
        return Ended(end.state, end.reason, seen)

    def pending(self, handles: Sequence[int]) -> list[int]:
        """Return those that have not been reported, after one poll."""
        self._pump()
        return [h for h in handles if self._handles[h] not in self._poller.finished]

    def take_notifications(
        self, count: int, timeout_s: float, look: Sequence[Span] = ()
    ) -> tuple[list[tuple[str, bytes]], bytes]:
        """Return what has come, as soon as there are so many or the time is over.

        Args:
            count: How many are waited for.
            timeout_s: How long.
            look: What to take a picture of at that very moment.
        """
        self._check_trouble()
        taken = self._poller.wait_notifications(count, timeout_s)
        return [(sender, payload) for sender, payload in taken], self._picture(look)

    def poll_for(self, seconds: float) -> float:
        """Poll for a while, once at least; returns how long the median poll took."""
        took: list[float] = []
        deadline = time.monotonic() + seconds
        while not took or time.monotonic() < deadline:
            start = time.perf_counter()
            self._pump()
            took.append(time.perf_counter() - start)
            time.sleep(0.0005)
        return sorted(took)[len(took) // 2]

    def idle(self) -> None:
        """Poll, if it is meant to; what goes wrong is raised by the next call that polls."""
        if not self._polls or self._trouble:
            return
        try:
            self._pump()
        except Exception as error:
            self._trouble = error

    # --- more than one step at a time ------------------------------------------------------------

    def time_submit(self, op: Op, peer: int, local: Descriptors, remote: Descriptors) -> float:
        """Return how long a submit took, in parts of the time until its end was reported."""
        start = time.perf_counter()
        handle = self.submit(op, peer, local, remote)
        submitted = time.perf_counter()
        self.wait(handle, 60.0)
        return (submitted - start) / (time.perf_counter() - start)

    def time_idle_wait(self, timeout_s: float) -> float:
        """Return how long a wait took that began when all there was had been polled."""
        self._pump()
        start = time.perf_counter()
        self._transport.wait(timeout_s)
        return time.perf_counter() - start

    def time_wait_for_end(
        self,
        op: Op,
        peer: int,
        local: Descriptors,
        remote: Descriptors,
        *,
        pause_s: float,
        each_s: float,
    ) -> float:
        """Submit, let time pass, and return how long it took to wait and poll until the end.

        Args:
            op: What to do.
            peer: With whom.
            local: Pieces here.
            remote: Pieces there.
            pause_s: Time that passes before the first wait.
            each_s: What each wait is given.
        """
        handle = self._handles[self.submit(op, peer, local, remote)]
        time.sleep(pause_s)
        return self._poller.wait_and_pump(lambda: handle in self._poller.finished, each_s)

    def time_wait_for_notification(self, each_s: float) -> float:
        """Return how long it took to wait and poll until one more notification has come."""
        notifications = self._poller.notifications
        count = len(notifications)
        return self._poller.wait_and_pump(lambda: len(notifications) > count, each_s)

    def transfer_for_ever(
        self, op: Op, peer: int, local: Descriptors, remote: Descriptors, depth: int
    ) -> None:
        """Keep so many operations in flight until the process ends, or an operation fails."""
        flying = [self.submit(op, peer, local, remote) for _ in range(depth)]
        while True:
            ended = self.wait(flying.pop(0), 60.0)
            if ended.state is not State.DONE:
                raise RuleViolationError(f"{op} failed although its peer lives: {ended.reason}")
            flying.append(self.submit(op, peer, local, remote))

    def transfer_until_lost(
        self,
        op: Op,
        peer: int,
        local: Descriptors,
        remote: Descriptors,
        *,
        depth: int,
        timeout_s: float,
        fill: Span,
    ) -> list[Ended]:
        """Keep so many operations in flight until one fails or the next is refused.

        Args:
            op: What to do.
            peer: With whom.
            local: Pieces here.
            remote: Pieces there.
            depth: How many operations.
            timeout_s: How long it may take until one fails.
            fill: Memory to overwrite with 0x07 once the last one has ended.

        Returns:
            How those ended that were in flight when the first one failed.
        """
        deadline = time.monotonic() + timeout_s
        flying: list[int] = []
        ends: list[Ended] = []
        while not any(end.state is State.FAILED for end in ends):
            if time.monotonic() > deadline:
                raise HangingError(f"no {op} has failed within {timeout_s:g} s")
            try:
                while len(flying) < depth:
                    flying.append(self.submit(op, peer, local, remote))
            except PeerLostError:
                break
            ends = [self.wait(flying.pop(0), timeout_s)]
        ends += [self.wait(handle, timeout_s) for handle in flying]
        self._fill(fill)
        return ends

    def notify_until_lost(self, peer: int, timeout_s: float) -> None:
        """Notify again and again: not every transport knows at once that a peer is gone."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._transport.notify(self._peers[peer], b"anybody?")
            self._pump()
            time.sleep(0.01)

    def poll_in_fork(self) -> str:
        """Use the transport in a forked child; returns what it raised there, or an empty word."""
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            try:
                self._transport.poll()
                os.write(writer, b"nothing")
            except TransportError:
                os.write(writer, b"TransportError")
            except BaseException as error:
                os.write(writer, type(error).__name__.encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            raised = pipe.read().decode()
        os.waitpid(pid, 0)
        return raised

    # ---------------------------------------------------------------------------------------------

    def _keep(self, handle: Handle) -> int:
        number = len(self._handles) + 1
        self._handles[number] = self._poller.keep(handle)
        return number

    def _check_trouble(self) -> None:
        if self._trouble:
            raise self._trouble

    def _pump(self) -> None:
        self._check_trouble()
        self._poller.pump()

    def _fill(self, span: Span) -> None:
        self._memory.bytes[span.offset : span.offset + span.nbytes] = FILL_VALUE

    def _picture(self, spans: Sequence[Span]) -> bytes:
        parts = (self._memory.bytes[s.offset : s.offset + s.nbytes] for s in spans)
        return b"".join(part.tobytes() for part in parts)
