"""Two processes with an agent each: this one moves bytes, the other one owns memory."""

import contextlib
import multiprocessing
import os
import time
import zlib
from collections.abc import Mapping
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from kvbridge.errors import KVBridgeError
from kvbridge.processes import start_uninterrupted
from kvbridge.transport import (
    Descriptors,
    Op,
    Peer,
    Region,
    State,
    Transport,
    TransportChoice,
    open_transport,
)

START_S = 15.0
TRANSFER_S = 60.0
_POLL_S = 50e-6
_OWNER_POLL_S = 1e-3


class BenchError(KVBridgeError):
    """The other process failed, or bytes did not arrive, or not the right ones."""


class Arena:
    """Memory to move bytes from and to."""

    def __init__(self, nbytes: int) -> None:
        """Allocate it; every page is touched, so that the kernel hands it out now."""
        self.data: NDArray[np.uint8] = np.ones(nbytes, np.uint8)
        self.address = int(self.data.ctypes.data)
        self.region = Region(self.address, nbytes)

    def fill(self, seed: int) -> None:
        """Write bytes that look random."""
        block = np.frombuffer(default_rng(seed).bytes(1 << 20), np.uint8)
        for start in range(0, self.data.size, block.size):
            part = self.data[start : start + block.size]
            np.add(block[: part.size], np.uint8(start >> 20 & 0xFF), out=part)

    def checksum(self, pieces: Descriptors) -> int:
        """Return a number that tells apart what the pieces hold, in their order."""
        total = 0
        for start, nbytes in zip(pieces.address, pieces.nbytes, strict=True):
            offset = int(start) - self.address
            total = zlib.crc32(self.data[offset : offset + int(nbytes)].data, total)
        return total


class Pair:
    """An agent here, an agent in a process of its own, and the way between them.

    Attributes:
        transport: The agent here.
        arena: Memory here.
        peer: The agent there.
    """

    def __init__(self, choice: Mapping[str, Any] | TransportChoice, nbytes: int) -> None:
        """Start the other process and meet it.

        Args:
            choice: The transport, as in every configuration.
            nbytes: Memory of either side.

        Raises:
            BenchError: The other process does not come up.
            KVBridgeError: The transport cannot be opened, or the two cannot meet.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_own, args=(theirs, choice, nbytes), name="kvbridge bench owner", daemon=True
        )
        start_uninterrupted(self._process)
        theirs.close()
        self._owner: Transport | None = None
        try:
            self.transport = self._owner = open_transport(choice)
            self.arena = Arena(nbytes)
            self.transport.register([self.arena.region])
            info, region = self._answer(START_S)
            self.remote_address: int = region.address
            self.peer: Peer = self.transport.add_peer(info, [region], timeout_s=START_S)
        except BaseException:
            self.close()
            raise

    def transfer(self, op: Op, local: Descriptors, remote: Descriptors) -> float:
        """Move bytes and return the seconds until they were there.

        Raises:
            BenchError: They never were.
        """
        start = time.perf_counter()
        handle = self.transport.submit(op, self.peer, local, remote)
        while True:
            for finished in self.transport.poll().finished:
                if finished.handle is not handle:
                    continue
                if finished.state is not State.DONE:
                    raise BenchError(f"a {op} of {handle.nbytes} bytes failed: {finished.reason}")
                return time.perf_counter() - start
            if time.perf_counter() > start + TRANSFER_S:
                raise BenchError(
                    f"a {op} of {handle.nbytes} bytes is pending after {TRANSFER_S:g} s"
                )
            time.sleep(_POLL_S)

    def fill(self, here: int, there: int) -> None:
        """Fill both memories with different bytes."""
        self.arena.fill(here)
        self._ask("fill", there)

    def same(self, local: Descriptors, remote: Descriptors) -> bool:
        """Whether pieces here and there hold the same bytes, compared without the transport."""
        theirs = self._ask("checksum", remote)
        return bool(self.arena.checksum(local) == theirs)

    def close(self) -> None:
        """End both sides."""
        if self._owner is not None:
            self._owner.close()
        with contextlib.suppress(OSError):
            self._pipe.send(("stop",))
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _ask(self, command: str, *args: Any) -> Any:
        with contextlib.suppress(OSError):  # it is gone: the answer will say so
            self._pipe.send((command, *args))
        return self._answer(TRANSFER_S)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                self._process.kill()  # it would not hear that it is to stop either
                raise BenchError(
                    f"process {self._process.pid}, which owns the memory, did not answer within "
                    f"{timeout_s:g} s and was ended; was it stopped, or is the machine that busy?"
                )
            sort, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise BenchError("the process that owns the memory ended by itself") from error
        if sort == "failed":
            raise BenchError(f"the process that owns the memory failed: {value}")
        return value

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def _own(pipe: Connection, choice: Mapping[str, Any] | TransportChoice, nbytes: int) -> None:
    """Own memory until told to stop; the body of the other process."""
    try:
        transport = open_transport(choice)
        arena = Arena(nbytes)
        transport.register([arena.region])
        pipe.send(("done", (transport.agent_info(), arena.region)))
        while True:
            if not pipe.poll(_OWNER_POLL_S):
                transport.poll()
                if (parent := parent_process()) is not None and not parent.is_alive():
                    break
                continue
            command, *args = pipe.recv()
            if command == "stop":
                break
            pipe.send(("done", getattr(arena, command)(*args)))
        transport.close()
    except EOFError:
        os._exit(1)  # whoever started this process has ended
    except (KVBridgeError, OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
