"""This rank among others: its memory, the engines it knows, the requests on their way."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbridge.config import check_timeout
from kvbridge.errors import (
    BlockTableError,
    ConfigError,
    HandshakeError,
    MemoryBusyError,
    PeerLostError,
    TransportError,
    UnknownEngineError,
)
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    RankPayload,
    engine_factors,
    factors_of,
)
from kvbridge.handshake.compatibility import LAYERED
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.handshake.messages import Given, Note, Release, Want, Withdrawal, decode_note
from kvbridge.handshake.metadata import decode_factors, seal
from kvbridge.handshake.wire import encode
from kvbridge.model import Rank, RankCache, TransferTopology
from kvbridge.plan import BlockTable, TransferBatch, digests_of
from kvbridge.plan.values import Direction
from kvbridge.session.causes import Cause
from kvbridge.session.digesting import Digester, Values, can_digest
from kvbridge.session.leases import WORD_NBYTES, Lease, LeaseTable, Standing
from kvbridge.session.payload import Checks
from kvbridge.session.questions import CheckMode, PayloadCheck
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.session import (
    Session,
    body_of,
    close_session,
    generation_of,
    memory_of,
    open_session,
    told_by,
)
from kvbridge.session.transfer import SourceStats, Transfer
from kvbridge.session.wants import Wants, blocks_of, tables_of
from kvbridge.transport import Descriptors, Handle, Op, Peer, Region, State, Transport


class AgentPoll(NamedTuple):
    """What happened since the last poll; each entry is reported once.

    Attributes:
        finished: Transfers that have ended.
        released: Requests whose blocks no reader needs any more.
        asked: What other ranks want written or digested, by the names of their agents.
    """

    finished: tuple[Transfer, ...] = ()
    released: tuple[str, ...] = ()
    asked: tuple[tuple[str, Want | Withdrawal | DigestRequest], ...] = ()


class _Moves(Protocol):
    """What handles belong to: a transfer, or a gift.

    Attributes:
        pending: Those that are not quiet.
    """

    pending: set[Any]

    def settle(self, handle: Handle, state: State, reason: str) -> None:
        """Note that one has become quiet."""

    def fail(self, reason: str, cause: Cause) -> None:
        """Note that one could not be submitted."""


class _Gives(_Moves, Protocol):
    """What is written for a reader; see :class:`~kvbridge.session.gifts.Gift`.

    Attributes:
        has_begun: Whether that has been submitted.
        nbytes: Bytes of it.
    """

    has_begun: bool
    nbytes: int


class _Kept(NamedTuple):
    """What is promised of a request."""

    lease: Lease | None
    tables: Sequence[BlockTable]
    num_tokens: int


class RankAgent:
    """One rank of an engine, able to give and to take.

    Calls come from one thread, except :meth:`connect`, which may block and may run beside the
    others. Everything else returns at once; :meth:`poll` makes progress.

    Attributes:
        incarnation: Fresh at every start of the engine, the same for its ranks.
        generation: How often the memory has been registered.
        unreadable: Notifications that could not be read.
        unsent: Notifications that could not be sent.
    """

    def __init__(
        self,
        topology: TransferTopology,
        local: RankCache,
        transport: Transport,
        *,
        model: str,
        revision: str | None = None,
        draft_layers: Iterable[int] = (),
        incarnation: str | None = None,
        gives: bool = False,
        clock: Callable[[], float] = time.monotonic,
        digesting: Executor | None = None,
    ) -> None:
        """Register the rank's memory with an open transport.

        Args:
            topology: The rank's place in its engine.
            local: What the rank holds.
            transport: An open transport; closed with the agent.
            model: Name of the model, compared with peers.
            revision: Revision of the model, if it is pinned.
            draft_layers: Layers that belong to a draft model, by global index.
            incarnation: Agreed with the engine's other ranks; needed if there are any.
            gives: Whether other ranks may ask it to write, see :class:`Gifts`; it says so to them.
            clock: Seconds that never run backwards.
            digesting: Where digests are taken; a thread of its own, once there are some to take, if
                not given. Shut down at the end.

        Raises:
            ConfigError: The cache is of another engine, or the model has no name.
            UnsupportedLayoutError: The cache lies in several kinds of memory.
            TransportError: The memory cannot be registered.
        """
        if topology.engine_id != local.engine_id or not model:
            raise ConfigError(
                f"{local.where} cannot be of engine {topology.engine_id!r} with model {model!r}; "
                "pass the cache of the topology's engine, and the name of its model"
            )
        self._topology, self._local, self._transport = topology, local, transport
        self._local_engine: dict[Rank, RankCache] | None = None
        self._clock, self._gives = clock, gives
        self.incarnation = incarnation or uuid.uuid4().hex
        self._memory = memory_of(local.regions, local.where)
        self._named: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "transport": transport.name,
            "draft_layers": tuple(draft_layers),
        }
        self._factors = factors_of(local, **self._named)
        self._engine_factors: dict[str, Any] | None = None
        self.generation = 1
        self._sessions: dict[str, Session] = {}
        self._transfers: dict[Handle, _Moves] = {}
        self._live: list[Transfer] = []
        self._untold: list[Transfer] = []  # ended, but others still write to them
        self._wants = Wants(transport.notify, transport.drop_peer, self.peer_named, clock)
        self._digester = Digester(digesting)
        self._checks = Checks(transport.notify, self._digester, clock)
        self.releases = ReleaseBook(clock)
        self._leases = LeaseTable()
        self._kept: dict[str, _Kept] = {}
        self.unreadable = 0
        self.unsent = 0
        transport.register((*local.regions, self._leases.region))

    def metadata(self) -> HandshakeMetadata:
        """Return what this rank publishes."""
        info = self._transport.agent_info()
        leases, digests = self._leases.region, can_digest(self._local)
        payload = RankPayload(self._local, info, leases, self._gives, digests)
        return HandshakeMetadata(
            self._local.engine_id,
            self.incarnation,
            self._local.pp_rank,
            self._local.tp_rank,
            seal(
                self._factors,
                payload,
                engine_id=self._local.engine_id,
                incarnation=self.incarnation,
                generation=self.generation,
            ),
        )

    def share_engine(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Take what all ranks of our own engine published, once the engine has gathered it.

        Without it an even split is assumed, which an engine of several stages does not have.

        Raises:
            HandshakeError: The metadata cannot be read.
        """
        self._engine_factors = engine_factors(decode_factors(d.payload) for d in metadata.values())
        self._local_engine = {rank: body_of(data).cache for rank, data in metadata.items()}

    @property
    def engine_id(self) -> str:
        """The engine that this rank is of."""
        return self._local.engine_id

    @property
    def gives(self) -> bool:
        """Whether other ranks may ask it to write."""
        return self._gives

    @property
    def transport_name(self) -> str:
        """The transport that moves the bytes."""
        return self._transport.name

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The remote engines that are connected, by their ids."""
        return self._sessions

    @property
    def factors(self) -> dict[str, Any]:
        """What must agree with a peer; of the whole engine, once its ranks are known."""
        if self._engine_factors is not None:
            return self._engine_factors
        if self._topology.pp_size == 1:
            return self._factors
        return {name: value for name, value in self._factors.items() if name not in LAYERED}

    def renew(self, local: RankCache) -> None:
        """Take the place of the registered cache by another one, as an engine that wakes up does.

        The generation rises: publish :meth:`metadata` anew, so that peers follow.

        Args:
            local: What the rank holds now, of the same engine and rank.

        Raises:
            ConfigError: The cache is of another engine or rank.
            MemoryBusyError: The memory registered so far is in use, by this rank or by another one
                that was asked to write to it, or digests of it are being taken.
            TransportError: The memory cannot be registered.
        """
        if (local.engine_id, local.rank) != (self._local.engine_id, self._local.rank):
            raise ConfigError(f"{local.where} cannot take the place of {self._local.where}")
        memory = memory_of(local.regions, local.where)
        if len(self._wants):
            raise MemoryBusyError(
                f"{self._local.where}: {len(self._wants)} writes of other engines into its memory "
                "have not ended; finish or give up what is being loaded, and poll, first"
            )
        if self._digester.is_busy:
            raise MemoryBusyError(
                f"{self._local.where}: digests of its memory are being taken; poll until that is "
                "done, and register then"
            )
        self._disconnect_all()  # their plans are bound to the old addresses
        self._transport.unregister(self._local.regions)
        self._leases.revoke_all()  # before the engine uses that memory for anything else
        self._kept.clear()
        self._transport.register(local.regions)
        self._local, self._memory = local, memory
        self._factors = factors_of(local, **self._named)
        self._engine_factors = self._local_engine = None
        self.generation += 1
        self._disconnect_all()  # as is that of a session which was opened meanwhile

    def connect(
        self,
        metadata: Mapping[Rank, HandshakeMetadata],
        *,
        timeout_s: float = 10.0,
        direction: Direction = "read",
    ) -> Session:
        """Pair with a remote engine. May block; see :func:`open_session` for what is raised.

        What is paired already keeps its session; another incarnation of the engine, or a later
        registration of its memory, takes its place. One engine is paired by one thread at a time.

        Args:
            metadata: What every rank of the remote engine published.
            timeout_s: How long each of those ranks may take to answer.
            direction: Whether we read from there, or write to there.

        Raises:
            HandshakeError: This rank has registered other memory meanwhile, too; or what was known
                of the engine was dropped.
        """
        known = None
        for data in metadata.values():
            known = self._sessions.get(data.engine_id)
            start = (data.incarnation, generation_of(metadata))
            if known is not None and (known.incarnation, known.generation) != start:
                self.disconnect(data.engine_id)
                known = None
        if known is not None and direction in known.plans:
            return known
        before = {} if known is None else known.peers
        local = self._local
        session = open_session(
            self._topology,
            local,
            self._transport,
            metadata,
            factors=self.factors,
            local_engine=self._local_engine,
            timeout_s=timeout_s,
            direction=direction,
            known=known,
        )
        if known is None:
            self._sessions[session.engine_id] = session
            self._wants.replaced(session.engine_id, session.incarnation)
        elif self._sessions.get(session.engine_id) is not known:
            for rank in session.peers.keys() - before.keys():
                self._transport.drop_peer(session.peers[rank])
            raise HandshakeError(
                f"engine {session.engine_id!r} was dropped while it was joined; join it again"
            )
        if self._local is not local:  # :meth:`renew` sees the session, or this sees the renewal
            self._drop(session.engine_id)
            raise HandshakeError(
                f"{local.where} registered other memory while engine {session.engine_id!r} was "
                "joined; join it again"
            )
        return session

    def disconnect(self, engine_id: str) -> None:
        """Forget a remote engine.

        Raises:
            UnknownEngineError: It is not connected.
        """
        self._session(engine_id)
        self._drop(engine_id)

    def _drop(self, engine_id: str) -> None:
        """Forget a remote engine, if nobody else does so at this moment."""
        session = self._sessions.pop(engine_id, None)
        if session is not None:
            kept = self._wants.orphan(tuple(session.peers.values()))
            close_session(self._topology, self._transport, session, keep=kept)

    def _disconnect_all(self) -> None:
        for engine_id in list(self._sessions):
            self._drop(engine_id)

    def pull(
        self,
        engine_id: str,
        request_id: str,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable],
        *,
        start_token: int = 0,
        end_token: int,
        timeout_s: float = 30.0,
        lease: Lease | None = None,
        check: CheckMode | None = None,
        address: EngineAddress | None = None,
    ) -> Transfer:
        """Start to read a request's tokens from a remote engine.

        Args:
            engine_id: A connected engine.
            request_id: The request, by the remote engine's name for it.
            local_tables: Where the tokens go.
            remote_tables: Where they are.
            start_token: First token to read.
            end_token: One past the last token to read; an empty range moves nothing.
            timeout_s: When the request fails if it has not ended.
            lease: The remote engine's promise to keep the blocks; without one, nothing shows that
                what arrives is what the request's owner wrote.
            check: Whether what has come is compared with what is there, and how much of it.
            address: Where our engine's handshake server listens; needed for that.

        Raises:
            UnknownEngineError: The engine is not connected.
            ConfigError: The time-out is none.
            BlockTableError: The tables do not cover the range; nothing was started.
        """
        session = self._session(engine_id)
        check_timeout(timeout_s, "timeout_s")
        now_s = self._clock()
        batches = session.plan.lower(
            local_tables, remote_tables, start_token=start_token, end_token=end_token
        )
        transfer = Transfer(session, request_id, now_s, now_s + timeout_s, lease=lease)
        tokens = (start_token, end_token)
        transfer.check = self._check_of(transfer, check, address, local_tables, tokens, lease)
        for batch in batches:
            transfer.sources.append(_source(batch))
            self._submit("read", session, transfer, batch)
        self._live.append(transfer)
        return transfer

    def greet(self, engine_id: str, address: EngineAddress, *, timeout_s: float) -> Transfer:
        """Ask a remote engine whether it can reach this rank, to write what it wants.

        Args:
            engine_id: A connected engine.
            address: Where our engine's handshake server listens.
            timeout_s: How long it may take.

        Raises:
            UnknownEngineError: The engine is not connected.
        """
        session, now_s = self._session(engine_id), self._clock()
        greeting = Transfer(session, "", now_s, now_s + timeout_s, "greeting")
        session.greeting = greeting
        for source in session.plan.sources:
            self._wants.ask(greeting, source.rank, self._wanted(greeting, address))
        self._live.append(greeting)
        return greeting

    def want(
        self,
        engine_id: str,
        request_id: str,
        local_tables: Sequence[BlockTable],
        remote_tables: Sequence[BlockTable] | None,
        *,
        address: EngineAddress,
        start_token: int = 0,
        end_token: int,
        timeout_s: float = 30.0,
        lease: Lease | None = None,
        reads_instead: bool = False,
        check: CheckMode | None = None,
    ) -> Transfer:
        """Ask a remote engine to write a request's tokens here, once they are ready.

        That engine writes only while it keeps the blocks, so no lease has to be looked at. The
        blocks here stay in use until each of its ranks has said that it has written, or will not.

        Args:
            engine_id: A connected engine that has been greeted.
            request_id: The request, by the remote engine's name for it.
            local_tables: Where the tokens go.
            remote_tables: Where they are; what comes is compared with what they hold. None where
                that is not known yet.
            address: Where our engine's handshake server listens.
            start_token: First token to take.
            end_token: One past the last token to take; an empty range moves nothing.
            timeout_s: When the request fails if it has not ended.
            lease: The remote engine's promise to keep the blocks, to be sure that both mean the
                same request.
            reads_instead: Whether the caller will read them, where that engine cannot write: then
                it is not told that they are not needed.
            check: Whether what has come is compared with what is there, and how much of it.

        Raises:
            UnknownEngineError: The engine is not connected.
            ConfigError: The time-out is none.
            BlockTableError: The tables do not cover the range; nothing was started.
        """
        session = self._session(engine_id)
        check_timeout(timeout_s, "timeout_s")
        now_s = self._clock()
        sources: list[tuple[Rank, SourceStats | None]]
        if remote_tables is None:
            sources = [(source.rank, None) for source in session.plan.sources]
        else:
            batches = session.plan.lower(
                local_tables, remote_tables, start_token=start_token, end_token=end_token
            )
            sources = [(batch.remote_rank, _source(batch)) for batch in batches]
        transfer = Transfer(session, request_id, now_s, now_s + timeout_s, "push")
        transfer.reads_instead = reads_instead
        epoch, tokens = None if lease is None else lease.epoch, (start_token, end_token)
        transfer.check = self._check_of(transfer, check, address, local_tables, tokens, lease)
        for rank, source in sources:
            want = self._wanted(transfer, address, local_tables, tokens, epoch)
            self._wants.ask(transfer, rank, want, source)
        self._live.append(transfer)
        return transfer

    def _wanted(
        self,
        transfer: Transfer,
        address: EngineAddress,
        tables: Sequence[BlockTable] = (),
        tokens: tuple[int, int] = (0, 0),
        epoch: int | None = None,
    ) -> Want:
        return Want(
            self._wants.number(),
            transfer.request_id,
            self._local.engine_id,
            self.incarnation,
            self.generation,
            self._local.rank,
            (address.host, address.port),
            blocks_of(tables),
            *tokens,
            timeout_s=transfer.deadline_s - transfer.started_s,
            epoch=epoch,
        )

    def _check_of(
        self,
        transfer: Transfer,
        mode: CheckMode | None,
        address: EngineAddress | None,
        tables: Sequence[BlockTable],
        tokens: tuple[int, int],
        lease: Lease | None,
    ) -> PayloadCheck | None:
        """Return what a transfer is to be checked for.

        Raises:
            ConfigError: Nobody could say where the answer goes.
        """
        if mode is None:
            return None
        if address is None:
            raise ConfigError(
                "a payload check needs the address at which other engines meet this one; pass it, "
                "or set payload_check to 'off'"
            )
        asks = DigestRequest(
            0,
            transfer.request_id,
            self._local.engine_id,
            self.incarnation,
            self.generation,
            self._local.rank,
            (address.host, address.port),
            epoch=None if lease is None else lease.epoch,
        )
        return PayloadCheck(mode, tables, *tokens, asks)

    def digest(self, asks: DigestRequest) -> Future[Values]:
        """Begin to take digests of what a request holds that is held.

        Raises:
            ConfigError: Another promise is meant than that for the request that is held.
        """
        kept = self._kept_under(asks.request_id, asks.epoch)
        return self._digester.start(partial(digests_of, self._local, asks.probes, kept.tables))

    def _kept_under(self, request_id: str, epoch: int | None) -> _Kept:
        """Return what is promised of a request that is held.

        Raises:
            ConfigError: Another promise is meant.
        """
        kept = self._kept[request_id]
        if epoch is not None and (kept.lease is None or kept.lease.epoch != epoch):
            raise ConfigError(
                f"request {request_id!r} is held under another lease than the reader knows"
            )
        return kept

    def give(self, gift: _Gives, want: Want) -> None:
        """Write what a rank of another engine wants; its blocks and ours are held.

        Args:
            gift: Learns of the handles, and of how they end.
            want: What is wanted, of a request that is held.

        Raises:
            UnknownEngineError: The engine is not connected, or not to be written to.
            BlockTableError: The tables do not cover the range, or not all of it has been computed;
                nothing was started.
            ConfigError: Another promise is meant than that for the request that is held.
        """
        session = self._session(want.engine_id)
        kept = self._kept_under(want.request_id, want.epoch)
        if want.end_token > kept.num_tokens:
            raise BlockTableError(
                f"tokens [{want.start_token}, {want.end_token}) are wanted, {kept.num_tokens} have "
                "been computed; give the reader their number as remote_num_tokens"
            )
        batches = session.plan_to("write").lower(
            kept.tables,
            tables_of(want.blocks),
            start_token=want.start_token,
            end_token=want.end_token,
        )
        gift.has_begun = True
        for batch in batches:
            if batch.remote_rank == want.rank:
                gift.nbytes += batch.total_nbytes
                self._submit("write", session, gift, batch)

    def is_busy(self, engine_id: str) -> bool:
        """Whether a transfer with a remote engine has not ended, or is not quiet."""
        peers = {handle.peer for handle in self._transfers}
        session = self._session(engine_id)
        return any(each.session is session for each in (*self._live, *self._untold)) or any(
            peer in peers for peer in session.peers.values()
        )

    def hold(
        self,
        request_id: str,
        lease: Lease | None = None,
        tables: Sequence[BlockTable] = (),
        num_tokens: int = 0,
    ) -> bool:
        """Keep a request's blocks for its readers, and promise it where they can see it.

        Args:
            request_id: The request, by our name for it.
            lease: The promise, the same on all ranks of the engine.
            tables: The blocks, for readers that want them written.
            num_tokens: Tokens that they hold, from the first one on; no more are ever written.

        Returns:
            Whether all readers had reported already, so that the blocks are free at once.
        """
        if self.releases.hold(request_id):
            return True
        if lease is not None:
            self._leases.grant(lease)
        self._kept[request_id] = _Kept(lease, tables, num_tokens)
        return False

    def is_held(self, request_id: str) -> bool:
        """Whether a request's blocks are kept for its readers."""
        return request_id in self._kept

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self._revoke(request_id)
        self.releases.expire(request_id)

    def _revoke(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.lease is not None:
            self._leases.revoke(kept.lease)

    def decline(self, engine_id: str, request_id: str) -> None:
        """Tell a remote engine that this rank needs nothing of a request.

        Args:
            engine_id: A connected engine.
            request_id: The request, by the remote engine's name for it.

        Raises:
            UnknownEngineError: The engine is not connected.
        """
        self._tell(self._session(engine_id), request_id, ok=True)

    def poll(self) -> AgentPoll:
        """Make progress. Never waits."""
        polled = self._transport.poll()
        for handle, state, reason in polled.finished:
            moves = self._transfers.pop(handle, None)
            if moves is not None:
                moves.settle(handle, state, reason)
        released, asked = [], []
        for sender, payload in polled.notifications:
            match self._read_note(payload):
                case Release() as release if self.releases.report(release):
                    self._revoke(release.request_id)
                    released.append(release.request_id)
                case Given() as given:
                    self._wants.heard(sender, given)
                case Digests() as digests:
                    self._checks.heard(sender, digests)
                case Want() | Withdrawal() | DigestRequest() as note:
                    asked.append((sender, note))
        self._wants.poll()
        self._checks.poll(lambda session: self._sessions.get(session.engine_id) is session)
        return AgentPoll(tuple(self._ended()), tuple(released), tuple(asked))

    @property
    def unasked(self) -> int:
        """Answers to what this rank had not asked for, or knew already."""
        return self._wants.ignored + self._checks.ignored

    @property
    def quarantined(self) -> int:
        """What nobody waits for any more but is not quiet; asked from any thread."""
        moves = list(self._transfers.values())
        transfers = [each for each in moves if isinstance(each, Transfer)]
        handles = sum(1 for each in transfers if each.state is not State.PENDING)
        return handles + sum(len(each.pending) for each in list(self._untold))

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        """Forget every engine and close the transport.

        Returns:
            The regions that are not proven quiet: keep that memory mapped.
        """
        self._digester.close()
        self._leases.revoke_all()  # whoever still reads shall not take it for a success
        written = self._local.regions if len(self._wants) else ()  # by others, for all we know
        self._disconnect_all()
        busy = self._transport.close(timeout_s=timeout_s)
        return (*busy, *(region for region in written if region not in busy))

    def _session(self, engine_id: str) -> Session:
        if engine_id not in self._sessions:
            raise UnknownEngineError(
                f"engine {engine_id!r} is not connected; connected: {sorted(self._sessions)}"
            )
        return self._sessions[engine_id]

    def _submit(self, op: Op, session: Session, moves: _Moves, batch: TransferBatch) -> None:
        peer, there = session.peers[batch.remote_rank], session.memory[batch.remote_rank]
        for part in _parts(batch.nbytes.size, peer.capabilities.descriptors_max):
            nbytes = batch.nbytes[part]
            here = Descriptors(batch.local_address[part], nbytes, *self._memory)
            remote = Descriptors(batch.remote_address[part], nbytes, *there)
            if not self._submit_part(op, session, moves, peer, here, remote):
                return

    def _submit_part(
        self,
        op: Op,
        session: Session,
        moves: _Moves,
        peer: Peer,
        here: Descriptors,
        there: Descriptors,
    ) -> bool:
        """Submit a part of something; False if the transport refuses, which fails it."""
        try:
            handle = self._transport.submit(op, peer, here, there)
        except TransportError as error:
            session.lost |= isinstance(error, PeerLostError)
            moves.fail(str(error), "transport")
            return False
        moves.pending.add(handle)
        self._transfers[handle] = moves
        return True

    def _ended(self) -> Iterator[Transfer]:
        """End the transfers that are quiet or late, and tell the producer of each."""
        now_s = self._clock()
        for transfer in list(self._live):
            if transfer.kind == "push" and transfer.reason and not transfer.quiet:
                self._wants.withdraw(transfer)  # the rest is of no use
            if not transfer.quiet and now_s < transfer.deadline_s:
                continue
            if transfer.quiet and not transfer.reason and self._is_open(transfer, now_s):
                continue
            if not transfer.quiet:
                self._give_up(transfer, now_s)
            transfer.end(now_s)
            self._live.remove(transfer)
            if transfer.kind != "greeting":
                if not transfer.must_be_read:
                    self._untold.append(transfer)
                yield transfer
        self._tell_of_ends()

    def _tell_of_ends(self) -> None:
        """Tell producers of what has ended; those who may still write, only once they do not."""
        for transfer in [each for each in self._untold if each.kind == "pull" or each.quiet]:
            self._untold.remove(transfer)
            self._tell(transfer.session, transfer.request_id, ok=transfer.state is State.DONE)

    def _is_open(self, transfer: Transfer, now_s: float) -> bool:
        """Whether what has come must still be compared, or the word of the lease be looked at.

        Fails what was not kept.
        """
        if self._checks.begin(transfer, self._local):
            return True
        lease = transfer.lease
        if lease is None or transfer.reason:
            return False
        standing = self._standing(transfer, lease)
        if standing == "not yet" and now_s < transfer.deadline_s:
            self._look_at_leases(transfer, lease)
            return True
        if standing != "kept":
            transfer.fail(
                f"engine {transfer.session.engine_id!r} had not kept the blocks of request "
                f"{transfer.request_id!r} until they were read: its lease "
                + ("was over" if standing == "over" else "had not begun"),
                "lease",
            )
        return False

    def _give_up(self, transfer: Transfer, now_s: float) -> None:
        """Fail what is late. It ends by itself, and is quiet only then."""
        cause: Cause = "deadline"
        verb = "reads had not ended" if transfer.kind == "pull" else "ranks had not answered"
        what = f"{len(transfer.pending)} {verb}"
        if transfer.seen is not None:  # all bytes are here, but they prove nothing
            what = f"the lease of request {transfer.request_id!r} had not begun"
            cause = "lease"
        what = self._checks.give_up(transfer) or what
        transfer.fail(f"{what} after {now_s - transfer.started_s:.3g} s", cause)
        if transfer.kind == "pull":
            for handle in transfer.pending:
                if isinstance(handle, Handle):
                    self._transport.abandon(handle)
        else:
            self._wants.withdraw(transfer)

    def _standing(self, transfer: Transfer, lease: Lease) -> Standing:
        """Return what is known of a lease from what the words of all sources said last."""
        if transfer.seen is None:
            return "not yet"
        said = {lease.standing(self._leases.word(at)) for at in transfer.seen}
        worst: tuple[Standing, ...] = ("over", "not yet")
        return next((standing for standing in worst if standing in said), "kept")

    def _look_at_leases(self, transfer: Transfer, lease: Lease) -> None:
        """Read the word of the lease on every rank that bytes came from, after those bytes."""
        session = transfer.session
        transfer.seen = []
        for source in transfer.sources:
            table = session.leases.get(source.rank)
            if table is None:
                transfer.fail(
                    f"rank {source.rank} has no table of leases; upgrade that engine",
                    "incompatible",
                )
                return
            at = self._leases.landing()
            here = np.array([self._leases.address_of(at)], np.uint64)
            there = np.array([table.address + lease.slot * WORD_NBYTES], np.uint64)
            nbytes = np.array([WORD_NBYTES], np.uint64)
            transfer.seen.append(at)
            pieces = (Descriptors(here, nbytes), Descriptors(there, nbytes))
            self._submit_part("read", session, transfer, session.peers[source.rank], *pieces)

    def _tell(self, session: Session, request_id: str, *, ok: bool) -> None:
        for rank in told_by(session.plan):  # and no rank that we only give to
            release = Release(
                request_id=request_id,
                engine_id=self._local.engine_id,
                incarnation=self.incarnation,
                rank=self._local.rank,
                readers=session.plan.readers[rank],
                ok=ok,
            )
            self._notify(session.peers[rank], encode(release))

    def _notify(self, peer: Peer, payload: bytes) -> bool:
        """Send a note; whether that could be done."""
        try:
            self._transport.notify(peer, payload)
        except TransportError:
            # A producer that is gone needs no telling; one that lives frees by its own deadline.
            self.unsent += 1
            return False
        return True

    def peer_named(self, agent: str) -> Peer | None:
        """Return a connected rank by the name of its agent."""
        sessions = list(self._sessions.values())  # others may be joined meanwhile
        peers = (peer for session in sessions for peer in session.peers.values())
        return next((peer for peer in peers if peer.agent == agent), None)

    def tell(self, peer: Peer, answer: Given | Digests) -> bool:
        """Tell a rank what has become of what it asked for; whether that could be done."""
        return self._notify(peer, encode(answer))

    def _read_note(self, payload: bytes) -> Note | None:
        try:
            return decode_note(payload)
        except HandshakeError:
            self.unreadable += 1
            return None


def _source(batch: TransferBatch) -> SourceStats:
    return SourceStats(batch.remote_rank, batch.total_nbytes, batch.piece_count, batch.nbytes.size)


def _parts(count: int, most: int) -> Iterator[slice]:
    """Cut a list of pieces into parts that one operation takes; 0 means no limit."""
    step = most or max(count, 1)
    for start in np.arange(0, count, step).tolist():
        yield slice(start, start + step)
