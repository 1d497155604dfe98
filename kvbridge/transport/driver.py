"""The half of a driver that is the same for all: every check, and all bookkeeping.

:class:`Driver` is what users call; :class:`Agent` is what a driver writes. An agent lives from
``open`` to ``close`` and is given checked values only, so it needs no state for what it is not.
"""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast
from weakref import WeakSet

from kvbridge.config import check_timeout, parse_config
from kvbridge.errors import PeerLostError, TransportError, TransportUnavailableError
from kvbridge.model.memory import Region
from kvbridge.transport.base import Handle, Op, Peer, Poll, Transport, TransportConfig
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.events import Events
from kvbridge.transport.frame import open_agent_info, seal_agent_info
from kvbridge.transport.memory import RegionTable

PeerT = TypeVar("PeerT", bound=Peer)
ConfigT = TypeVar("ConfigT", bound=TransportConfig)
AgentT = TypeVar("AgentT", bound="Agent[Any]")


class Agent(ABC, Generic[PeerT]):
    """What is a driver's own: its library, for as long as the transport is open.

    Arguments were checked, peers are those that :meth:`connect` made and that were not dropped,
    and regions are noted as registered. What ends or arrives is told to the
    :class:`Events` that the agent was made with.

    Attributes:
        look_every_s: How often a wait has to call :meth:`poll`, where nothing else looks for what
            has happened, or not at once; 0 where a thread tells it by itself.
    """

    look_every_s: float = 0.0

    @property
    def crash(self) -> str:
        """Why it is of no use any more; empty while it is of use."""
        return ""

    @abstractmethod
    def info(self) -> bytes:
        """Return what a peer needs to reach this agent."""

    def register(self, regions: Sequence[Region]) -> None:
        """Tell the library about memory; what raises leaves nothing registered."""

    def unregister(self, regions: Sequence[Region]) -> None:
        """Tell the library to forget memory, each region once."""

    @abstractmethod
    def connect(self, info: bytes, table: RegionTable, deadline_s: float) -> PeerT:
        """Reach a peer. Runs beside all other calls.

        Args:
            info: What the peer's :meth:`info` returned, unharmed.
            table: The peer's regions.
            deadline_s: When to give up, by :func:`time.monotonic`.

        Raises:
            TransportError: The info cannot be read, or is this agent's own.
            PeerLostError: Nobody answers in time, or somebody else does.
        """

    def drop(self, peer: PeerT) -> None:
        """Let go of a peer; it may come after :meth:`stop` where that overtook ``connect``."""

    def lost(self, peer: PeerT) -> str:
        """Return why a peer is gone, if that is known already; asked before each use of it."""
        return ""

    @abstractmethod
    def submit(
        self,
        handle: Handle,
        peer: PeerT,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes,
    ) -> None:
        """Start an operation, without waiting for it; tell when it has become quiet.

        Nobody waits any more for one that is ``handle.abandoned``: it may be given up where that
        leaves memory quiet.
        """

    @abstractmethod
    def notify(self, peer: PeerT, payload: bytes) -> None:
        """Send a notification."""

    def poll(self) -> None:
        """Look for what can be told, if no thread does that. Never waits."""

    @abstractmethod
    def stop(self, timeout_s: float) -> bool:
        """Stop everything, waiting so long for what is in flight.

        Returns:
            Whether nothing is left of the agent; otherwise a further ``close`` calls it again.
        """


