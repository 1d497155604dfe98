"""Meeting other engines while the engine's step goes on."""

import logging
import queue
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

from kvbridge.errors import HandshakeError, KVBridgeError
from kvbridge.handshake import EngineAddress, MetadataReply
from kvbridge.model import Rank
from kvbridge.plan.values import Direction
from kvbridge.session.agent import RankAgent
from kvbridge.session.session import Session, generation_of

_log = logging.getLogger(__name__)

State = Literal["asking", "joining", "live", "failed"]

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
KNOWN_MAX = 1024
"""From so many engines on, those that could not be met are forgotten after their pause."""


class Asks(Protocol):
    """Asks engines for their metadata, as :class:`~kvbridge.handshake.Dialer` does."""

    def fetch(
        self,
        address: EngineAddress | None,
        *,
        timeout_s: float,
        engine_id: str,
        asker: str,
        factors: Mapping[str, Any],
    ) -> "Future[MetadataReply]":
        """Ask one; returns at once."""

    def close(self) -> None:
        """Ask no more; for its owner."""


@dataclass(slots=True, eq=False)
class Introduction:
    """How far this rank has come with one remote engine.

    Attributes:
        engine_id: The engine.
        address: Where its handshake server listens; None if a registry knows.
        direction: Whether it is met to be read from, or to be written to.
        incarnation: Which start of it the request wanted that began this; None for any.
        state: ``"asking"`` for its metadata, ``"joining"`` its ranks, ``"live"`` or ``"failed"``.
        error: Why it failed.
        failures: How often in a row.
        started_s: Clock when it began.
        retry_s: Clock before which it is not tried again.
    """

    engine_id: str
    address: EngineAddress | None
    direction: Direction = "read"
    incarnation: str | None = None
    state: State = "asking"
    error: KVBridgeError | None = None
    failures: int = 0
    started_s: float = 0.0
    retry_s: float = 0.0


