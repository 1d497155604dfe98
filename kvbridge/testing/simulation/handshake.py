"""The handshake in virtual time: servers, those who ask them, and threads that join engines."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from kvbridge.errors import HandshakeError, HandshakeTimeoutError
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    MetadataReply,
    RenewalReply,
    RenewalRequest,
)
from kvbridge.model import Rank
from kvbridge.testing.simulation.renewals import Renewals
from kvbridge.testing.simulation.scenario import Faults
from kvbridge.testing.simulation.world import World

T = TypeVar("T")


class Network:
    """Who listens where.

    Attributes:
        replies: What is answered at each address, the latest last; nothing where nobody listens.
        past: What was answered there before the engine was restarted.
        keeps: Who keeps blocks for longer, at each address.
        renewals: What became of questions to keep blocks for longer.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        """Start with nobody."""
        self.world, self.faults = world, faults
        self.replies: dict[EngineAddress, list[MetadataReply]] = {}
        self.past: dict[EngineAddress, list[MetadataReply]] = {}
        self.keeps: dict[EngineAddress, SimulatedServer] = {}
        self.renewals = Renewals(world)

    def answer(self, address: EngineAddress, engine_id: str) -> MetadataReply:
        """Return what is answered there.

        Raises:
            HandshakeError: A refusal, or nobody is there.
        """
        current = self.replies.get(address)
        if not current:
            raise HandshakeTimeoutError(f"nobody answers at {address}")
        if self.world.chance(self.faults.ask_fails):
            raise HandshakeError("the peer refused: it is in no mood")
        sleeps = self.keeps[address].sleeps
        old = self.past.get(address, []) + (current if sleeps else current[:-1])
        reply = current[-1]
        if sleeps and not self.world.chance(self.faults.ask_stale):
            raise HandshakeError("the peer refused: this engine has no cache now")
        if old and self.world.chance(self.faults.ask_stale):
            reply = self.world.rng.choice(old)
        there = reply.ranks[0].engine_id
        if there != engine_id:
            raise HandshakeError(f"at {address} is engine {there!r}, not {engine_id!r}")
        return reply

    def renew(self, address: EngineAddress, request: RenewalRequest) -> RenewalReply:
        """Have blocks kept for longer.

        Raises:
            HandshakeError: A refusal, or nobody is there.
        """
        current, server = self.replies.get(address), self.keeps.get(address)
        if not current or server is None or server.keep is None:
            raise HandshakeTimeoutError(f"nobody answers at {address}")
        there = current[-1].ranks[0]
        if server.sleeps:
            raise HandshakeError("the peer refused: this engine has no cache now")
        if there.engine_id != request.engine_id:
            raise HandshakeError(f"the peer refused: it is {there.engine_id!r}")
        if request.incarnation not in {"", there.incarnation}:
            raise HandshakeError(f"the peer refused: it is {there.incarnation!r}")
        if self.world.chance(self.faults.ask_fails):
            raise HandshakeError("the peer refused: it is in no mood")
        kept, lease_s = server.keep(request.requests)
        self.renewals.promised(address, request, kept, lease_s)
        return RenewalReply(tuple(kept), lease_s)


