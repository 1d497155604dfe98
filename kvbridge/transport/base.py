"""The contract between KVBridge and a transport."""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

from kvbridge.config import Config, check_timeout
from kvbridge.errors import NotSupportedError, OutOfBoundsError, TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.capabilities import Capabilities
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.memory import LocalMemory, RegionTable

TRANSPORT_API_VERSION = 1
DOZE_S = 100e-6
"""So long sleeps who cannot be woken."""

Op = Literal["read", "write"]
Path = Literal["memory", "cma", "shm", "rdma", "tcp", "unknown"]


class TransportConfig(Config, frozen=True):
    """Base of a transport's options; a transport without options uses it as it is."""


class State(Enum):
    """State of one submitted operation.

    DONE and FAILED are terminal, and both promise *quiet* memory: no device or NIC will touch
    the local or the remote pieces of the operation any more.
    """

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Availability(NamedTuple):
    """Whether a transport can run here; if not, why, and what would change that."""

    ok: bool
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Peer:
    """A remote agent that this agent can reach. Drivers may extend it.

    Attributes:
        agent: Name of the remote agent, fresh at each of its starts; the sender of its
            notifications.
        table: The remote regions that may be touched.
        path: What carries the bytes.
        capabilities: What holds for this peer.
    """

    agent: str
    table: RegionTable = field(repr=False)
    path: Path
    capabilities: Capabilities = field(repr=False)


_handle_ids = itertools.count(1)


@dataclass(slots=True, eq=False)
class Handle:
    """One submitted operation. Drivers may extend it; callers only keep and compare it.

    Attributes:
        op: What was asked for.
        peer: With whom.
        nbytes: How many bytes it moves.
        pinned: The local regions it uses until it is quiet.
        id: Number of the operation within this process, for logs.
        abandoned: Nobody waits for it any more.
    """

    op: Op
    peer: Peer
    nbytes: int
    pinned: frozenset[Region] = frozenset()
    id: int = field(default_factory=lambda: next(_handle_ids))
    abandoned: bool = False


class Finished(NamedTuple):
    """An operation that became quiet; ``reason`` says why where it failed."""

    handle: Handle
    state: State
    reason: str = ""


class Notification(NamedTuple):
    """A small message; ``sender`` is the agent name of the peer that sent it."""

    sender: str
    payload: bytes


class Poll(NamedTuple):
    """What happened since the last poll; each entry is reported once."""

    finished: tuple[Finished, ...] = ()
    notifications: tuple[Notification, ...] = ()


