"""Whether the engines that are known beforehand fit this one, before any request comes."""

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvbridge.errors import HandshakeError, HandshakeTimeoutError, UnknownHostError
from kvbridge.handshake import (
    Dialer,
    EngineAddress,
    HandshakeMetadata,
    MetadataReply,
    engine_factors,
)
from kvbridge.handshake.dialer import Pauses
from kvbridge.handshake.metadata import decode_factors
from kvbridge.model import Rank, RankCache, TransferTopology
from kvbridge.plan import generate_engine_transfer_plan
from kvbridge.session.introductions import as_ours
from kvbridge.session.session import body_of, compatible_bodies

_log = logging.getLogger(__name__)

State = Literal["unknown", "silent", "fits", "refused"]

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""A peer that does not fit is asked again so rarely: somebody has to restart it first."""


@dataclass(slots=True, eq=False)
class _Peer:
    """What is known of one peer.

    Attributes:
        address: Where its handshake server listens.
        state: ``"unknown"`` before anything has become of the first question.
        why: What speaks against it, or why it is silent.
        question: The one whose answer counts.
        pauses: Between the questions, as long as the state is the same.
        again_s: Clock when it is asked again.
    """

    address: EngineAddress
    state: State = "unknown"
    why: str = ""
    question: Future[MetadataReply] | None = None
    pauses: Pauses | None = None
    again_s: float = math.inf


@dataclass(frozen=True, slots=True)
class _Ours:
    """Our own engine, to compare others with."""

    engine_id: str
    incarnation: str
    factors: Mapping[str, Any]
    caches: Mapping[Rank, RankCache]

    @classmethod
    def of(cls, metadata: Mapping[Rank, HandshakeMetadata]) -> "_Ours":
        first = next(iter(metadata.values()))
        return cls(
            first.engine_id,
            first.incarnation,
            engine_factors(decode_factors(data.payload) for data in metadata.values()),
            {rank: body_of(data).cache for rank, data in metadata.items()},
        )

    def check(self, reply: MetadataReply, *, reads: bool) -> None:
        """Refuse an engine that a rank of ours could not be paired with."""
        first = reply.ranks[0]
        if first.engine_id == self.engine_id:
            if first.incarnation == self.incarnation:
                return  # one list for a whole fleet names this engine too
            raise HandshakeError(
                f"the engine there is called {first.engine_id!r} as this one is; give every "
                "engine an id of its own"
            )
        bodies = compatible_bodies(reply.by_rank, self.factors)
        caches = {rank: body.cache for rank, body in bodies.items()}
        pp_size, tp_size = (1 + max(rank[axis] for rank in self.caches) for axis in (0, 1))
        for (pp_rank, tp_rank), cache in self.caches.items():
            topology = TransferTopology(
                tp_rank=tp_rank,
                tp_size=tp_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
                engine_id=self.engine_id,
                # What the caches announce counts; a planner does not look at the rest.
                block_size=1,
                is_mla=False,
                is_mamba=False,
                total_num_kv_heads=1,
            )
            generate_engine_transfer_plan(
                topology,
                cache,
                caches,
                local_engine=self.caches,
                direction="read" if reads else "write",
            )


class KnownPeers:
    """Asks the engines that are known beforehand whether they fit.

    Peers start in any order, and one may wait for the other to be ready. So a peer that has not
    answered in time speaks against nothing, and is asked again until it does; one that has refused
    and then is silent has perhaps been stopped to be mended, and counts as one that has not
    started. A peer that fits is not asked again: if it comes back with another configuration, it
    is the one that is not ready, and asks us.

    Answers are looked at in the dialer's thread. All calls come from one thread and return at once;
    those who ask how things are also keep the questions coming.
    """

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        dialer: Dialer,
        *,
        asker: str,
        reads: bool = True,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Take whom to ask; nobody is asked before :meth:`ask`.

        Args:
            addresses: Where the peers' handshake servers listen.
            dialer: Asks; closed with this.
            asker: Name of our engine, for the others' logs.
            reads: Whether our engine reads from them; otherwise they read from ours.
            timeout_s: How long an answer may take.
            clock: Seconds that never run backwards.
            uniform: Draws from between two numbers.
        """
        self._peers = [_Peer(address) for address in addresses]
        self._dialer, self._asker, self._reads, self._timeout_s = dialer, asker, reads, timeout_s
        self._clock, self._uniform = clock, uniform
        self._lock = threading.Lock()  # the state of a peer changes as a whole
        self._ours: _Ours | None = None

    def ask(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Ask every peer, as the engine that publishes this; what it answered before is past.

        Until the new answer comes, the last one counts.

        Args:
            metadata: What all ranks of our engine have published.

        Raises:
            HandshakeError: It cannot be read, or contradicts itself.
        """
        self._ours = _Ours.of(metadata)
        for peer in self._peers:
            peer.pauses = None
            self._ask(peer, self._ours)

    @property
    def ready(self) -> bool:
        """Whether something has become of the first question to each, and none has refused."""
        self.poll()
        return all(peer.state in {"fits", "silent"} for peer in self._peers)

    def refusals(self) -> dict[str, str]:
        """Return what speaks against a peer, by its address."""
        self.poll()
        with self._lock:
            refused = [peer for peer in self._peers if peer.state == "refused"]
            return {str(peer.address): peer.why for peer in refused}

    def poll(self) -> None:
        """Ask those again whose pause is over."""
        if self._ours is None:
            return
        now_s = self._clock()
        for peer in self._peers:
            if now_s >= peer.again_s:
                self._ask(peer, self._ours)

    def close(self) -> None:
        """Ask nobody any more. Idempotent."""
        self._ours = None
        with self._lock:
            for peer in self._peers:
                peer.question = None
        self._dialer.close()

    def _ask(self, peer: _Peer, ours: _Ours) -> None:
        question = self._dialer.fetch(
            peer.address, timeout_s=self._timeout_s, asker=self._asker, factors=ours.factors
        )
        with self._lock:
            peer.question, peer.again_s = question, math.inf
        question.add_done_callback(partial(self._heard, peer, ours))

    def _heard(self, peer: _Peer, ours: _Ours, question: Future[MetadataReply]) -> None:
        """Take what has become of a question; in the dialer's thread."""
        state, why = self._verdict(ours, question)
        with self._lock:
            if peer.question is not question:
                return  # asked anew since, or closed
            known = (peer.state, peer.why)
            if peer.state != state or peer.pauses is None:
                peer.pauses = self._pauses(state)
            peer.state, peer.why = state, why
            if state != "fits":
                peer.again_s = self._clock() + peer.pauses.next_s()
        if known != (state, why):
            self._say(peer.address, state, why)

    def _verdict(self, ours: _Ours, question: Future[MetadataReply]) -> tuple[State, str]:
        try:
            ours.check(question.result(), reads=self._reads)
        except (HandshakeTimeoutError, UnknownHostError) as error:
            return "silent", str(error)
        except Exception as error:  # a fault of ours in the dialer's thread would be seen by nobody
            return "refused", str(as_ours(error))
        return "fits", ""

    def _pauses(self, state: State) -> Pauses:
        if state == "refused":
            return Pauses(self._uniform, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        return Pauses(self._uniform)  # to be silent has taken its time already

    def _say(self, address: EngineAddress, state: State, why: str) -> None:
        if state == "refused":
            _log.warning(
                "engine %s is not ready: its peer at %s does not fit: %s", self._asker, address, why
            )
        elif state == "fits":
            _log.info("engine %s fits its peer at %s", self._asker, address)
        else:
            _log.info("engine %s asks its peer at %s again: %s", self._asker, address, why)
