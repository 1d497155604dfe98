"""A transport that goes wrong on purpose, and only in the ways that it was told."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvbridge.config import parse_config
from kvbridge.errors import PeerLostError, TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.base import (
    DOZE_S,
    Finished,
    Handle,
    Notification,
    Op,
    Peer,
    Poll,
    State,
    Transport,
    TransportConfig,
)
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.wrappers.base import TransportWrapper
from kvbridge.transport.wrappers.faults import DelayLine, Dice, Fault, Faults


@dataclass(slots=True, eq=False, kw_only=True)
class _FailingHandle(Handle):
    """Stands for an operation that is not the one submitted inside."""

    inside: Handle


class _Hit(NamedTuple):
    """An operation that has a fault; ``handle`` is the one that the caller knows."""

    handle: Handle
    fault: Fault


class FaultyTransport(TransportWrapper):
    """Passes everything on to another transport, but for the faults that it is opened with.

    What it reports as ended is quiet, whatever the fault: an operation that fails or is late has
    ended inside before it is reported. A failed one was moved by half, piece for piece (not at
    all where the transport inside declares ``failure_is_clean``), and its notification is never
    sent. A dropped one stays pending until its peer is dropped or the transport is closed.

    Memory counts as busy until the operation is reported, however long it has been quiet.
    """

    name: ClassVar[str] = "faulty"
    config_type: ClassVar[type[TransportConfig]] = Faults

    def __init__(
        self,
        inner: Transport | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Wrap a transport that is not open yet.

        Args:
            inner: The transport; without one, ``open`` makes what option ``inner`` says.
            clock: Seconds that never run backwards, for delays.
            sleep: Waits that many seconds, for delays of ``add_peer``.
        """
        super().__init__(inner)
        self._clock, self._sleep = clock, sleep
        self._take_dice(Faults())
        self._lock = threading.Lock()  # guards all that follows: drop_peer comes from any thread
        self._hits: dict[Handle, _Hit] = {}  # by the handle inside, until it has ended there
        self._pins: dict[Handle, frozenset[Region]] = {}
        self._dropped: list[Finished] = []
        self._finished: DelayLine[Finished] = DelayLine()
        self._notifications: DelayLine[Notification] = DelayLine()

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        faults = parse_config(Faults, config, where="options of transport 'faulty'")
        self.open_inner(faults.inner)
        self._take_dice(faults)

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        inner = self.inner
        fault = self._peering_dice.throw()
        if fault is None:
            return inner.add_peer(agent_info, regions, timeout_s=timeout_s)
        if fault.what == "fail":
            raise PeerLostError("the peer cannot be reached: a fault that was asked for")
        wait_s = timeout_s if fault.what == "drop" else min(fault.delay_s, timeout_s)
        self._sleep(wait_s)
        if wait_s == timeout_s:
            raise PeerLostError(
                f"the peer did not answer in {timeout_s:g} s: a fault that was asked for"
            )
        return inner.add_peer(agent_info, regions, timeout_s=timeout_s - wait_s)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        inner = self.inner
        fault = self._operation_dice.throw()
        if fault is None:
            return inner.submit(op, peer, local, remote, notification)
        pinned = self.check_submit(op, peer, local, remote, notification)
        handle: Handle
        try:
            if fault.what == "fail":
                inside = inner.submit(op, peer, *_moved(local, remote, peer))
                handle = _FailingHandle(op, peer, local.total_nbytes, pinned, inside=inside)
            else:
                handle = inside = inner.submit(op, peer, local, remote, notification)
        except TransportError:
            self.memory.unpin(pinned)
            raise
        with self._lock:
            self._hits[inside] = _Hit(handle, fault)
            self._pins[handle] = pinned
        return handle

    def poll(self) -> Poll:
        finished, notifications = self.inner.poll()
        now_s = self._clock()
        with self._lock:
            ended = self._finished.through([self._outcome(end) for end in finished], now_s)
            for end in ended:
                self.memory.unpin(self._pins.pop(end.handle, ()))
        heard = self._notifications.through(
            [(n, self._notification_dice.throw()) for n in notifications], now_s
        )
        return Poll(tuple(ended), tuple(heard))

    def wait(self, timeout_s: float) -> None:
        # What is held back here comes at times of which the transport inside knows nothing.
        self.inner.wait(min(self.check_wait(timeout_s), DOZE_S))

    def abandon(self, handle: Handle) -> None:
        self.inner.abandon(handle.inside if isinstance(handle, _FailingHandle) else handle)

    def drop_peer(self, peer: Peer) -> None:
        self.inner.drop_peer(peer)
        self._give_up("the peer was dropped", peer)

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        if self._inner is None:
            return super().close(timeout_s=timeout_s)
        self.check_process()
        # What has ended inside is quiet; of what has not, the transport inside keeps count itself.
        for pinned in self._pins.values():
            self.memory.unpin(pinned)
        self._pins.clear()
        not_quiet = self._inner.close(timeout_s=timeout_s)
        self._give_up("the transport was closed")
        self._finished.end()
        self._notifications.end()
        return not_quiet

    def _take_dice(self, faults: Faults) -> None:
        # One die for each kind: how the kinds interleave changes nothing.
        self._operation_dice = Dice(faults.operations, f"{faults.seed} operations")
        self._notification_dice = Dice(faults.notifications, f"{faults.seed} notifications")
        self._peering_dice = Dice(faults.peering, f"{faults.seed} peering")

    def _outcome(self, end: Finished) -> tuple[Finished, Fault | None]:
        handle, fault = self._hits.pop(end.handle, (end.handle, None))
        if fault is not None and fault.what == "fail":
            why = end.reason or "a fault that was asked for"
            return Finished(handle, State.FAILED, why), None
        if fault is not None and fault.what == "drop":
            self._dropped.append(end)
        return end, fault

    def _give_up(self, why: str, peer: Peer | None = None) -> None:
        """End the dropped operations (of one peer), those that have not ended inside as well."""
        with self._lock:
            for inside, hit in self._hits.items():
                if hit.fault.what == "drop" and peer in (None, inside.peer):
                    self._hits[inside] = hit._replace(fault=Fault(what="fail"))
            for end in self._dropped:
                if peer in (None, end.handle.peer):
                    self._finished.add_due(Finished(end.handle, State.FAILED, why))
            self._dropped = [e for e in self._dropped if peer not in (None, e.handle.peer)]


def _moved(local: Descriptors, remote: Descriptors, peer: Peer) -> tuple[Descriptors, Descriptors]:
    """Return what a failing operation moves."""
    clean = peer.capabilities.failure_is_clean
    nbytes = np.zeros_like(local.nbytes) if clean else local.nbytes // np.uint64(2)
    return replace(local, nbytes=nbytes), replace(remote, nbytes=nbytes)
