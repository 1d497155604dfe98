"""Asking other engines for their metadata: many at once, none of which holds up another."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvbridge.config import check_timeout
from kvbridge.errors import (
    AuthenticationError,
    ConfigError,
    HandshakeError,
    HandshakeTimeoutError,
)
from kvbridge.handshake.address import EngineAddress, Networks
from kvbridge.handshake.discovery import EngineRecord
from kvbridge.handshake.messages import (
    MetadataReply,
    MetadataRequest,
    RenewalReply,
    RenewalRequest,
    Request,
    decode_reply,
)
from kvbridge.handshake.security import Keys
from kvbridge.handshake.sockets import channel_socket
from kvbridge.handshake.wire import MESSAGE_MAX_BYTES, encode
from kvbridge.model import Rank

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_SOCKETS_MAX = 1 << 16

_DENIED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOST = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_PROGRESS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_GREETING_S = 3.0
"""A connection whose greeting takes longer is tried anew, and then given twice as long."""
_HANG_UPS_MAX = 3
"""So often may a connection end while keys are exchanged, before it is no accident."""


class Pauses:
    """Growing pauses between attempts, jittered so that a fleet does not ask in step."""

    def __init__(
        self,
        uniform: Callable[[float, float], float] = random.uniform,
        *,
        first_s: float = _FIRST_PAUSE_S,
        longest_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        """Take what draws from between two numbers, the first pause and the longest one."""
        self._uniform, self._pause_s, self._longest_s = uniform, first_s, longest_s

    def next_s(self) -> float:
        """Return the next pause, between half and all of what has doubled each time."""
        pause_s = self._uniform(self._pause_s / 2, self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        return pause_s


_Answer = MetadataReply | RenewalReply

Find = Callable[[str], EngineRecord | None]
"""Returns the record of an engine, by its id."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One question: to whom, what, until when."""

    address: EngineAddress | None
    request: Request
    deadline_s: float
    timeout_s: float

    @property
    def whom(self) -> str:
        """Who is asked, in words."""
        return str(self.address or f"engine {self.request.engine_id!r}")


