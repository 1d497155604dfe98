"""This rank among others: its memory, the engines it knows, the requests on their way."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from kvbridge.config import check_timeout
from kvbridge.errors import MemoryBusyError
from kvbridge.handshake import EngineAddress, HandshakeMetadata
from kvbridge.handshake.digests import DigestRequest, Digests
from kvbridge.handshake.messages import Given, Packed, Release, Want, Withdrawal
from kvbridge.model import Rank, RankCache, TransferTopology
from kvbridge.plan import BlockTable, TransferBatch, digests_of
from kvbridge.plan.values import Direction
from kvbridge.session.asking import Portion, check_of, tables_of, want_of
from kvbridge.session.beside import Beside
from kvbridge.session.computed import Event
from kvbridge.session.digesting import TAKING, Values
from kvbridge.session.kept import Kept
from kvbridge.session.leases import Lease, LeaseTable
from kvbridge.session.live import LiveTransfers
from kvbridge.session.local_rank import LocalRank
from kvbridge.session.notes import Notes
from kvbridge.session.operations import Operations
from kvbridge.session.packing import PackedPart, Packing, Packs, streams_of
from kvbridge.session.pairings import Pairings
from kvbridge.session.payload import Checks
from kvbridge.session.portions import Portions
from kvbridge.session.proofs import Proofs
from kvbridge.session.questions import CheckMode
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.session import Session
from kvbridge.session.staging import STAGING_NBYTES, Staging
from kvbridge.session.transfer import SourceStats, Transfer
from kvbridge.session.wants import Wants
from kvbridge.transport import Peer, Region, Transport


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


class _Gives(Packs, Protocol):
    """What is written for a reader; see :class:`~kvbridge.session.gifts.Gift`.

    Attributes:
        end_token: One past the last token of what has been submitted.
    """

    end_token: int

    def goes_on(self, attempt: int) -> bool:
        """Whether more can be submitted; begins again if the blocks were taken away meanwhile."""


class RankAgent:
    """One rank of an engine, able to give and to take.

    Calls come from one thread, except :meth:`connect`, which may block and may run beside the
    others. Everything else returns at once; :meth:`poll` makes progress.

    Attributes:
        releases: Which readers are done with what is kept for them.
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
        staging_nbytes: int = STAGING_NBYTES,
        takes: bool = False,
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
            digesting: Where digests are taken, and what is staged is put in its place; a thread of
                its own, once there is something to do, if not given. Shut down at the end.
            staging_nbytes: Memory for loads that are staged, made once there is one; as much is
                made where cells are packed for others. 0 for none.
            takes: Whether others may be asked to write packed cells here; then the memory for that
                is made at once, since they have to know where it is.

        Raises:
            ConfigError: The cache is of another engine, or the model has no name.
            UnsupportedLayoutError: The cache lies in several kinds of memory.
            TransportError: The memory cannot be registered.
        """
        self._transport, self._clock, self._gives, self._takes = transport, clock, gives, takes
        self._has_cache = True
        self._local = LocalRank(
            topology,
            local,
            incarnation=incarnation,
            model=model,
            revision=revision,
            transport=transport.name,
            draft_layers=draft_layers,
        )
        self._wants = Wants(transport.notify, transport.drop_peer, self.peer_named, clock)
        self._pairings = Pairings(topology, self._local, transport, self._wants)
        self._operations = Operations(transport, self._local)
        self._beside = Beside(digesting)
        self._staging = Staging(transport, self._local, staging_nbytes)
        self._portions = Portions(self._local, self._operations, self._beside, self._staging, clock)
        self._packed = Staging(transport, self._local, staging_nbytes if gives else 0)
        self._packing = Packing(self._local, self._operations, self._beside, self._packed)
        self._checks = Checks(transport.notify, self._beside, clock)
        self._notes = Notes(transport, self._local)
        self._leases = LeaseTable()
        proofs = Proofs(self._leases, self._operations)
        self._live = LiveTransfers(
            self._local,
            self._operations,
            self._wants,
            proofs,
            self._checks,
            self._notes,
            portions=self._portions,
        )
        self.releases = ReleaseBook(clock)
        self._kept = Kept(self._leases, self.releases)
        transport.register((*local.regions, self._leases.region))
        if takes:
            self._staging.open()

    def metadata(self) -> HandshakeMetadata:
        """Return what this rank publishes."""
        return self._local.metadata(
            self._transport.agent_info(),
            self._leases.region,
            gives=self._gives,
            staging=self._staging.region,
            packs_nbytes=self._packing.most_nbytes,
        )

    def share_engine(self, metadata: Mapping[Rank, HandshakeMetadata]) -> None:
        """Take what all ranks of our own engine published, once the engine has gathered it.

        Without it an even split is assumed, which an engine of several stages does not have.

        Raises:
            HandshakeError: The metadata cannot be read.
        """
        self._local.share(metadata)

    @property
    def incarnation(self) -> str:
        """Fresh at every start of the engine, the same for its ranks."""
        return self._local.incarnation

    @property
    def generation(self) -> int:
        """How often the memory has been registered."""
        return self._local.generation

    @property
    def where(self) -> str:
        """The rank in words."""
        return self._local.cache.where

    @property
    def has_cache(self) -> bool:
        """Whether there is memory to load into, and to read from."""
        return self._has_cache

    @property
    def engine_id(self) -> str:
        """The engine that this rank is of."""
        return self._local.cache.engine_id

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
        return self._pairings.sessions

    @property
    def factors(self) -> dict[str, Any]:
        """What must agree with a peer; of the whole engine, once its ranks are known."""
        return self._local.factors

    @property
    def unreadable(self) -> int:
        """Notifications that could not be read."""
        return self._notes.unreadable

    @property
    def unsent(self) -> int:
        """Notifications that could not be sent."""
        return self._notes.unsent

    def renew(self, local: RankCache) -> None:
        """Take the place of the registered cache by another one, as an engine that wakes up does.

        The generation rises: publish :meth:`metadata` anew, so that peers follow.

        Args:
            local: What the rank holds now, of the same engine and rank.

        Raises:
            ConfigError: The cache is of another engine or rank.
            MemoryBusyError: The memory registered so far is in use; see :meth:`release`.
            TransportError: The memory cannot be registered; then there is none.
        """
        memory = self._local.memory_of_next(local)
        self.release()
        self._transport.register(local.regions)
        self._local.renew(local, memory)
        self._has_cache = True
        if self._takes:
            self._staging.open()
        self._pairings.disconnect_all()  # sessions opened meanwhile are bound to other addresses

    def release(self) -> None:
        """Take the registered cache out of the transport, before its memory is freed. Idempotent.

        What was promised of it is over. Other ranks can still be answered, but nothing may be
        loaded before :meth:`renew`.

        Raises:
            MemoryBusyError: The memory is in use, by this rank or by another one that was asked to
                write to it, or digests of it are being taken, or what has been read for it is
                staged.
        """
        if not self._has_cache:
            return
        before = self._local.cache
        if len(self._wants):
            raise MemoryBusyError(
                f"{before.where}: {len(self._wants)} writes of other engines into its memory "
                "have not ended; finish or give up what is being loaded, and poll, first"
            )
        if len(self._portions):  # their reads are not seen to use the cache, but will change it
            raise MemoryBusyError(
                f"{before.where}: {len(self._portions)} portions of loads are still to be put into "
                "its memory; finish or give up what is being loaded, and poll, first"
            )
        if len(self._packing):
            raise MemoryBusyError(
                f"{before.where}: {len(self._packing)} parts of its memory are being packed and "
                "written for others; poll until that is done, and try again then"
            )
        if self._beside.is_busy:
            raise MemoryBusyError(
                f"{before.where}: digests of its memory are being taken; poll until that is "
                "done, and try again then"
            )
        self._pairings.disconnect_all()  # their plans are bound to its addresses
        pools = (self._staging, self._packed)
        self._transport.unregister(
            (*before.regions, *(region for pool in pools for region in pool.regions))
        )
        for pool in pools:
            pool.forget()
        self._kept.clear()  # before the engine uses that memory for anything else
        self._has_cache = False

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
        return self._pairings.connect(metadata, timeout_s=timeout_s, direction=direction)

    def disconnect(self, engine_id: str) -> None:
        """Forget a remote engine.

        Raises:
            UnknownEngineError: It is not connected.
        """
        self._pairings.disconnect(engine_id)

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
        session = self._pairings.session(engine_id)
        check_timeout(timeout_s, "timeout_s")
        now_s = self._clock()
        portions = self._portions.of(session, local_tables, remote_tables, start_token, end_token)
        batches: list[TransferBatch] = []
        if portions is None:
            batches = session.plan.lower(
                local_tables, remote_tables, start_token=start_token, end_token=end_token
            )
        transfer = Transfer(session, request_id, now_s, now_s + timeout_s, lease=lease)
        portion = Portion(local_tables, start_token, end_token, lease)
        transfer.check = check_of(self._local, transfer, check, address, portion)
        for batch in batches:
            transfer.reads(batch)
            self._operations.submit("read", session, transfer, batch)
        self._portions.start(transfer, portions or ())
        self._live.add(transfer)
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
        session, now_s = self._pairings.session(engine_id), self._clock()
        greeting = Transfer(session, "", now_s, now_s + timeout_s, "greeting")
        session.greeting = greeting
        for source in session.plan.sources:
            want = want_of(self._local, self._wants.number(), greeting, address, Portion())
            self._wants.ask(greeting, source.rank, want)
        self._live.add(greeting)
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
        tokens_digest: str = "",
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
            tokens_digest: What tells the first ``end_token`` tokens of the request from others, see
                :func:`~kvbridge.session.digest_of_tokens`; nothing is written of others.

        Raises:
            UnknownEngineError: The engine is not connected.
            ConfigError: The time-out is none.
            BlockTableError: The tables do not cover the range; nothing was started.
        """
        session = self._pairings.session(engine_id)
        check_timeout(timeout_s, "timeout_s")
        now_s = self._clock()
        transfer = Transfer(session, request_id, now_s, now_s + timeout_s, "push")
        transfer.reads_instead = reads_instead
        portion = Portion(local_tables, start_token, end_token, lease, tokens_digest)
        transfer.check = check_of(self._local, transfer, check, address, portion)
        # Without a lease nothing tells parts of one request from those of another.
        if remote_tables is not None and lease is not None and self.packs(engine_id):
            find = partial(self._packed_parts, transfer, address, portion, remote_tables)
            self._portions.start_later(transfer, find, "finding what is to be packed")
            self._live.add(transfer)
            return transfer
        sources: list[tuple[Rank, SourceStats | None]]
        if remote_tables is None:
            sources = [(source.rank, None) for source in session.plan.sources]
        else:
            batches = session.plan.lower(
                local_tables, remote_tables, start_token=start_token, end_token=end_token
            )
            sources = [(batch.remote_rank, SourceStats.of(batch)) for batch in batches]
        for rank, source in sources:
            want = want_of(self._local, self._wants.number(), transfer, address, portion)
            self._wants.ask(transfer, rank, want, source)
        self._live.add(transfer)
        return transfer

    def _packed_parts(
        self,
        transfer: Transfer,
        address: EngineAddress,
        portion: Portion,
        remote_tables: Sequence[BlockTable],
    ) -> list[PackedPart]:
        """Return what is asked for, part by part; from any thread."""
        session, tokens = transfer.session, (portion.start_token, portion.end_token)
        most_nbytes = min(session.packs_nbytes, self._portions.aim_nbytes)

        whole = want_of(self._local, 0, transfer, address, portion)

        def want(packed: Packed) -> Want:
            return replace(whole, number=self._wants.number(), packed=packed)

        found = streams_of(session.plan, portion.tables, remote_tables, *tokens)
        return [
            PackedPart(self._wants, want, rank, stream, start, stop)
            for rank, stream in found.items()
            for start, stop in stream.cut(most_nbytes)
        ]

    def cancel(self, transfer: Transfer, reason: str) -> None:
        """Go on no further with a transfer; the producer is told as soon as that is possible.

        The next :meth:`poll` ends it as failed, unless it has ended before. As after its deadline,
        its blocks must not be used for anything else until it is quiet.

        Args:
            transfer: One of this rank.
            reason: Why nobody wants it any more.
        """
        self._live.cancel(transfer, reason, self._clock())

    def digest(self, asks: DigestRequest) -> Future[Values]:
        """Begin to take digests of what a request holds that is held.

        Raises:
            ConfigError: Another promise is meant than that for the request that is held.
        """
        tables = self._kept.tables(asks.request_id, asks.epoch)
        work = partial(digests_of, self._local.cache, asks.probes, tables)
        return self._beside.start(work, TAKING)

    def give(self, gift: _Gives, want: Want) -> None:
        """Write what is there of what a rank of another engine wants, and was not written before.

        Args:
            gift: Learns of the handles, and of how they end.
            want: What is wanted, of a request that is held, or being computed.

        Raises:
            UnknownEngineError: The engine is not connected, or not to be written to.
            BlockTableError: The tables do not cover the range, or the request has finished with
                fewer tokens; nothing was started.
            ConfigError: Another promise is meant than that for the request that is held.
        """
        session = self._pairings.session(want.engine_id)
        ready = self._kept.ready_for(want)
        if ready is None or not gift.goes_on(ready.attempt):
            return
        if want.packed is not None:
            self._packing.give(gift, session, want, ready)
            return
        start_token = max(gift.end_token, want.start_token)
        if ready.end_token > start_token:
            batches = session.plan_to("write").lower(
                ready.tables,
                tables_of(want.blocks),
                start_token=start_token,
                end_token=ready.end_token,
            )
            gift.has_begun, gift.end_token = True, ready.end_token
            for batch in batches:
                if batch.remote_rank == want.rank:
                    gift.nbytes += batch.total_nbytes
                    self._operations.submit("write", session, gift, batch)
        gift.is_whole = ready.is_all

    def is_busy(self, engine_id: str) -> bool:
        """Whether a transfer with a remote engine has not ended, or is not quiet."""
        session = self._pairings.session(engine_id)
        return self._live.are_with(session) or self._operations.reach(session.peers.values())

    def hold(
        self,
        request_id: str,
        lease: Lease | None = None,
        tables: Sequence[BlockTable] = (),
        num_tokens: int = 0,
        ids: bytes = b"",
    ) -> bool:
        """Keep a request's blocks for its readers, and promise it where they can see it.

        Args:
            request_id: The request, by our name for it.
            lease: The promise, the same on all ranks of the engine.
            tables: The blocks, for readers that want them written.
            num_tokens: Tokens that they hold, from the first one on; no more are ever written.
            ids: Those of the tokens, see :func:`~kvbridge.session.ids_of_tokens`, for
                readers that have only a name of the request; empty if they are not known.

        Returns:
            Whether the blocks are free at once: all readers had reported already, or the memory
            that they were in has been taken back.
        """
        if not self._has_cache:
            self._kept.refuse(request_id, lease)
            return True
        return self._kept.hold(request_id, lease, tables, num_tokens, ids)

    def compute(
        self,
        request_id: str,
        tables: Sequence[BlockTable],
        num_tokens: int,
        event: Event | None = None,
    ) -> None:
        """Take note of what is there of a request that has not finished, for who waits for it.

        Nothing is, of what was computed into memory that has been taken back since.

        Args:
            request_id: The request, by our name for it.
            tables: Its blocks so far.
            num_tokens: Tokens that they hold, from the first one on.
            event: When that is so; now, if not given.
        """
        if self._has_cache:
            self._kept.computed.grow(request_id, tables, num_tokens, event)

    def take_away(self, request_id: str) -> None:
        """Take note that a request that has not finished has lost its blocks."""
        self._kept.computed.take_away(request_id)

    def is_held(self, request_id: str) -> bool:
        """Whether a request's blocks are kept for its readers."""
        return request_id in self._kept

    def attempt_of(self, request_id: str) -> int:
        """Return in which attempt a held request's blocks were filled: no other has its number."""
        return self._kept.attempt(request_id)

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self._kept.expire(request_id)

    def decline(self, engine_id: str, request_id: str) -> None:
        """Tell a remote engine that this rank needs nothing of a request.

        Args:
            engine_id: A connected engine.
            request_id: The request, by the remote engine's name for it.

        Raises:
            UnknownEngineError: The engine is not connected.
        """
        self._notes.release(self._pairings.session(engine_id), request_id, ok=True)

    def poll(self) -> AgentPoll:
        """Make progress. Never waits."""
        polled = self._transport.poll()
        self._operations.settle(polled.finished)
        released, asked = [], []
        for sender, payload in polled.notifications:
            match self._notes.read(payload):
                case Release() as release if self._kept.report(release):
                    released.append(release.request_id)
                case Given() as given:
                    self._wants.heard(sender, given)
                case Digests() as digests:
                    self._checks.heard(sender, digests)
                case Want() | Withdrawal() | DigestRequest() as note:
                    asked.append((sender, note))
        self._wants.poll()
        self._portions.poll()
        self._packing.poll()
        self._checks.poll(self._pairings.is_current)
        return AgentPoll(tuple(self._live.ended(self._clock())), tuple(released), tuple(asked))

    @property
    def unasked(self) -> int:
        """Answers to what this rank had not asked for, or knew already."""
        return self._wants.ignored + self._checks.ignored

    @property
    def quarantined(self) -> int:
        """What nobody waits for any more but is not quiet; asked from any thread."""
        return self._live.quarantined

    def stages(self, engine_id: str) -> bool:
        """Whether it takes less to read whole pages of a remote engine than what it would write.

        Raises:
            UnknownEngineError: The engine is not connected.
        """
        session = self._pairings.session(engine_id)
        is_packed = self.packs(engine_id) and session.plan.is_packed_rather_than_staged
        return self._portions.are_possible(session) and not is_packed

    def packs(self, engine_id: str) -> bool:
        """Whether what a remote engine writes here is packed by it.

        Raises:
            UnknownEngineError: The engine is not connected.
        """
        session = self._pairings.session(engine_id)
        return bool(self._takes and self._staging.regions and session.packs_nbytes)

    @property
    def staged_nbytes(self) -> int:
        """Bytes of staging memory that are in use; asked from any thread."""
        return self._staging.used_nbytes + self._packed.used_nbytes

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        """Forget every engine and close the transport.

        Returns:
            The regions that are not proven quiet: keep that memory mapped. Of staging memory the
            agent does so itself.
        """
        self._beside.close()
        self._portions.close()
        self._leases.revoke_all()  # whoever still reads shall not take it for a success
        # Others may still write there, for all we know.
        asked = len(self._wants) > 0
        written = self._local.cache.regions if asked else ()
        packed = self._staging.regions if asked else ()
        self._pairings.disconnect_all()
        busy = self._transport.close(timeout_s=timeout_s)
        self._staging.close((*busy, *packed))
        self._packed.close(busy)
        return (*busy, *(region for region in written if region not in busy))

    def peer_named(self, agent: str) -> Peer | None:
        """Return a connected rank by the name of its agent."""
        return self._pairings.peer_named(agent)

    def tell(self, peer: Peer, answer: Given | Digests) -> bool:
        """Tell a rank what has become of what it asked for; whether that could be done."""
        return self._notes.send(peer, answer)