class SimulatedServer:
    """Answers for one connector of an engine; see ``HandshakeServer``."""

    def __init__(self, network: Network, address: EngineAddress) -> None:
        """Listen."""
        self._network, self._address, self._generation = network, address, 0
        self.sleeps = False
        self.keep: Callable[[Sequence[str]], tuple[Sequence[bool], float]] | None = None
        network.past.setdefault(address, []).extend(network.replies.get(address, []))
        network.replies[address] = []
        network.keeps[address] = self

    @property
    def address(self) -> EngineAddress:
        """Where it listens."""
        return self._address

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Answer this from now on."""
        self._generation, self.sleeps = self._generation + 1, False
        reply = MetadataReply(self._generation, tuple(metadata.values()))
        self._network.replies[self._address].append(reply)

    def withdraw(self) -> None:
        """Refuse everybody from now on."""
        self.sleeps = True

    def close(self) -> None:
        """Listen no longer."""
        self._network.past[self._address].extend(self._network.replies.pop(self._address, []))
        self._network.keeps.pop(self._address, None)


class SimulatedDialer:
    """Asks; see ``Dialer``."""

    def __init__(self, network: Network) -> None:
        """Take whom to ask."""
        self._network = network

    def fetch(
        self,
        address: EngineAddress | None,
        *,
        timeout_s: float,
        engine_id: str,
        asker: str,
        factors: Mapping[str, Any],
    ) -> "Future[MetadataReply]":
        """Ask one engine; the answer comes later."""
        network, world = self._network, self._network.world
        answer: Future[MetadataReply] = Future()
        if address is None:
            raise HandshakeError(f"engine {engine_id!r} comes without an address")
        if world.chance(network.faults.ask_silent):
            error = HandshakeTimeoutError(f"no answer from {address} within {timeout_s:g} s")
            world.after(timeout_s, lambda: answer.set_exception(error))
        else:
            delay_s = min(world.rng.expovariate(100.0), timeout_s)
            world.after(delay_s, lambda: _settle(answer, network.answer, address, engine_id))
        return answer

    def renew(
        self, address: EngineAddress | None, request: RenewalRequest, *, timeout_s: float
    ) -> "Future[RenewalReply]":
        """Ask one engine to keep blocks; the question may get lost, or the answer, or be late."""
        network, world = self._network, self._network.world
        answer: Future[RenewalReply] = Future()
        if address is None:
            raise HandshakeError(f"engine {request.engine_id!r} comes without an address")
        network.renewals.asks(address, request)
        there_s = min(world.rng.expovariate(100.0), timeout_s)
        if world.chance(network.faults.ask_silent):
            error = HandshakeTimeoutError(f"no answer from {address} within {timeout_s:g} s")
            world.after(timeout_s, lambda: answer.set_exception(error))
            if world.rng.random() < 0.5:
                lost: Future[RenewalReply] = Future()
                world.after(there_s, lambda: _settle(lost, network.renew, address, request))
            return answer
        back_s = 0.0
        if world.chance(network.faults.ask_stale):
            back_s = (timeout_s - there_s) * world.rng.random()
        asked_s, said = world.now_s, Future[RenewalReply]()
        world.after(there_s, lambda: _settle(said, network.renew, address, request))

        def arrive() -> None:
            if said.exception() is None:
                network.renewals.hears(address, request, said.result(), asked_s)
            _copy(said, answer)

        world.after(there_s + back_s, arrive)
        return answer

    def close(self) -> None:
        """Ask no more."""


SLOW = 0.2
"""So often work that may be slow is slow."""


class SimulatedThreads(Executor):
    """Runs what may block: later, and while everything else goes on."""

    def __init__(self, world: World, longest_s: float = 0.005, slow_s: float = 0.0) -> None:
        """Run nothing yet.

        Args:
            world: What goes on.
            longest_s: How long it may take until something is run.
            slow_s: How long it may take now and then.
        """
        self._world, self._longest_s, self._slow_s = world, longest_s, slow_s
        self._open = True

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Run something a little later; its result is seen later still."""
        future: Future[T] = Future()

        def begin() -> None:
            if not self._open:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            done: Future[T] = Future()
            _settle(done, fn, *args, **kwargs)
            self._world.after(self._world.rng.uniform(0.0, 0.005), lambda: _copy(done, future))

        is_slow = self._slow_s > 0 and self._world.chance(SLOW)
        longest_s = self._slow_s if is_slow else self._longest_s
        self._world.after(self._world.rng.uniform(0.0, longest_s), begin)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Begin nothing new."""
        self._open = False


def _settle(future: "Future[T]", fn: Callable[..., T], *args: Any, **kwargs: Any) -> None:
    try:
        result = fn(*args, **kwargs)
    except Exception as error:  # whatever it is, it is the future's
        future.set_exception(error)
    else:
        future.set_result(result)


def _copy(done: "Future[T]", future: "Future[T]") -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)
