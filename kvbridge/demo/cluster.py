"""The demo's processes: started together, asked together, and gone together."""

import contextlib
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kvbridge.demo.collective import connect_ranks
from kvbridge.demo.messages import Failed, RankSpec, Stop
from kvbridge.demo.rank import run_rank
from kvbridge.errors import KVBridgeError
from kvbridge.model import Rank
from kvbridge.processes import start_uninterrupted

_STOP_S = 10.0

# Each rank is a process; threads of a math library on top would only fight for the cores.
_RANK_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class DemoError(KVBridgeError):
    """A rank of the demo failed, died or did not answer.

    Attributes:
        kind: The class of the error that happened there.
    """

    def __init__(self, message: str, kind: str = "DemoError") -> None:
        """Keep what kind of error it was."""
        super().__init__(message)
        self.kind = kind


class Engine:
    """One engine of the demo: a process for each rank.

    Attributes:
        spec: What every rank was started with.
        ranks: Coordinates of the ranks.
    """

    def __init__(self, name: str, spec: RankSpec) -> None:
        """Start the processes; :meth:`gather` then waits for their metadata."""
        self.name, self.spec = name, spec
        context = multiprocessing.get_context("spawn")
        groups = connect_ranks(spec.shape.pp, spec.shape.tp, timeout_s=spec.timeout_s)
        self._processes: dict[Rank, BaseProcess] = {}
        self._pipes: dict[Rank, Connection] = {}
        try:
            for rank, group in groups.items():
                ours, theirs = context.Pipe()
                _bound_waits(ours, spec.timeout_s)
                process = context.Process(
                    target=run_rank, args=(spec, group, theirs), name=f"{name} rank {rank}"
                )
                with _environment(_RANK_ENVIRONMENT):
                    start_uninterrupted(process)
                theirs.close()
                self._processes[rank], self._pipes[rank] = process, ours
        except BaseException:
            self.kill()
            raise
        finally:
            # Their ends live in the rank processes alone, so that a death is seen at once.
            for group in groups.values():
                group.close()
        self.ranks = list(groups)

    def send(self, message: object) -> None:
        """Send every rank the same message."""
        for rank, pipe in self._pipes.items():
            with self._lost(rank):
                pipe.send(message)

    def receive(self, rank: Rank) -> Any:
        """Take a rank's answer, which is there."""
        with self._lost(rank):
            answer = self._pipes[rank].recv()
            if isinstance(answer, Failed):
                raise DemoError(f"{self.name} rank {rank}: {answer.message}", answer.kind)
            return answer

    @property
    def pipes(self) -> Mapping[Rank, Connection]:
        """Where the ranks' answers arrive."""
        return self._pipes

    @property
    def deaths(self) -> Mapping[Rank, int]:
        """What becomes ready when a rank dies."""
        return {rank: process.sentinel for rank, process in self._processes.items()}

    def died(self, rank: Rank) -> DemoError:
        """Say how a rank died."""
        process = self._processes[rank]
        process.join(1.0)
        how = f"with exit status {process.exitcode}"
        if process.exitcode is not None and process.exitcode < 0:
            how = f"of signal {-process.exitcode}"
        return DemoError(f"{self.name} rank {rank} died {how}")

    def stop(self) -> dict[Rank, int]:
        """Let every rank end by itself.

        Returns:
            The exit status of each rank.
        """
        self.send(Stop())
        deadline_s = time.monotonic() + _STOP_S
        for process in self._processes.values():
            process.join(max(0.0, deadline_s - time.monotonic()))
        self.kill()
        return {rank: process.exitcode or 0 for rank, process in self._processes.items()}

    def kill(self) -> None:
        """End every process that is left. Idempotent."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for pipe in self._pipes.values():
            pipe.close()

    @contextlib.contextmanager
    def _lost(self, rank: Rank) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise DemoError(
                f"{self.name} rank {rank} stopped in the middle of a message"
            ) from error
        except (EOFError, OSError) as error:
            raise self.died(rank) from error


class Cluster:
    """Engines that come up together, and of which none may die before all are stopped."""

    def __init__(self) -> None:
        """Start without engines."""
        self._engines: list[Engine] = []

    def start(self, name: str, spec: RankSpec) -> Engine:
        """Start the ranks of an engine; their first answer is their metadata.

        Raises:
            DemoError: The processes cannot be started.
        """
        try:
            engine = Engine(name, spec)
        except OSError as error:
            raise DemoError(
                f"cannot start the {spec.shape.pp * spec.shape.tp} ranks of the {name} engine: "
                f"{error.strerror}"
            ) from error
        self._engines.append(engine)
        return engine

    def ask(self, engine: Engine, message: object) -> dict[Rank, Any]:
        """Send every rank of an engine the same message and wait for all answers.

        Raises:
            DemoError: A rank failed, died or did not answer in time.
        """
        engine.send(message)
        return self.gather(engine)[0]

    def gather(self, *engines: Engine) -> list[dict[Rank, Any]]:
        """Wait for one answer of every rank of some engines.

        The first failure ends the wait, whichever rank of whichever engine it comes from.

        Raises:
            DemoError: A rank failed, died or did not answer in time.
        """
        due = {pipe: (e, rank) for e in engines for rank, pipe in e.pipes.items()}
        dead = {death: (e, rank) for e in self._engines for rank, death in e.deaths.items()}
        answers: dict[Engine, dict[Rank, Any]] = {engine: {} for engine in engines}
        deadline_s = time.monotonic() + max(e.spec.timeout_s for e in engines) + 5.0
        while due:
            ready = wait([*due, *dead], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                late = ", ".join(f"{engine.name} rank {rank}" for engine, rank in due.values())
                raise DemoError(f"no answer in time from {late}")
            for each in ready:
                if isinstance(each, Connection):
                    engine, rank = due.pop(each)
                    answers[engine][rank] = engine.receive(rank)
            for each in ready:
                if isinstance(each, int):  # what it had to say before it died has been heard
                    engine, rank = dead[each]
                    raise engine.died(rank)
        return list(answers.values())

    def stop(self) -> None:
        """Let every rank end by itself, those that read before those that are read.

        Raises:
            DemoError: A rank ended with another status than 0.
        """
        for engine in reversed(self._engines):
            failed = {rank: status for rank, status in engine.stop().items() if status}
            if failed:
                raise DemoError(f"{engine.name} ranks ended with exit status {failed}")

    def kill(self) -> None:
        """End every process that is left. Idempotent."""
        for engine in self._engines:
            engine.kill()


def _bound_waits(pipe: Connection, timeout_s: float) -> None:
    """Let a pipe give up on a message that stops midway: its two ends are a pair of sockets."""
    seconds, rest = divmod(timeout_s, 1)
    timeval = struct.pack("@ll", int(seconds), int(rest * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as ends:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ends.setsockopt(socket.SOL_SOCKET, option, timeval)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started within, each only if it is not set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