class Transport(ABC):
    """A driver: moves byte ranges between this process and its peers.

    Sequence of calls:

    1. :meth:`probe` (class method, any time) says whether it can run here.
    2. :meth:`open` once, with a checked configuration.
    3. :meth:`register` the memory that may move, then publish :meth:`agent_info` and the regions.
    4. :meth:`add_peer` with what a peer published.
    5. :meth:`submit`, :meth:`notify` and :meth:`poll`, as often as wanted; :meth:`abandon` a
       handle that nobody waits for any more.
    6. :meth:`drop_peer`, :meth:`unregister`, :meth:`close`.

    Threads: ``add_peer`` may block. It is called from threads of its own, several at once, while
    another thread submits and polls; ``drop_peer`` may come from any of these threads, too. A
    driver serialises what its library cannot do at once, but never the waiting: a peer that does
    not answer holds up no other. All other calls come from one thread at a time. No call is made
    from a forked child: :meth:`check_process` refuses that.

    Most of this is the same for all: :class:`~kvbridge.transport.Driver` does it, and leaves to be
    written what is a driver's own.

    A driver imports ``kvbridge.transport`` and ``kvbridge.errors`` and nothing else of KVBridge.
    Exceptions of its library never leave it: what the caller did wrong raises one of our errors,
    what happens later is the state of a handle.

    Attributes:
        name: The word that users write in their configuration.
        api_version: The :data:`TRANSPORT_API_VERSION` that the driver was written for.
        config_type: The class of its options.
        memory: What is registered and in use; kept by the driver through :meth:`register`.
    """

    name: ClassVar[str]
    api_version: ClassVar[int] = TRANSPORT_API_VERSION
    config_type: ClassVar[type[TransportConfig]] = TransportConfig

    def __init__(self) -> None:
        """Note the process that the transport belongs to; nothing is opened yet."""
        self.memory = LocalMemory()
        self._pid = os.getpid()

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Say whether this transport can run here. Never raises, never does heavy work."""

    @abstractmethod
    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        """Start the agent.

        Args:
            config: Options, as a mapping or as a value of :attr:`config_type`.

        Raises:
            ConfigError: An option is unknown or wrong.
            TransportUnavailableError: The library is missing or refuses to start.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The most that any peer may get."""

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make memory available to this agent's operations and to its peers.

        Raises:
            OutOfBoundsError: A region overlaps a registered one.
            NotSupportedError: A region is of a memory kind that is not declared.
            TransportError: A region is not all memory of this process that can be read.
        """

    @abstractmethod
    def unregister(self, regions: Sequence[Region]) -> None:
        """Take memory back.

        Raises:
            MemoryBusyError: An operation in flight uses it; nothing was changed.
            OutOfBoundsError: A region was never registered; nothing was changed.
        """

    @abstractmethod
    def agent_info(self) -> bytes:
        """Return what a peer needs to reach this agent, sealed in our frame."""

    @abstractmethod
    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        """Connect to a peer. May block up to ``timeout_s``: never on an engine's step thread.

        Several threads may do so at once, even with the same peer.

        Args:
            agent_info: What the peer's :meth:`agent_info` returned.
            regions: The peer's registered regions; nothing outside them will be touched.
            timeout_s: How long it may take.

        Raises:
            ConfigError: ``timeout_s`` is not between 0 and a day.
            TransportError: The info is garbled or made by another transport.
            PeerLostError: The peer does not exist any more or does not answer in time.
        """

    @abstractmethod
    def drop_peer(self, peer: Peer) -> None:
        """Forget a peer; its pending operations end as FAILED once they are quiet."""

    @abstractmethod
    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        """Start one operation; returns without waiting for the bytes.

        The descriptors' arrays stay as they are until the operation has ended.

        Args:
            op: ``"read"`` copies remote pieces into local ones, ``"write"`` the other way.
            peer: Whose memory it is.
            local: Pieces of this agent's registered memory.
            remote: Pieces of the peer's regions, of the same number and lengths.
            notification: Sent to the peer once the bytes are visible to it; empty sends none.

        Raises:
            NotSupportedError: The operation, or a notification with it, is not declared.
            OutOfBoundsError: Lengths differ, or a piece is outside the registered memory.
            PeerLostError: The peer is already known to be gone.
            TransportError: A read would go into memory that can only be read.
        """

    @abstractmethod
    def notify(self, peer: Peer, payload: bytes) -> None:
        """Send a free-standing notification; it may arrive in any order, or be lost with its peer.

        Raises:
            NotSupportedError: Not declared, or the payload is larger than declared.
            PeerLostError: The peer is gone.
        """

    @abstractmethod
    def poll(self) -> Poll:
        """Return the operations that became quiet and the notifications that came. Never waits.

        After :meth:`close` it returns what has ended since the last call.

        Raises:
            TransportError: The agent was never opened, or is broken.
        """

    def wait(self, timeout_s: float) -> None:
        """Return once the next :meth:`poll` may have something to tell, or the time is over.

        For whoever has nothing else to do: polling in a loop would keep the interpreter from the
        threads that move the bytes. It may return early for nothing. A transport that cannot be
        woken sleeps for a moment.

        Args:
            timeout_s: The longest time; 0 does not wait.

        Raises:
            ConfigError: ``timeout_s`` is not between 0 and a day.
            TransportError: ``poll`` would raise it too.
        """
        self.check_process()
        time.sleep(min(self.check_wait(timeout_s), DOZE_S))

    @abstractmethod
    def abandon(self, handle: Handle) -> None:
        """Say that nobody waits for a handle; ``poll`` still reports when it has become quiet.

        That is no error after its end either.

        Raises:
            TransportError: :meth:`submit` of this transport has not returned it.
        """

    @abstractmethod
    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        """Stop the agent, for good: it cannot be opened again. Idempotent.

        Args:
            timeout_s: How long to wait for operations in flight; 0 does not wait.

        Returns:
            The regions that are not proven quiet: keep that memory mapped.

        Raises:
            ConfigError: ``timeout_s`` is not between 0 and a day.
        """

    # What follows is offered to drivers, so that each check exists once.

    def check_process(self) -> None:
        """Refuse use in a forked child: no vendor library survives it.

        Raises:
            TransportError: This process is not the one that made the transport.
        """
        if os.getpid() != self._pid:
            raise TransportError(
                f"transport {self.name!r} was made in process {self._pid} and is used in its "
                f"forked child {os.getpid()}; start processes with 'spawn', or open a new "
                "transport in the child"
            )

    def check_wait(self, timeout_s: float) -> float:
        """Refuse what is no time to wait for.

        Raises:
            ConfigError: It is not between 0 and a day.
        """
        return check_timeout(timeout_s, "timeout_s of wait()", or_zero=True)

    def check_regions(self, regions: Sequence[Region]) -> None:
        """Refuse memory kinds that are not declared.

        Raises:
            NotSupportedError: A region is of such a kind.
        """
        for region in regions:
            if region.memory_kind not in self.capabilities.memory_kinds:
                raise NotSupportedError(
                    f"transport {self.name!r} cannot use {region.memory_kind!r} memory; "
                    f"it declares {sorted(self.capabilities.memory_kinds)}"
                )

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        """Check all that can be known before an operation is posted, and pin its local memory.

        Returns:
            The local regions that are now pinned; the driver unpins them when the operation is
            quiet.

        Raises:
            NotSupportedError: The operation or its notification is not declared for this peer.
            OutOfBoundsError: The lists differ in number or lengths, or leave registered memory.
        """
        self.check_process()
        self._check_pieces(local, remote)
        can = peer.capabilities
        if op not in ("read", "write") or not (can.read if op == "read" else can.write):
            raise NotSupportedError(
                f"transport {self.name!r} does not offer {op!r} with peer {peer.agent}; "
                f"it declares read={can.read}, write={can.write}"
            )
        self._check_payload(notification)
        if notification:
            if not can.notify_with_transfer:
                raise NotSupportedError(
                    f"transport {self.name!r} cannot tie a notification to a transfer; "
                    "send it with notify() after the transfer is done"
                )
            self._check_notification_size(peer, notification)
        if can.transfer_max_bytes and local.total_nbytes > can.transfer_max_bytes:
            raise NotSupportedError(
                f"{local.total_nbytes} bytes in one operation, transport {self.name!r} takes "
                f"{can.transfer_max_bytes}; submit in several parts"
            )
        if can.descriptors_max and len(local) > can.descriptors_max:
            raise NotSupportedError(
                f"{len(local)} descriptors in one operation, transport {self.name!r} takes "
                f"{can.descriptors_max}; submit in several parts"
            )
        if len(local) != len(remote) or not (local.nbytes == remote.nbytes).all():
            raise OutOfBoundsError(
                f"{op} with peer {peer.agent}: {len(local)} local and {len(remote)} remote pieces "
                "differ in number or lengths; both lists must pair up"
            )
        if remote.memory_kind not in can.memory_kinds:
            raise NotSupportedError(
                f"transport {self.name!r} cannot touch {remote.memory_kind!r} memory of peer "
                f"{peer.agent}; it declares {sorted(can.memory_kinds)}"
            )
        peer.table.locate(remote, f"peer {peer.agent}")
        return self.memory.pin(local, changes=op == "read")

    def check_notification(self, peer: Peer, payload: bytes) -> None:
        """Refuse free-standing notifications that are not declared or too large.

        Raises:
            NotSupportedError: The peer takes none, or none of this size.
        """
        self.check_process()
        self._check_payload(payload)
        if not peer.capabilities.notify:
            raise NotSupportedError(f"transport {self.name!r} does not offer notifications")
        self._check_notification_size(peer, payload)

    def _check_pieces(self, local: object, remote: object) -> None:
        if not (isinstance(local, Descriptors) and isinstance(remote, Descriptors)):
            raise OutOfBoundsError(
                "local and remote pieces are Descriptors(address, nbytes), got "
                f"{type(local).__name__} and {type(remote).__name__}"
            )

    def _check_payload(self, payload: object) -> None:
        # Found out later, it would leave memory pinned for an operation that never was.
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise NotSupportedError(
                f"a notification must be bytes, got {type(payload).__name__}; encode it first"
            )

    def _check_notification_size(self, peer: Peer, payload: bytes) -> None:
        most = peer.capabilities.notify_max_bytes
        if len(payload) > most:
            raise NotSupportedError(
                f"notification of {len(payload)} bytes, transport {self.name!r} takes at most "
                f"{most}"
            )
