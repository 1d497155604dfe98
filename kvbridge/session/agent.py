"""This rank among others: its memory, the engines it knows, the requests on their way."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbridge.config import check_timeout
from kvbridge.errors import (
    ConfigError,
    HandshakeError,
    PeerLostError,
    TransportError,
    UnknownEngineError,
)
from kvbridge.handshake import (
    HandshakeMetadata,
    RankPayload,
    Release,
    engine_factors,
    factors_of,
)
from kvbridge.handshake.compatibility import LAYERED
from kvbridge.handshake.messages import decode_release
from kvbridge.handshake.metadata import decode_factors, seal
from kvbridge.handshake.wire import encode
from kvbridge.model import Rank, RankCache, TransferTopology
from kvbridge.plan import BlockTable, TransferBatch
from kvbridge.session.causes import Cause
from kvbridge.session.leases import WORD_NBYTES, Lease, LeaseTable, Standing
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.session import (
    Session,
    body_of,
    close_session,
    generation_of,
    memory_of,
    open_session,
)
from kvbridge.session.transfer import SourceStats, Transfer
from kvbridge.transport import Descriptors, Handle, Peer, Region, State, Transport


class AgentPoll(NamedTuple):
    """What ended since the last poll; each entry is reported once."""

    finished: tuple[Transfer, ...] = ()
    released: tuple[str, ...] = ()


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
        clock: Callable[[], float] = time.monotonic,
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
            clock: Seconds that never run backwards.

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
        self._clock = clock
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
        self._transfers: dict[Handle, Transfer] = {}
        self._live: list[Transfer] = []
        self.releases = ReleaseBook(clock)
        self._leases = LeaseTable()
        self._granted: dict[str, Lease] = {}
        self.unreadable = 0
        self.unsent = 0
        transport.register((*local.regions, self._leases.region))

    def metadata(self) -> HandshakeMetadata:
        """Return what this rank publishes."""
        info = self._transport.agent_info()
        payload = RankPayload(self._local, info, self._leases.region)
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
            MemoryBusyError: The memory registered so far is in use.
            TransportError: The memory cannot be registered.
        """
        if (local.engine_id, local.rank) != (self._local.engine_id, self._local.rank):
            raise ConfigError(f"{local.where} cannot take the place of {self._local.where}")
        memory = memory_of(local.regions, local.where)
        self._disconnect_all()  # their plans are bound to the old addresses
        self._transport.unregister(self._local.regions)
        self._leases.revoke_all()  # before the engine uses that memory for anything else
        self._granted.clear()
        self._transport.register(local.regions)
        self._local, self._memory = local, memory
        self._factors = factors_of(local, **self._named)
        self._engine_factors = self._local_engine = None
        self.generation += 1
        self._disconnect_all()  # as is that of a session which was opened meanwhile

    def connect(
        self, metadata: Mapping[Rank, HandshakeMetadata], *, timeout_s: float = 10.0
    ) -> Session:
        """Pair with a remote engine. May block; see :func:`open_session` for what is raised.

        What is paired already keeps its session; another incarnation of the engine, or a later
        registration of its memory, takes its place.

        Raises:
            HandshakeError: This rank has registered other memory meanwhile, too.
        """
        for data in metadata.values():
            known = self._sessions.get(data.engine_id)
            if known is None:
                continue
            if (known.incarnation, known.generation) == (
                data.incarnation,
                generation_of(metadata),
            ):
                return known
            self.disconnect(data.engine_id)
        local = self._local
        session = open_session(
            self._topology,
            local,
            self._transport,
            metadata,
            factors=self.factors,
            local_engine=self._local_engine,
            timeout_s=timeout_s,
        )
        self._sessions[session.engine_id] = session
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
            close_session(self._topology, self._transport, session)

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
        for batch in batches:
            self._submit(session, transfer, batch)
        self._live.append(transfer)
        return transfer

    def is_busy(self, engine_id: str) -> bool:
        """Whether a transfer with a remote engine has not ended, or is not quiet."""
        transfers = {*self._live, *self._transfers.values()}
        return any(each.session.engine_id == engine_id for each in transfers)

    def hold(self, request_id: str, lease: Lease | None = None) -> bool:
        """Keep a request's blocks for its readers, and promise it where they can see it.

        Args:
            request_id: The request, by our name for it.
            lease: The promise, the same on all ranks of the engine.

        Returns:
            Whether all readers had reported already, so that the blocks are free at once.
        """
        if self.releases.hold(request_id):
            return True
        if lease is not None:
            self._leases.grant(lease)
            self._granted[request_id] = lease
        return False

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self._revoke(request_id)
        self.releases.expire(request_id)

    def _revoke(self, request_id: str) -> None:
        lease = self._granted.pop(request_id, None)
        if lease is not None:
            self._leases.revoke(lease)

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
            transfer = self._transfers.pop(handle, None)
            if transfer is not None:
                transfer.settle(handle, state, reason)
        released = tuple(
            request_id for _, payload in polled.notifications for request_id in self._heard(payload)
        )
        return AgentPoll(tuple(self._ended()), released)

    @property
    def quarantined(self) -> int:
        """Handles that nobody waits for any more but that are not quiet; asked from any thread."""
        transfers = list(self._transfers.values())
        return sum(1 for transfer in transfers if transfer.state is not State.PENDING)

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        """Forget every engine and close the transport.

        Returns:
            The regions that are not proven quiet: keep that memory mapped.
        """
        self._leases.revoke_all()  # whoever still reads shall not take it for a success
        self._disconnect_all()
        return self._transport.close(timeout_s=timeout_s)

    def _session(self, engine_id: str) -> Session:
        if engine_id not in self._sessions:
            raise UnknownEngineError(
                f"engine {engine_id!r} is not connected; connected: {sorted(self._sessions)}"
            )
        return self._sessions[engine_id]

    def _submit(self, session: Session, transfer: Transfer, batch: TransferBatch) -> None:
        peer = session.peers[batch.remote_rank]
        transfer.sources.append(
            SourceStats(batch.remote_rank, batch.total_nbytes, batch.piece_count, batch.nbytes.size)
        )
        there = session.memory[batch.remote_rank]
        for part in _parts(batch.nbytes.size, peer.capabilities.descriptors_max):
            nbytes = batch.nbytes[part]
            here = Descriptors(batch.local_address[part], nbytes, *self._memory)
            remote = Descriptors(batch.remote_address[part], nbytes, *there)
            if not self._read(transfer, batch.remote_rank, here, remote):
                return

    def _read(self, transfer: Transfer, rank: Rank, here: Descriptors, there: Descriptors) -> bool:
        """Submit a read of a transfer; False if the transport refuses, which fails it."""
        session = transfer.session
        try:
            handle = self._transport.submit("read", session.peers[rank], here, there)
        except TransportError as error:
            session.lost |= isinstance(error, PeerLostError)
            transfer.fail(str(error), "transport")
            return False
        transfer.pending.add(handle)
        self._transfers[handle] = transfer
        return True

    def _ended(self) -> Iterator[Transfer]:
        """End the transfers that are quiet or late, and tell the producer of each."""
        now_s = self._clock()
        for transfer in list(self._live):
            if not transfer.quiet and now_s < transfer.deadline_s:
                continue
            if transfer.quiet and not transfer.reason and transfer.lease is not None:
                standing = self._standing(transfer, transfer.lease)
                if standing == "not yet" and now_s < transfer.deadline_s:
                    self._look_at_leases(transfer, transfer.lease)
                    continue
                if standing != "kept":
                    transfer.fail(
                        f"engine {transfer.session.engine_id!r} had not kept the blocks of request "
                        f"{transfer.request_id!r} until they were read: its lease "
                        + ("was over" if standing == "over" else "had not begun"),
                        "lease",
                    )
            if not transfer.quiet:
                cause: Cause = "deadline"
                what = f"{len(transfer.pending)} reads had not ended"
                if transfer.seen is not None:  # all bytes are here, but they prove nothing
                    what = f"the lease of request {transfer.request_id!r} had not begun"
                    cause = "lease"
                transfer.fail(f"{what} after {now_s - transfer.started_s:.3g} s", cause)
                for handle in transfer.pending:
                    self._transport.abandon(handle)
            transfer.end(now_s)
            self._live.remove(transfer)
            self._tell(transfer.session, transfer.request_id, ok=transfer.state is State.DONE)
            yield transfer

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
            self._read(transfer, source.rank, Descriptors(here, nbytes), Descriptors(there, nbytes))

    def _tell(self, session: Session, request_id: str, *, ok: bool) -> None:
        for rank, peer in session.peers.items():
            release = Release(
                request_id=request_id,
                engine_id=self._local.engine_id,
                incarnation=self.incarnation,
                rank=self._local.rank,
                readers=session.plan.readers[rank],
                ok=ok,
            )
            self._notify(peer, encode(release))

    def _notify(self, peer: Peer, payload: bytes) -> None:
        try:
            self._transport.notify(peer, payload)
        except TransportError:
            # A producer that is gone needs no telling; one that lives frees by its own deadline.
            self.unsent += 1

    def _heard(self, payload: bytes) -> Iterator[str]:
        try:
            release = decode_release(payload)
        except HandshakeError:
            self.unreadable += 1
            return
        if self.releases.report(release):
            self._revoke(release.request_id)
            yield release.request_id


def _parts(count: int, most: int) -> Iterator[slice]:
    """Cut a list of pieces into parts that one operation takes; 0 means no limit."""
    step = most or max(count, 1)
    for start in np.arange(0, count, step).tolist():
        yield slice(start, start + step)