class Driver(Transport, Generic[ConfigT, AgentT]):
    """A transport whose calls are checked and counted; what they do is up to its agent.

    A driver sets ``name`` and ``config_type``, says what it can (``probe``, ``capabilities``), and
    makes its agent in :meth:`start`.
    """

    def __init__(self) -> None:
        """Make a transport that is not open yet."""
        super().__init__()
        self._agent: AgentT | None = None
        self._closed = False
        self._events = Events(self.memory)
        self._peers: dict[Peer, Any] = {}  # each maps to itself, as the driver's own type
        self._made: WeakSet[Peer] = WeakSet()  # dropped ones too, while anybody has them
        self._lock = threading.Lock()  # add_peer runs beside all other calls

    @abstractmethod
    def start(self, options: ConfigT, events: Events) -> AgentT:
        """Make the agent.

        Args:
            options: Of :attr:`config_type`.
            events: To be told what ends and what arrives.

        Raises:
            ConfigError: An option contradicts this host.
            TransportUnavailableError: The library is missing or refuses to start.
        """

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self.check_process()
        if self._closed:
            raise self._is_closed()
        if self._agent is not None:
            raise TransportError(f"transport {self.name!r} was opened before; make a new one")
        where = f"options of transport {self.name!r}"
        options = cast(ConfigT, parse_config(self.config_type, config, where=where))
        self._agent = self.start(options, self._events)

    def check_available(self) -> None:
        """Refuse to start where ``probe`` says that this cannot work.

        Raises:
            TransportUnavailableError: It says so.
        """
        ok, reason, hint = self.probe()
        if not ok:
            said = f"transport {self.name!r} cannot run here: {reason}."
            raise TransportUnavailableError(said, hint)

    def register(self, regions: Sequence[Region]) -> None:
        agent = self._opened()
        listed = _listed(regions, "register()")
        self.check_regions(listed)
        self.memory.add(listed)
        try:
            agent.register(listed)
        except Exception:
            self.memory.remove(listed)
            raise

    def unregister(self, regions: Sequence[Region]) -> None:
        agent = self._opened()
        listed = tuple(dict.fromkeys(_listed(regions, "unregister()")))
        self.memory.remove(listed)
        agent.unregister(listed)

    def agent_info(self) -> bytes:
        return seal_agent_info(self.name, self._opened().info())

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        deadline_s = time.monotonic() + check_timeout(timeout_s, "timeout_s of add_peer()")
        agent = self._opened()
        info = open_agent_info(self.name, agent_info)
        listed = _listed(regions, "add_peer()")
        self.check_regions(listed)
        peer: Peer = agent.connect(info, RegionTable(listed), deadline_s)
        with self._lock:
            if not self._closed:
                self._made.add(peer)
                self._peers[peer] = peer
                return peer
        agent.drop(peer)
        raise TransportError(f"transport {self.name!r} was closed while a peer was added")

    def drop_peer(self, peer: Peer) -> None:
        agent = self._opened()
        if peer not in self._made:
            raise self._not_mine(peer)
        with self._lock:
            mine = self._peers.pop(peer, None)
        if mine is not None:
            agent.drop(mine)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        agent = self._opened()
        mine = self._mine(peer)
        pinned = self.check_submit(op, mine, local, remote, notification)
        handle = Handle(op, mine, local.total_nbytes, pinned)
        try:
            # What is mutable is copied.
            agent.submit(handle, mine, local, remote, bytes(notification))
        except Exception:
            self.memory.unpin(pinned)
            raise
        return handle

    def notify(self, peer: Peer, payload: bytes) -> None:
        agent = self._opened()
        mine = self._mine(peer)
        self.check_notification(mine, payload)
        agent.notify(mine, bytes(payload))

    def poll(self) -> Poll:
        self._look()
        return self._events.take()

    def wait(self, timeout_s: float) -> None:
        left_s = self.check_wait(timeout_s)
        until_s = time.monotonic() + left_s
        look_every_s = self._look()
        while not self._events.wait(min(left_s, look_every_s)):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self._look()

    def abandon(self, handle: Handle) -> None:
        self.check_process()
        given: object = handle
        if not isinstance(given, Handle) or given.peer not in self._made:
            raise TransportError(
                f"cannot abandon {given!r}: submit() of this {self.name!r} has not returned it"
            )
        given.abandoned = True

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        check_timeout(timeout_s, "timeout_s of close()", or_zero=True)
        with self._lock:
            self._closed = True
        if self._agent is not None and self._agent.stop(timeout_s):
            self._agent = None
        return self.memory.busy

    def _look(self) -> float:
        """Have the agent look for what it can tell, and return when it is to do so again.

        Raises:
            TransportError: There was never an agent, or it does not work.
        """
        self.check_process()
        if self._agent is None:
            if not self._closed:
                raise self._is_not_open()
            return math.inf
        if not self._closed:
            self._opened()
        self._agent.poll()
        return self._agent.look_every_s or math.inf

    def _opened(self) -> AgentT:
        """Return the agent.

        Raises:
            TransportError: There is none, or none that works.
        """
        self.check_process()
        agent = self._agent
        if self._closed:
            raise self._is_closed()
        if agent is None:
            raise self._is_not_open()
        if agent.crash:
            raise TransportError(
                f"transport {self.name!r} is broken: {agent.crash}; close it and make a new one"
            )
        return agent

    def _mine(self, peer: Peer) -> Any:
        """Return a peer as the driver made it.

        Raises:
            TransportError: It is none of this transport's.
            PeerLostError: It was dropped, or is known to be gone.
        """
        try:
            mine = self._peers[peer]
        except (KeyError, TypeError):  # what is no peer may not even have a hash
            raise self._not_mine(peer) from None
        why = self._agent.lost(mine) if self._agent else ""
        if why:
            raise PeerLostError(f"peer {peer.agent} is gone: {why}; add it again")
        return mine

    def _not_mine(self, peer: object) -> TransportError:
        if not isinstance(peer, Peer):
            return TransportError(
                f"a peer is what add_peer() returns, got {peer!r} ({type(peer).__name__})"
            )
        if peer in self._made:
            return PeerLostError(f"peer {peer.agent} was dropped; add it again")
        return TransportError(
            f"peer {peer.agent} was made by another transport than this {self.name!r}; add it here"
        )

    def _is_closed(self) -> TransportError:
        return TransportError(f"transport {self.name!r} is closed; make a new one")

    def _is_not_open(self) -> TransportError:
        return TransportError(f"transport {self.name!r} is not open; call open() first")


def _listed(regions: Iterable[object], call: str) -> tuple[Region, ...]:
    """Return the regions that a user gave.

    Raises:
        TransportError: They are no list of regions.
    """
    strange: object = regions
    with contextlib.suppress(TypeError):  # it may be no list at all
        given = tuple(regions)
        good = tuple(each for each in given if isinstance(each, Region))
        if len(good) == len(given):
            return good
        strange = next(each for each in given if not isinstance(each, Region))
    raise TransportError(
        f"{call} takes a list of regions, got {strange!r} ({type(strange).__name__}); "
        "put even a single region into a list: [region]"
    )
