"""The handshake in virtual time: servers, those who ask them, and threads that join engines."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from kvbridge.errors import HandshakeError, HandshakeTimeoutError
from kvbridge.handshake import EngineAddress, HandshakeMetadata, MetadataReply
from kvbridge.model import Rank
from kvbridge.testing.simulation.scenario import Faults
from kvbridge.testing.simulation.world import World

T = TypeVar("T")


class Network:
    """Who listens where.

    Attributes:
        replies: What is answered at each address, the latest last; nothing where nobody listens.
        past: What was answered there before the engine was restarted.
    """

    def __init__(self, world: World, faults: Faults) -> None:
        """Start with nobody."""
        self.world, self.faults = world, faults
        self.replies: dict[EngineAddress, list[MetadataReply]] = {}
        self.past: dict[EngineAddress, list[MetadataReply]] = {}

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
        old = self.past.get(address, []) + current[:-1]
        reply = current[-1]
        if old and self.world.chance(self.faults.ask_stale):
            reply = self.world.rng.choice(old)
        there = reply.ranks[0].engine_id
        if there != engine_id:
            raise HandshakeError(f"at {address} is engine {there!r}, not {engine_id!r}")
        return reply


class SimulatedServer:
    """Answers for one connector of an engine; see ``HandshakeServer``."""

    def __init__(self, network: Network, address: EngineAddress) -> None:
        """Listen."""
        self._network, self._address, self._generation = network, address, 0
        self.keep: Callable[[Sequence[str]], tuple[Sequence[bool], float]] | None = None
        network.past.setdefault(address, []).extend(network.replies.get(address, []))
        network.replies[address] = []

    @property
    def address(self) -> EngineAddress:
        """Where it listens."""
        return self._address

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[Rank, HandshakeMetadata]
    ) -> None:
        """Answer this from now on."""
        self._generation += 1
        reply = MetadataReply(self._generation, tuple(metadata.values()))
        self._network.replies[self._address].append(reply)

    def close(self) -> None:
        """Listen no longer."""
        self._network.past[self._address].extend(self._network.replies.pop(self._address, []))


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

    def close(self) -> None:
        """Ask no more."""


class SimulatedThreads(Executor):
    """Runs what may block: later, and while everything else goes on."""

    def __init__(self, world: World) -> None:
        """Take the world that goes on."""
        self._world, self._open = world, True

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        """Run something a little later; its result is seen later still."""
        future: Future[T] = Future()

        def begin() -> None:
            if not self._open:
                future.cancel()
                return
            done: Future[T] = Future()
            _settle(done, fn, *args, **kwargs)
            self._world.after(self._world.rng.uniform(0.0, 0.005), lambda: _copy(done, future))

        self._world.after(self._world.rng.uniform(0.0, 0.005), begin)
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
