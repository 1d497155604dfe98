"""The remote agents that NIXL knows, and when it may forget them."""

import threading
import time
from dataclasses import dataclass

from kvbridge_nixl.library import Agent

# Each time NIXL removes a remote agent that lives, both sides lose a socket for good. So unused
# ones are kept, in case they are added again; the sockets of those that end are closed by UCX.
KEPT_UNUSED = 64


@dataclass(slots=True, eq=False)
class Connection:
    """A remote agent as NIXL knows it, shared by all peers made from it.

    Attributes:
        agent: Its name.
        users: Peers that use it.
        jobs: Operations that have not ended.
        lost: Why it cannot be used any more; empty while it can.
        lost_at: When that was noticed.
    """

    agent: str
    users: int = 0
    jobs: int = 0
    lost: str = ""
    lost_at: float = 0.0


class Connections:
    """All connections of one agent.

    What takes an agent calls into NIXL, which only one thread may do at a time.
    """

    def __init__(self, lock: threading.Condition) -> None:
        """Start with none; ``lock`` guards the counts and is notified when they change."""
        self._lock = lock
        self._usable: dict[str, Connection] = {}
        self._unused: list[Connection] = []

    def join(self, agent: Agent, name: str, metadata: bytes) -> Connection:
        """Make a remote agent known to NIXL, or use the one that is; one user more.

        Metadata of a known agent adds the memory that it has registered since.
        """
        if name not in self._usable:  # NIXL may still know one that was lost
            agent.remove_remote_agent(name)
        agent.add_remote_agent(metadata)
        with self._lock:
            connection = self._usable.setdefault(name, Connection(name))
            connection.users += 1
            if connection in self._unused:
                self._unused.remove(connection)
        return connection

    def leave(self, connection: Connection) -> None:
        """One user less."""
        with self._lock:
            connection.users -= 1
            self._note_if_unused(connection)

    def begin(self, connection: Connection) -> None:
        """One operation more."""
        with self._lock:
            connection.jobs += 1

    def end(self, connection: Connection) -> None:
        """One operation less."""
        with self._lock:
            connection.jobs -= 1
            self._note_if_unused(connection)

    def lose(self, connection: Connection, reason: str) -> None:
        """Note that a remote agent is gone."""
        with self._lock:
            if not connection.lost:
                connection.lost, connection.lost_at = reason, time.monotonic()
                if self._usable.get(connection.agent) is connection:
                    del self._usable[connection.agent]
            self._lock.notify_all()

    @property
    def too_many(self) -> bool:
        """Whether :meth:`remove_unused` has something to do."""
        return len(self._unused) > KEPT_UNUSED

    def remove_unused(self, agent: Agent) -> None:
        """Take those out of NIXL that have been unused for longest.

        Not before their operations have ended: the bytes would go on moving, and nobody could
        tell any more when they stop.
        """
        while self.too_many:
            with self._lock:
                connection = self._unused.pop(0)
            current = self._usable.get(connection.agent, connection)
            if current is connection and not (connection.users or connection.jobs):
                self._usable.pop(connection.agent, None)
                agent.remove_remote_agent(connection.agent)

    def remove_all(self, agent: Agent) -> None:
        """Take all out of NIXL, used or not."""
        for name in self._usable:
            agent.remove_remote_agent(name)
        self._usable.clear()

    def _note_if_unused(self, connection: Connection) -> None:
        if not connection.users and not connection.jobs and connection not in self._unused:
            self._unused.append(connection)
            self._lock.notify_all()