class Introductions:
    """Introduces a rank to the engines that its requests name.

    All calls come from the thread that polls the agent, and return at once; what may block happens
    elsewhere. Requests for one engine share one introduction, and engines do not wait for each
    other. One that failed is not tried again before a growing, jittered pause is over.

    Attributes:
        timeout_s: How long an engine may take to answer.
    """

    def __init__(
        self,
        agent: RankAgent,
        dialer: Asks,
        *,
        timeout_s: float = 10.0,
        threads: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Take what it works with; the caller closes both.

        Args:
            agent: The rank.
            dialer: Asks for metadata.
            timeout_s: How long an engine may take to answer, and then each of its ranks.
            threads: Where engines are joined; eight threads if not given. Shut down at the end.
            clock: Seconds that never run backwards.
            uniform: Draws from between two numbers.
        """
        self._agent, self._dialer, self.timeout_s = agent, dialer, timeout_s
        self._clock, self._uniform = clock, uniform
        self._threads = threads or ThreadPoolExecutor(8, thread_name_prefix="kvbridge-join")
        self._known: dict[tuple[str, Direction], Introduction] = {}
        self._answers: queue.SimpleQueue[tuple[Introduction, Future[MetadataReply]]] = (
            queue.SimpleQueue()
        )
        self._joined: queue.SimpleQueue[tuple[Introduction, Future[Session]]] = queue.SimpleQueue()
        self._met: list[tuple[Introduction, MetadataReply]] = []  # to be joined
        self._changed: list[Introduction] = []

    def meet(
        self,
        engine_id: str,
        address: EngineAddress | None,
        *,
        incarnation: str | None = None,
        generation: int = 0,
        rank: Rank | None = None,
        direction: Direction = "read",
    ) -> Introduction:
        """Return how far we have come with an engine; begin if we have not.

        Args:
            engine_id: The engine.
            address: Where its handshake server listens; None to ask the dialer's registry.
            incarnation: Which start of it is wanted, if known: another one is met anew.
            generation: The least registration of its memory that will do.
            rank: The rank whose memory is meant; None for all of them together.
            direction: Whether to read from there, or to write to there.
        """
        known = self._known.get((engine_id, direction))
        # One that has started anew since then has not failed yet: its requests say so. Nor has one
        # that was looked for elsewhere.
        same_start = (
            known is not None
            and incarnation in {None, known.incarnation}
            and address == known.address
        )
        if known is not None:
            if known.state in {"asking", "joining"}:
                return known
            wanted = (incarnation, generation, direction, rank)
            if known.state == "live" and self._is_current(engine_id, *wanted):
                return known
            if known.state == "failed" and same_start and self._clock() < known.retry_s:
                return known
        failures = 0
        if known is not None and known.state == "failed" and same_start:
            failures = known.failures
        new = Introduction(
            engine_id,
            address,
            direction,
            incarnation,
            failures=failures,
            started_s=self._clock(),
        )
        self._known[engine_id, direction] = new
        try:
            asked = self._dialer.fetch(
                address,
                timeout_s=self.timeout_s,
                engine_id=engine_id,
                asker=self._agent.engine_id,
                factors=self._agent.factors,
            )
        except KVBridgeError as error:
            self._fail(new, error)
        else:
            asked.add_done_callback(lambda answer: self._answers.put((new, answer)))
        return new

    def doubt(self, engine_id: str) -> None:
        """Ask an engine anew at the next request, since a transfer with it has failed.

        If it is still the one that we know, its session stays, and what else goes on with it;
        unless one of its ranks cannot be reached any more.
        """
        known = self._known.get((engine_id, "read"))
        if known is not None and known.state == "live":
            del self._known[engine_id, "read"]
            session = self._agent.sessions.get(engine_id)
            if session is not None and session.lost:
                self._agent.disconnect(engine_id)

    def poll(self) -> tuple[Introduction, ...]:
        """Make progress, and return the introductions that have become live or failed."""
        while not self._answers.empty():
            introduction, answer = self._answers.get_nowait()
            error = answer.exception()
            if error is None:
                self._met.append((introduction, answer.result()))
            else:
                self._fail(introduction, as_ours(error))
        self._met = [each for each in self._met if not self._joins(*each)]
        while not self._joined.empty():
            introduction, joined = self._joined.get_nowait()
            error = joined.exception()
            if error is None:
                self._settle(introduction)
            else:
                self._fail(introduction, as_ours(error))
        changed, self._changed = tuple(self._changed), []
        return changed

    def close(self) -> None:
        """Begin nothing new. What has begun ends with the agent. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_current(
        self,
        engine_id: str,
        incarnation: str | None,
        generation: int,
        direction: Direction | None,
        rank: Rank | None = None,
    ) -> bool:
        session = self._agent.sessions.get(engine_id)
        if session is None:
            return False
        known = session.generation if rank is None else session.generations.get(rank, 0)
        return (
            incarnation in {None, session.incarnation}
            and generation <= known
            and (direction is None or direction in session.plans)
        )

    def _joins(self, introduction: Introduction, reply: MetadataReply) -> bool:
        """Begin to join an engine; False while it is joined for the other direction."""
        if "joining" in self._states(introduction.engine_id):
            return False
        self._join(introduction, reply)
        return True

    def _states(self, engine_id: str) -> set[State]:
        """Return how far we have come with an engine, for either direction."""
        directions: tuple[Direction, ...] = get_args(Direction)
        known = (self._known.get((engine_id, direction)) for direction in directions)
        return {each.state for each in known if each is not None}

    def _join(self, introduction: Introduction, reply: MetadataReply) -> None:
        """Give an engine's metadata to the agent, in a thread that may wait for its ranks."""
        engine_id = introduction.engine_id
        try:
            incarnation = reply.ranks[0].incarnation if reply.ranks else None
            start = (incarnation, generation_of(reply.by_rank))
            if self._is_current(engine_id, *start, introduction.direction):
                self._settle(introduction)
                return
            is_new = not self._is_current(engine_id, *start, None)
        except KVBridgeError as error:
            self._fail(introduction, error)
            return
        if (
            is_new and engine_id in self._agent.sessions
        ):  # an earlier start of it, or earlier addresses
            _log.info("engine %s has restarted, or registered anew: old state dropped", engine_id)
            self._agent.disconnect(engine_id)
        introduction.state = "joining"
        connect = partial(
            self._agent.connect,
            reply.by_rank,
            timeout_s=self.timeout_s,
            direction=introduction.direction,
        )
        joining = self._threads.submit(connect)
        joining.add_done_callback(lambda joined: self._joined.put((introduction, joined)))

    def _settle(self, introduction: Introduction) -> None:
        introduction.state, introduction.error, introduction.failures = "live", None, 0
        self._changed.append(introduction)

    def _fail(self, introduction: Introduction, error: KVBridgeError) -> None:
        introduction.failures += 1
        # At least as long as the attempt took: requests to an engine that is gone would else
        # spend most of their time in such attempts.
        now_s = self._clock()
        grown_s = FIRST_PAUSE_S * 2 ** min(introduction.failures, 16)
        longest_s = min(max(grown_s, now_s - introduction.started_s), LONGEST_PAUSE_S)
        introduction.retry_s = now_s + self._uniform(longest_s / 2, longest_s)
        introduction.state, introduction.error = "failed", error
        _log.warning("engine %s cannot be met: %s", introduction.engine_id, error)
        self._changed.append(introduction)
        self._forget_the_gone(introduction.engine_id)

    def _forget_the_gone(self, engine_id: str) -> None:
        """Keep nothing of engines that are gone: in a fleet they come and go for ever."""
        is_live = "live" in self._states(engine_id)
        if engine_id in self._agent.sessions and not (is_live or self._agent.is_busy(engine_id)):
            self._agent.disconnect(engine_id)
        if len(self._known) > KNOWN_MAX:
            now_s = self._clock()
            self._known = {
                key: each
                for key, each in self._known.items()
                if each.state != "failed" or now_s < each.retry_s
            }


def as_ours(error: BaseException) -> KVBridgeError:
    """Return an error of ours; another one is a fault of this code, and ends no engine's step."""
    if isinstance(error, KVBridgeError):
        return error
    _log.error("meeting an engine failed", exc_info=error)
    return HandshakeError(f"meeting the engine failed: {type(error).__name__}: {error}")
