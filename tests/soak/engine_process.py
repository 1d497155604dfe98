"""A small engine as a process of its own, told what to do through a pipe."""

import os
import random
import signal
from collections import deque
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from kvbridge.connector import Request
from tests.integration import tiny_engine
from tests.integration.tiny_engine import TinyEngine

PAGES = 96
POISON = -7.0


def value_of(number: int) -> float:
    """Return what sets a request's bytes apart; all sums stay exact in float32."""
    return 1e6 * (number % 15) + 37 * number % 900


@dataclass(slots=True)
class Job:
    """A request on one engine."""

    number: int
    request: Request
    abort: str = ""
    pages: tuple[int, ...] = ()

    @property
    def pages_needed(self) -> int:
        return -(-self.request.prompt_tokens // tiny_engine.PAGE)


class SoakEngine(TinyEngine):
    """Both a producer and a consumer; frees and poisons pages at once, and uses them again first.

    Attributes:
        held: Jobs whose blocks are kept for readers, by request id.
        waiting: Jobs that want to be loaded and have no pages yet.
        loading: Jobs that are being loaded.
    """

    def __init__(self, engine_id: str, config: Any, *, tp: int = 1, pp: int = 1) -> None:
        tiny_engine.PAGES = PAGES
        super().__init__(engine_id, config, tp=tp, pp=pp)
        self.pages = list(range(PAGES))
        self.held: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.loading: dict[str, Job] = {}

    def take(self, job: Job) -> bool:
        """Give pages to a job, if there are any."""
        if len(self.pages) < job.pages_needed:
            return False
        job.pages = tuple(self.pages.pop() for _ in range(job.pages_needed))
        return True

    def free(self, job: Job) -> None:
        """Take a job's pages back."""
        for memory in self.memory.values():
            memory[:, list(job.pages)] = POISON
        self.pages += job.pages
        job.pages = ()

    def offer(self, number: int, tokens: int) -> Any:
        """Compute a request for another engine; None if there is no room."""
        request = Request(f"r{number}", tokens, tokens, {"do_remote_decode": True})
        job = Job(number, request)
        if not self.take(job):
            return None
        self.fill(job.pages, value_of(number))
        held, params = self.scheduler.request_finished(request, (job.pages,))
        if held:
            self.held[request.request_id] = job
        else:
            self.free(job)
        return params

    def ask(self, number: int, tokens: int, params: Any, abort: str) -> None:
        """Have a request loaded, and perhaps given up on the way."""
        self.waiting.append(Job(number, Request(f"r{number}", tokens, params=params), abort))

    def turn(self) -> list[tuple[int, str]]:
        """Do a step, and return how requests ended."""
        ended = list(self._begin())
        report = self.step()
        for request_id in report.sent:
            self.free(self.held.pop(request_id))
        for request_id, loaded in report.loaded.items():
            ended.append(self._end(self.loading.pop(request_id), loaded.error))
        self.loaded.clear()
        self.sent.clear()
        return ended

    def _begin(self) -> Any:
        while self.waiting:
            job = self.waiting[0]
            matched, _ = self.scheduler.get_num_new_matched_tokens(job.request, 0)
            if job.abort == "waiting":
                self.waiting.popleft()
                self._finish(job, aborted=True)
                yield job.number, "aborted"
                continue
            if not self.take(job):
                return
            self.waiting.popleft()
            self.scheduler.update_state_after_alloc(job.request, (job.pages,), matched or 0)
            self.loading[job.request.request_id] = job
            if job.abort == "loading":
                self._finish(job, aborted=True)

    def _end(self, job: Job, error: str) -> tuple[int, str]:
        said = error or self._check(job)
        if job.abort != "loading":
            self._finish(job)
        self.free(job)
        return job.number, "aborted" if job.abort else said or "ok"

    def _check(self, job: Job) -> str:
        tokens = job.request.prompt_tokens
        here = self.tokens(job.pages, tokens).copy()
        spare = {rank: memory[:, list(job.pages)].copy() for rank, memory in self.memory.items()}
        self.fill(job.pages, value_of(job.number))
        right = np.array_equal(here, self.tokens(job.pages, tokens))
        for rank, memory in self.memory.items():
            memory[:, list(job.pages)] = spare[rank]
        return "" if right else "WRONG BYTES"

    def _finish(self, job: Job, *, aborted: bool = False) -> None:
        request = replace(job.request, computed_tokens=0, aborted=aborted)
        self.scheduler.request_finished(request, (job.pages,))

    def status(self) -> dict[str, int]:
        """Return what the engine and its process hold."""
        process = psutil.Process()
        return {
            "pages": PAGES - len(self.pages),
            "held": len(self.held),
            "loading": len(self.loading) + len(self.waiting),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "rss_kib": process.memory_info().rss >> 10,
        }


def serve(pipe: Connection, engine_id: str, config: Any, shape: dict[str, int]) -> None:
    """Be an engine until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    random.seed(os.getpid())
    engine = SoakEngine(engine_id, config, **shape)
    pipe.send(("up", os.getpid()))
    try:
        while True:
            idle = not (engine.held or engine.loading or engine.waiting)
            if pipe.poll(0.002 if idle else 0.0):
                what, *rest = pipe.recv()
                if what == "offer":
                    pipe.send(("offered", rest[0], engine.offer(*rest)))
                elif what == "ask":
                    engine.ask(*rest)
                elif what == "status":
                    pipe.send(("status", engine.status()))
            for number, how in engine.turn():
                pipe.send(("ended", number, how))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        engine.close()
