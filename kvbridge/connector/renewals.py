"""How an engine has blocks kept for longer, for requests that still wait.

A request may wait in the consumer's queue for longer than the producer keeps its blocks, and its
load takes time too. So the half that decides asks the half that decides there, over the handshake
channel, again and again until the request is loaded; each answer says which requests are kept and
for how long. An answer that does not come costs nothing: a load whose blocks are gone finds that
out by itself.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from kvbridge.connector.params import RemoteRequest
from kvbridge.errors import KVBridgeError
from kvbridge.handshake import EngineAddress, RenewalReply, RenewalRequest

_log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
"""So often does a reader ask in a lease's time: two answers in a row may get lost."""
_UNKNOWN_LEASE_S = 15.0
_EXPECTED_AGAIN_S = 1.0
"""What is still being computed elsewhere has no lease yet; most of it is loaded before this."""
_AT_ONCE = 64
"""So many requests in one question: their names, of 1 KiB each, fit into one."""


class Renews(Protocol):
    """Asks engines to keep blocks, as :class:`~kvbridge.handshake.Dialer` does."""

    def renew(
        self, address: EngineAddress | None, request: RenewalRequest, *, timeout_s: float
    ) -> "Future[RenewalReply]":
        """Ask one; returns at once."""

    def close(self) -> None:
        """Ask no more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits here while its blocks are kept elsewhere."""

    remote: RemoteRequest
    due_s: float


@dataclass(slots=True, eq=False)
class _Question:
    """What one engine has been asked."""

    waiting: list[_Waiting]
    answer: "Future[RenewalReply]"
    asked_s: float


@dataclass(slots=True)
class RenewalCounts:
    """What became of renewals.

    Attributes:
        kept: Requests whose lease was renewed.
        refused: Requests that are not kept any more.
        failed: Questions that were not answered.
    """

    kept: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class Renewals:
    """The requests of a consumer that wait or are being loaded, and the questions for their sake.

    Attributes:
        counts: What became of them.
    """

    dialer: Renews
    asker: str
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    counts: RenewalCounts = field(default_factory=RenewalCounts)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _questions: list[_Question] = field(default_factory=list)

    def wait(self, request_id: str, remote: RemoteRequest) -> None:
        """Take note that a request waits, by our name for it; again does nothing.

        One that is still being computed elsewhere is asked for by its name alone, which is used
        once: that it is not kept may mean that it is not kept *yet*, so it is asked for again.
        """
        if request_id in self._waiting:
            return
        if remote.is_expected:
            pause_s = _EXPECTED_AGAIN_S
        elif remote.lease is not None and remote.incarnation:
            pause_s = (remote.lease_s or _UNKNOWN_LEASE_S) / RENEWALS_PER_LEASE
        else:
            return
        self._waiting[request_id] = _Waiting(remote, self.clock() + pause_s)

    def forget(self, request_id: str) -> None:
        """Take note that a request has been loaded, or needs nothing."""
        self._waiting.pop(request_id, None)

    def poll(self) -> None:
        """Take answers, and ask for what is due. Never waits."""
        self._questions = [each for each in self._questions if not self._take(each)]
        now_s = self.clock()
        due = [each for each in self._waiting.values() if each.due_s <= now_s]
        for each in due:
            each.due_s = now_s + self.timeout_s  # whatever becomes of it
        for question in _by_engine(due):
            self._ask(question)

    def close(self) -> None:
        """Ask no more."""
        self._waiting.clear()
        self.dialer.close()

    def _ask(self, waiting: list[_Waiting]) -> None:
        first = waiting[0].remote
        request = RenewalRequest(
            first.engine_id,
            first.incarnation or "",
            tuple(each.remote.request_id for each in waiting),
            asker=self.asker,
        )
        try:
            answer = self.dialer.renew(first.address, request, timeout_s=self.timeout_s)
        except KVBridgeError as error:
            self.counts.failed += 1
            _log.info("engine %s cannot be asked to keep blocks: %s", first.engine_id, error)
        else:
            self._questions.append(_Question(waiting, answer, self.clock()))

    def _take(self, question: _Question) -> bool:
        """Take an answer, if there is one."""
        if not question.answer.done():
            return False
        error = question.answer.exception()
        if error is not None:
            # The load finds out whether the blocks are there; until then it is asked again.
            self.counts.failed += 1
            engine_id = question.waiting[0].remote.engine_id
            _log.info("engine %s did not say that it keeps blocks: %s", engine_id, error)
            return True
        reply = question.answer.result()
        again_s = question.asked_s + reply.lease_s / RENEWALS_PER_LEASE
        for each, kept in zip(question.waiting, reply.kept, strict=True):
            if not kept and each.remote.is_expected:
                each.due_s = min(again_s, question.asked_s + _EXPECTED_AGAIN_S)
                continue
            each.due_s = again_s if kept else float("inf")
            self.counts.kept += kept
            self.counts.refused += not kept
            if not kept:
                _log.info(
                    "engine %s does not keep request %s any more",
                    each.remote.engine_id,
                    each.remote.request_id,
                )
        return True


def _by_engine(waiting: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """Group by whom to ask, in questions that are small enough."""
    groups: dict[tuple[object, ...], list[_Waiting]] = defaultdict(list)
    for each in waiting:
        remote = each.remote
        groups[remote.engine_id, remote.incarnation, remote.address].append(each)
    for group in groups.values():
        for start in range(0, len(group), _AT_ONCE):
            yield group[start : start + _AT_ONCE]
