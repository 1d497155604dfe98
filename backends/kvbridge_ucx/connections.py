"""The remote agents that UCX is connected to. All of it is used by the worker's thread alone."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import TransportError
from kvbridge.transport import Descriptors, Path, Region, RegionTable
from kvbridge_ucx.context import Context

if TYPE_CHECKING:
    from kvbridge_ucx.job import Job

# Bytes that a peer had sent before it was lost may lie in a socket until the worker reads them.
# Nothing is called quiet before this.
SETTLE_S = 0.1
# Looks that find nothing to move before UCX may be closed.
LOOKS_TO_CLOSE = 10


@dataclass(slots=True, eq=False)
class Connection:
    """An endpoint, shared by all that has to do with one remote agent.

    It lives until one of the two agents ends: closing it earlier would end the other's as well.

    Attributes:
        agent: Name of the remote agent.
        endpoint: UCX's handle.
        path: What carries the bytes; "unknown" until it is known.
        met: The agent has been heard of.
        jobs: Operations that have not ended.
        unposted: Those of them that UCX has not been given all of.
        pieces_in_flight: Pieces that UCX was given and no flush has covered yet.
        nbytes_in_flight: Their bytes.
        lost: Why it cannot be used any more; empty while it can.
        lost_at: When that was noticed.
        closed: UCX has let go of the endpoint since.
        doubtful: Requests of UCX that may still move bytes.
        rkeys: UCX's handles of the agent's memory, by the keys that it published.
    """

    agent: str
    endpoint: int
    path: Path = "unknown"
    met: bool = False
    jobs: set["Job"] = field(default_factory=set)
    unposted: deque["Job"] = field(default_factory=deque)
    pieces_in_flight: int = 0
    nbytes_in_flight: int = 0
    lost: str = ""
    lost_at: float = 0.0
    closed: bool = False
    doubtful: list[int] = field(default_factory=list)
    rkeys: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A connection, and the memory that can be reached over it.

    Attributes:
        connection: The connection.
        table: The regions.
        rkeys: UCX's handle of each region. Shape: [regions] uint64.
    """

    connection: Connection
    table: RegionTable
    rkeys: NDArray[np.uint64]

    @property
    def agent(self) -> str:
        """Name of the remote agent."""
        return self.connection.agent

    @property
    def lost(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        return self.connection.lost

    def keys(self, pieces: Descriptors) -> list[int]:
        """Return UCX's handle of the region under each piece.

        Raises:
            OutOfBoundsError: A piece is outside of them.
        """
        index = self.table.locate(pieces, f"peer {self.agent}")
        keys: list[int] = self.rkeys[index].tolist()
        return keys


class Connections:
    """All connections of one agent."""

    def __init__(self, context: Context) -> None:
        """Start with none."""
        self._context = context
        self._usable: dict[str, Connection] = {}
        self._lost: list[Connection] = []

    def __iter__(self) -> Iterator[Connection]:
        """Go through all that UCX still has something to do with."""
        return iter([*self._usable.values(), *self._lost])

    @property
    def settling(self) -> bool:
        """Whether :meth:`settled` will return something later."""
        return bool(self._lost)

    def join(self, agent: str, address: bytes, rkeys: Iterable[tuple[Region, bytes]]) -> Route:
        """Connect to an agent, or use the connection that there is.

        Raises:
            UcxError: UCX cannot reach it.
        """
        connection = self._usable.get(agent)
        if connection is None:
            connection = Connection(agent, self._context.connect(address))
            self._usable[agent] = connection
        handles = {region: self._unpack(connection, rkey) for region, rkey in rkeys}
        table = RegionTable(handles)
        return Route(connection, table, np.array([handles[r] for r in table.regions], np.uint64))

    def find(self, agent: str) -> Connection | None:
        """Return the connection with an agent."""
        return self._usable.get(agent)

    def fail(self, endpoint: int, reason: str) -> None:
        """Note that an endpoint is of no use any more."""
        for connection in list(self._usable.values()):
            if connection.endpoint == endpoint:
                self.lose(connection, reason)

    def lose(self, connection: Connection, reason: str) -> None:
        """Give a connection up."""
        if connection.lost:
            return
        connection.lost, connection.lost_at = reason, time.monotonic()
        del self._usable[connection.agent]
        self._lost.append(connection)

        def closed(_: int) -> None:
            connection.closed = True

        self._context.disconnect(connection.endpoint, closed)

    def settled(self) -> list[Connection]:
        """Take out those lost connections on which nothing moves any more."""
        before = time.monotonic() - SETTLE_S
        quiet = [c for c in self._lost if c.lost_at <= before and self._is_quiet(c)]
        for connection in quiet:
            self._lost.remove(connection)
            self._forget(connection)
        return quiet

    def close_all(self, timeout_s: float) -> bool:
        """Give all up, and wait until nothing moves any more; say whether that is so."""
        for connection in list(self._usable.values()):
            self.lose(connection, "the transport was closed")
        deadline = time.monotonic() + timeout_s
        quiet = 0  # what UCX has done with may itself be waiting to be put away
        while quiet < LOOKS_TO_CLOSE:
            if time.monotonic() > deadline:
                return False
            moved = self._context.progress()
            quiet = 0 if moved or not all(map(self._is_quiet, self._lost)) else quiet + 1
        for connection in self._lost:
            self._forget(connection)
        return True

    def _is_quiet(self, connection: Connection) -> bool:
        if not connection.closed or connection.pieces_in_flight:
            return False
        return not self._context.busy(connection.doubtful)

    def _forget(self, connection: Connection) -> None:
        self._context.free(connection.doubtful)
        connection.doubtful.clear()
        for handle in connection.rkeys.values():  # UCX complains about keys that outlive it
            self._context.destroy_key(handle)
        connection.rkeys.clear()

    def _unpack(self, connection: Connection, rkey: bytes) -> int:
        if connection.lost:
            raise TransportError(f"agent {connection.agent} is gone: {connection.lost}")
        if rkey not in connection.rkeys:  # the regions of one agent mostly have equal ones
            connection.rkeys[rkey] = self._context.unpack(connection.endpoint, rkey)
        return connection.rkeys[rkey]