class Dialer:
    """Asks engines for their metadata, all from one thread.

    A name is resolved and checked against the networks that may be dialled, an engine that still
    starts is asked again, one that is not there is tried until the time is over.
    """

    def __init__(
        self,
        *,
        keys: Keys | None = None,
        networks: Networks | None = None,
        find: Find | None = None,
    ) -> None:
        """Start the thread.

        Args:
            keys: Own keys and those of peers; None to talk to engines without.
            networks: What may be dialled; this machine alone by default.
            find: Says where engines are that are asked for by their id alone; it may block.
        """
        self._keys = keys
        self._networks = networks or Networks()
        self._lookup = find
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = _SOCKETS_MAX
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._waiting: dict[Future[MetadataReply], _Call] = {}
        self._thread = threading.Thread(target=self._run, name="kvbridge-dialer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def fetch(
        self,
        address: EngineAddress | None,
        *,
        timeout_s: float,
        engine_id: str | None = None,
        ranks: tuple[Rank, ...] | None = None,
        asker: str = "",
        factors: Mapping[str, Any] | None = None,
    ) -> "Future[MetadataReply]":
        """Ask an engine for the metadata of its ranks; returns at once.

        Args:
            address: Where its handshake server listens; None to look its id up in the registry.
            timeout_s: How long the answer may take.
            engine_id: Engine that must be behind the address, if known.
            ranks: Ranks to ask for; None for all.
            asker: Own engine id, for the other side's log.
            factors: Own factors, so that the other side learns of a difference too.

        Returns:
            What becomes the answer, or one of:

            - HandshakeTimeoutError: No answer came in time, or none but "not yet".
            - AuthenticationError: One side does not have the keys that the other expects.
            - IncompatibleError: The engines differ.
            - UnknownHostError: The address has a name that does not resolve.
            - HandshakeError: The answer is a refusal or cannot be read, or the address is unknown
              or outside of the networks.

        Raises:
            ConfigError: The time is none, or there is neither address nor registry.
            HandshakeError: The dialer is closed.
        """
        mine = dict(factors) if factors is not None else None
        request = MetadataRequest(engine_id=engine_id, ranks=ranks, asker=asker, factors=mine)
        return self._ask(address, request, timeout_s)

    def renew(
        self,
        address: EngineAddress | None,
        request: RenewalRequest,
        *,
        timeout_s: float,
    ) -> "Future[RenewalReply]":
        """Ask an engine to keep blocks for longer; returns at once.

        Args:
            address: Where its handshake server listens; None to look its id up in the registry.
            request: What to keep.
            timeout_s: How long the answer may take.

        Returns:
            What becomes the answer, or an error as :meth:`fetch` says.

        Raises:
            ConfigError: The time is none, or there is neither address nor registry.
            HandshakeError: The dialer is closed.
        """
        return self._ask(address, request, timeout_s)

    def _ask(
        self, address: EngineAddress | None, request: Request, timeout_s: float
    ) -> Future[Any]:
        engine_id = request.engine_id
        if address is None and (self._lookup is None or engine_id is None):
            raise ConfigError(
                f"engine {engine_id!r} comes without an address, and no registry is configured "
                "that could know it; have requests carry remote_host and remote_port, or set "
                "registry"
            )
        deadline_s = time.monotonic() + check_timeout(timeout_s, "timeout_s")
        if self._closed:
            raise HandshakeError(f"the dialer is closed; {address or engine_id} is not asked")
        call = _Call(address, request, deadline_s, timeout_s)
        answer: Future[Any] = Future()
        self._waiting[answer] = call
        asyncio.run_coroutine_threadsafe(self._answer(call, answer), self._loop)
        return answer

    def close(self) -> None:
        """Give up what is being asked, and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            for answer, call in self._waiting.items():
                message = f"the dialer was closed while {call.whom} was asked"
                answer.set_exception(HandshakeError(message))
            self._waiting.clear()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._context.destroy(linger=0)

    async def _answer(self, call: _Call, answer: Future[Any]) -> None:
        try:
            reply = await self._fetch(call)
        except Exception as error:
            del self._waiting[answer]
            answer.set_exception(error)
        else:
            del self._waiting[answer]
            answer.set_result(reply)

    async def _fetch(self, call: _Call) -> _Answer:
        heard = _Heard()
        try:
            async with asyncio.timeout_at(self._loop.time() + call.deadline_s - time.monotonic()):
                return await self._ask_until_answered(call, heard)
        except TimeoutError:
            raise HandshakeTimeoutError(
                f"{heard.what} from {call.whom} within {call.timeout_s:g} s; check that the "
                "engine runs and that this is its handshake port"
            ) from None

    async def _ask_until_answered(self, call: _Call, heard: "_Heard") -> _Answer:
        found = await self._loop.run_in_executor(None, self._find, call)
        pause = Pauses()
        attempt = 0
        while True:
            # A name may lead to several addresses, and the engine listen on one of them.
            target = found[attempt % len(found)]
            reply = await self._attempt(call, target, heard)
            if reply is not None:
                return reply
            if heard.hang_ups >= _HANG_UPS_MAX:
                self._raise_hung_up(call)
            await asyncio.sleep(pause.next_s())
            attempt += 1

    def _find(self, call: _Call) -> Sequence[EngineAddress]:
        """Return where to dial; may wait for a registry, or for a name to be resolved."""
        address, engine_id = call.address, call.request.engine_id
        if address is None and self._lookup is not None and engine_id is not None:
            record = self._lookup(engine_id)
            if record is None:
                raise HandshakeError(
                    f"engine {engine_id!r} stands in no entry of the registry; is it alive, and "
                    "does it announce itself there?"
                )
            address = EngineAddress.of(record.host, record.port, where=f"entry of {engine_id!r}")
        if address is None:
            raise HandshakeError(f"nobody knows the address of engine {engine_id!r}")
        return self._networks.resolve(address)

    async def _attempt(self, call: _Call, target: EngineAddress, heard: "_Heard") -> _Answer | None:
        """Ask once; None if nobody is there, or has anything to say yet."""
        async with self._connected(call, target) as (channel, monitor):
            await channel.send(encode(call.request))
            answer = asyncio.ensure_future(channel.recv())
            end = asyncio.ensure_future(self._watch(call, monitor, heard))
            try:
                heard.greeted = False
                both = {answer, end}
                await asyncio.wait(
                    both, timeout=heard.greeting_s, return_when=asyncio.FIRST_COMPLETED
                )
                if heard.greeted:  # the rest may take as long as the caller allows
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    if end.done():
                        end.result()
                    else:
                        heard.greeting_s *= 2  # it may have much to do
                    return None
                heard.what = "nothing but 'not yet'"
                return _to_what_was_asked(call, decode_reply(answer.result()))
            finally:
                answer.cancel()
                end.cancel()

    async def _watch(self, call: _Call, monitor: zmq.asyncio.Socket, heard: "_Heard") -> None:
        """Follow what becomes of a connection, until it is lost."""
        greeting = False
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event & _DENIED:
                self._raise_denied(call)
            if event & _LOST:
                heard.what = "no answer"
                heard.hang_ups = heard.hang_ups + 1 if greeting else 0
                return
            greeting = event == zmq.EVENT_CONNECTED
            heard.greeted |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    @contextlib.asynccontextmanager
    async def _connected(
        self, call: _Call, target: EngineAddress
    ) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
        channel = channel_socket(self._context, zmq.DEALER, MESSAGE_MAX_BYTES)
        monitor = channel.get_monitor_socket(_DENIED | _LOST | _PROGRESS)
        try:
            if self._keys is not None:
                host = call.address.host if call.address else target.host
                names = (call.request.engine_id or host, host)
                channel.curve_serverkey = self._keys.of(*names)
                channel.curve_publickey = self._keys.public
                channel.curve_secretkey = self._keys.secret
            channel.connect(target.endpoint)
            yield channel, monitor
        except zmq.ZMQError as error:
            raise HandshakeError(f"cannot ask {target}: {error.strerror}") from error
        finally:
            channel.disable_monitor()
            monitor.close()
            channel.close()

    def _raise_denied(self, call: _Call) -> NoReturn:
        mine = "has a secret or keys" if self._keys else "has neither secret nor keys"
        raise AuthenticationError(
            f"{call.whom} and this engine do not believe each other (this side {mine}); "
            "give both the same secret, or each the other's public key"
        )

    def _raise_hung_up(self, call: _Call) -> NoReturn:
        if self._keys is not None:
            self._raise_denied(call)
        raise AuthenticationError(
            f"{call.whom} hangs up on every greeting: it expects a secret or keys, which this "
            "engine does not have, or it is no handshake port"
        )


def _to_what_was_asked(call: _Call, reply: _Answer | None) -> _Answer | None:
    """Refuse an answer to another question; or of another engine, which could take the place."""
    asked = call.request
    if isinstance(reply, RenewalReply):
        if not isinstance(asked, RenewalRequest) or len(reply.kept) != len(asked.requests):
            raise HandshakeError(f"{call.whom} answers something that it was not asked")
    elif reply is not None:
        others = {data.engine_id for data in reply.ranks} - {asked.engine_id}
        if isinstance(asked, RenewalRequest):
            raise HandshakeError(f"{call.whom} answers something that it was not asked")
        if asked.engine_id is not None and others:
            raise HandshakeError(
                f"engine {asked.engine_id!r} was asked, but {call.whom} answers for "
                f"{sorted(others)!r:.200}; the address belongs to another engine"
            )
    return reply


@dataclass(slots=True)
class _Heard:
    """What the last attempts got, for the error.

    Attributes:
        what: The last one, in words.
        hang_ups: How many connections in a row ended before the greeting was over.
        greeted: Whether the last one's greeting is over.
        greeting_s: How long the next one may take.
    """

    what: str = "no answer"
    hang_ups: int = 0
    greeted: bool = False
    greeting_s: float = _GREETING_S


def fetch_metadata(
    host: str,
    port: int,
    *,
    timeout_s: float,
    engine_id: str | None = None,
    keys: Keys | None = None,
    networks: Networks | None = None,
) -> MetadataReply:
    """Ask one engine for the metadata of all its ranks, and wait for the answer.

    Args:
        host: Where its handshake server listens.
        port: Port of that server.
        timeout_s: How long to wait for the answer.
        engine_id: Engine that must be behind the address, if known.
        keys: Own keys and those of peers; None to talk to engines without.
        networks: What may be dialled; this machine alone by default.

    Raises:
        ConfigError: The address or the time is none.
        HandshakeError: See :meth:`Dialer.fetch`.
    """
    address = EngineAddress.of(host, port)
    with Dialer(keys=keys, networks=networks) as dialer:
        return dialer.fetch(address, timeout_s=timeout_s, engine_id=engine_id).result()
