"""What the ranks of one demo engine tell each other: an all-gather, and stage to stage hand-over.

Messages are float64 matrices, sent raw after their size. Ranks are joined by pairs of stream
sockets that whoever starts them makes. A rank that dies closes its ends, so its neighbours notice
at once; a rank that hangs is noticed after the time-out.
"""

import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rank = tuple[int, int]  # (pp rank, tp rank)

_HEADER = struct.Struct("<QQ")  # rows, columns


@dataclass(frozen=True, slots=True)
class Link:
    """One end of the connection between two ranks."""

    rank: Rank
    peer: Rank
    socket: socket.socket
    timeout_s: float

    def send(self, matrix: Floats) -> None:
        """Send a matrix; wait until the peer's buffer has taken it.

        Raises:
            TimeoutError: If the peer did not accept it in time.
            ConnectionError: If the peer is gone.
        """
        # Set here and not once, because a socket loses its time-out on the way to a new process.
        self.socket.settimeout(self.timeout_s)
        try:
            self.socket.sendall(_HEADER.pack(*matrix.shape) + matrix.tobytes())
        except TimeoutError:
            raise self._timed_out("to accept data") from None
        except ConnectionError:
            raise self._gone() from None

    def receive(self) -> Floats:
        """Wait for a matrix.

        Raises:
            TimeoutError: If nothing came in time.
            ConnectionError: If the peer is gone.
        """
        self.socket.settimeout(self.timeout_s)
        rows, columns = _HEADER.unpack(self._receive_exactly(_HEADER.size))
        content = self._receive_exactly(rows * columns * np.dtype(np.float64).itemsize)
        return np.frombuffer(content, np.float64).reshape(rows, columns)

    def _receive_exactly(self, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        rest = memoryview(content)
        while rest:
            try:
                received = self.socket.recv_into(rest)
            except TimeoutError:
                raise self._timed_out("to send data") from None
            except ConnectionError:
                raise self._gone() from None
            if received == 0:
                raise self._gone()
            rest = rest[received:]
        return content

    def _timed_out(self, what: str) -> TimeoutError:
        waited = f"rank {self.rank} waited {self.timeout_s:g} s"
        return TimeoutError(f"{waited} for rank {self.peer} {what}")

    def _gone(self) -> ConnectionError:
        return ConnectionError(f"rank {self.rank}: rank {self.peer} has gone")


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's place in its engine and its links to the others; may be passed to a new process.

    A rank alone, ``Group()``, is a group too: it gathers what it gave, and is first and last
    stage at once, so an engine has no special case for it.

    Attributes:
        rank: Own ``(pp rank, tp rank)``.
        pp: Number of stages.
        tp: Number of tp ranks per stage.
        star: On tp rank 0 a link to each other rank of the stage, in order; else one to rank 0.
        next: To the same tp rank of the next stage; the last stage's next is the first.
        previous: To the same tp rank of the stage before.
    """

    rank: Rank = (0, 0)
    pp: int = 1
    tp: int = 1
    star: tuple[Link, ...] = ()
    next: Link | None = None
    previous: Link | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return self.rank[0] == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.rank[0] == self.pp - 1

    def all_gather(self, matrix: Floats) -> list[Floats]:
        """Return the matrices that all tp ranks of the stage gave, in rank order.

        By way of tp rank 0, not each to each: if all sent at once, full socket buffers would
        block them all.

        Raises:
            TimeoutError: If a rank kept this one waiting for too long.
            ConnectionError: If a rank is gone.
        """
        if self.rank[1] > 0:
            (hub,) = self.star
            hub.send(matrix)
            return [hub.receive() for _ in range(self.tp)]
        gathered = [matrix, *(link.receive() for link in self.star)]
        for link in self.star:
            for each in gathered:
                link.send(each)
        return gathered

    def send_next(self, matrix: Floats) -> None:
        """Hand a matrix over to the next stage.

        Raises:
            ValueError: If there is only one stage.
            TimeoutError: If the next stage kept this one waiting for too long.
            ConnectionError: If that rank is gone.
        """
        self._existing(self.next).send(matrix)

    def receive_previous(self) -> Floats:
        """Wait for the matrix that the stage before hands over.

        Raises:
            ValueError: If there is only one stage.
            TimeoutError: If it did not come in time.
            ConnectionError: If that rank is gone.
        """
        return self._existing(self.previous).receive()

    def share_from_last(self, matrix: Floats | None) -> Floats:
        """Return on every stage the matrix that the last one gave; the others give None.

        Raises:
            ValueError: If the last stage gave None.
            TimeoutError: If a stage kept this one waiting for too long.
            ConnectionError: If a rank is gone.
        """
        stage = self.rank[0]
        shared = matrix if self.is_last else self.receive_previous()
        if shared is None:
            raise ValueError(f"rank {self.rank}: the last stage has nothing to share")
        next_is_last = (stage + 1) % self.pp == self.pp - 1
        if not next_is_last:
            self.send_next(shared)
        return shared

    def close(self) -> None:
        """Close this process's ends of all links.

        Whoever starts the ranks as processes does so once they run: as long as he holds an end
        too, the death of a rank stays hidden from its neighbours.
        """
        for link in (*self.star, self.next, self.previous):
            if link is not None:
                link.socket.close()

    def _existing(self, link: Link | None) -> Link:
        if link is None:
            raise ValueError(f"rank {self.rank}: there is no other stage with pp={self.pp}")
        return link


def connect_ranks(pp: int, tp: int, *, timeout_s: float = 60.0) -> dict[Rank, Group]:
    """Link up a whole engine; returns the group of every ``(pp rank, tp rank)``.

    Args:
        pp: Number of stages.
        tp: Number of tp ranks per stage.
        timeout_s: Longest wait of any rank for another to send or accept something.
    """
    ranks = [(stage, rank) for stage in range(pp) for rank in range(tp)]
    star: dict[Rank, list[Link]] = {rank: [] for rank in ranks}
    following: dict[Rank, Link] = {}
    preceding: dict[Rank, Link] = {}
    for stage, rank in ranks:
        if rank > 0:
            hub_end, own_end = _link_pair((stage, 0), (stage, rank), timeout_s)
            star[stage, 0].append(hub_end)
            star[stage, rank].append(own_end)
        if pp > 1:
            after = ((stage + 1) % pp, rank)
            following[stage, rank], preceding[after] = _link_pair((stage, rank), after, timeout_s)
    return {
        rank: Group(rank, pp, tp, tuple(star[rank]), following.get(rank), preceding.get(rank))
        for rank in ranks
    }


def _link_pair(one: Rank, other: Rank, timeout_s: float) -> tuple[Link, Link]:
    """Return both ends of a new link."""
    one_socket, other_socket = socket.socketpair()
    return Link(one, other, one_socket, timeout_s), Link(other, one, other_socket, timeout_s)
