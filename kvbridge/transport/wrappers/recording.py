"""A transport that remembers what it was asked for, and what became of it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from kvbridge.config import parse_config
from kvbridge.errors import KVBridgeError
from kvbridge.model.memory import Region
from kvbridge.transport.base import Handle, Op, Peer, Poll, State, Transport, TransportConfig
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.wrappers.base import TransportWrapper, WrapperConfig

Event = Literal["read", "write", "notify", "received", "add_peer", "drop_peer"]


class RecordingConfig(WrapperConfig, frozen=True):
    """Options of :class:`RecordingTransport`.

    Attributes:
        records_max: How many records are kept; then the oldest go.
    """

    records_max: Annotated[int, Meta(ge=1)] = 10_000


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that happened.

    Attributes:
        event: An operation, a free-standing notification sent, one received, or a peering.
        peer: Name of the other agent; empty where no peer was found.
        started_s: Clock when it began.
        nbytes: Bytes of an operation.
        pieces: Pieces of an operation, or regions of a peer.
        notification: What was sent or received, with an operation or alone.
        state: How it ended; a call that raised has failed.
        reason: Why it failed.
        seconds: How long it took; for an operation, until ``poll`` reported it.
    """

    event: Event
    peer: str
    started_s: float
    nbytes: int = 0
    pieces: int = 0
    notification: bytes = b""
    state: State = State.PENDING
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Total:
    """What all records of one event with one peer come to; prints as a line."""

    event: Event
    peer: str
    count: int
    nbytes: int
    pieces: int
    failed: int
    pending: int
    seconds_median: float
    seconds_max: float

    def __str__(self) -> str:
        return (
            f"{self.event:<9} {self.peer or '-'}: {self.count} ({self.failed} failed, "
            f"{self.pending} pending), {self.nbytes} bytes in {self.pieces} pieces, "
            f"{self.seconds_median * 1e3:.3g} ms at the median, "
            f"{self.seconds_max * 1e3:.3g} ms at most"
        )


class RecordingTransport(TransportWrapper):
    """Passes everything on to another transport, and keeps a :class:`Record` of it."""

    name: ClassVar[str] = "recording"
    config_type: ClassVar[type[TransportConfig]] = RecordingConfig

    def __init__(
        self, inner: Transport | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wrap a transport that is not open yet.

        Args:
            inner: The transport; without one, ``open`` makes what option ``inner`` says.
            clock: Seconds that never run backwards.
        """
        super().__init__(inner)
        self._clock = clock
        self._records_max = RecordingConfig().records_max
        self._pending: dict[Handle, Record] = {}
        self._ended: deque[Record] = deque()
        self._lock = threading.Lock()  # peers are added and dropped in threads of their own
        self.forgotten = 0

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        options = parse_config(RecordingConfig, config, where="options of transport 'recording'")
        self.open_inner(options.inner)
        self._records_max = options.records_max

    @property
    def records(self) -> tuple[Record, ...]:
        """What has ended, in the order in which it ended, then what is pending."""
        return (*tuple(self._ended), *tuple(self._pending.values()))

    def clear(self) -> None:
        """Forget what has ended."""
        self._ended.clear()
        self.forgotten = 0

    def summary(self) -> tuple[Total, ...]:
        """Add the kept records up, by event and peer; print each total for a readable line."""
        groups: dict[tuple[Event, str], list[Record]] = {}
        for record in self.records:
            groups.setdefault((record.event, record.peer), []).append(record)
        return tuple(_total(*key, records) for key, records in sorted(groups.items()))

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        record = Record("add_peer", "", self._clock(), pieces=len(regions))
        with self._failure_of(record):
            peer = self.inner.add_peer(agent_info, regions, timeout_s=timeout_s)
        self._end(replace(record, peer=peer.agent), State.DONE)
        return peer

    def drop_peer(self, peer: Peer) -> None:
        record = Record("drop_peer", peer.agent, self._clock())
        with self._failure_of(record):
            self.inner.drop_peer(peer)
        self._end(record, State.DONE)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        record = Record(
            op, peer.agent, self._clock(), local.total_nbytes, len(local), bytes(notification)
        )
        with self._failure_of(record):
            handle = self.inner.submit(op, peer, local, remote, notification)
        self._pending[handle] = record
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        record = Record("notify", peer.agent, self._clock(), notification=bytes(payload))
        with self._failure_of(record):
            self.inner.notify(peer, payload)
        self._end(record, State.DONE)

    def poll(self) -> Poll:
        polled = self.inner.poll()
        for handle, state, reason in polled.finished:
            record = self._pending.pop(handle, None)
            if record is None:
                now_s = self._clock()
                again = Record(handle.op, handle.peer.agent, now_s, handle.nbytes)
                self._end(again, state, f"reported although it was not pending; {reason}")
            else:
                self._end(record, state, reason)
        for sender, payload in polled.notifications:
            received = Record("received", sender, self._clock(), notification=payload)
            self._end(received, State.DONE)
        return polled

    @contextmanager
    def _failure_of(self, record: Record) -> Iterator[None]:
        try:
            yield
        except KVBridgeError as error:
            self._end(record, State.FAILED, f"{type(error).__name__}: {error}")
            raise

    def _end(self, record: Record, state: State, reason: str = "") -> None:
        seconds = self._clock() - record.started_s
        with self._lock:
            self._ended.append(replace(record, state=state, reason=reason, seconds=seconds))
            while len(self._ended) > self._records_max:
                self._ended.popleft()
                self.forgotten += 1


def _total(event: Event, peer: str, records: Sequence[Record]) -> Total:
    ended = [record.seconds for record in records if record.state is not State.PENDING]
    return Total(
        event,
        peer,
        count=len(records),
        nbytes=sum(record.nbytes for record in records),
        pieces=sum(record.pieces for record in records),
        failed=sum(record.state is State.FAILED for record in records),
        pending=sum(record.state is State.PENDING for record in records),
        seconds_median=median(ended) if ended else 0.0,
        seconds_max=max(ended, default=0.0),
    )
