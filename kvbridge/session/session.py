"""The live pairing of this rank with one incarnation of a remote engine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbridge.errors import (
    HandshakeError,
    TopologyConflictError,
    UnknownEngineError,
    UnsupportedLayoutError,
)
from kvbridge.handshake import (
    HandshakeMetadata,
    RankPayload,
    check_compatible,
    engine_factors,
    gather_handshake_metadata,
)
from kvbridge.handshake.metadata import decode_body, decode_factors, open_envelope
from kvbridge.handshake.wire import WIRE
from kvbridge.model import Rank, RankCache, Region, TransferTopology, transfer_infos
from kvbridge.plan import EngineTransferPlan, generate_engine_transfer_plan
from kvbridge.plan.values import Direction
from kvbridge.session.transfer import Transfer
from kvbridge.transport import Peer, Transport


@dataclass(slots=True, eq=False)
class Session:
    """What is needed to move requests between this rank and a remote engine.

    Attributes:
        engine_id: The remote engine.
        incarnation: Which start of it.
        generation: Which registration of its memory, of all its ranks together.
        generations: The same of each rank: they may have registered their memory not equally often.
        plans: What is exchanged, bound to both engines' addresses: what we take from there by
            ``"read"``, what we give to there by ``"write"``; each once it is needed.
        peers: The remote ranks to talk to.
        memory: Memory kind and device of each of those ranks' caches.
        leases: Where each of those ranks has its table of leases.
        gives: Whether those ranks write what others ask for.
        digests: Whether those ranks can say what their blocks hold.
        answers: Whether one of them has done so.
        mute_s: Clock before which they are not asked for samples: they did not answer.
        lost: Whether one of those ranks could not be reached.
        greeting: Whether those ranks can reach us; None until they have been asked.
        is_staged: Whether what we take from there is cheaper to read in whole pages.
        packs_nbytes: The longest part of what we take from there that all those ranks pack for us,
            if that is cheaper than to have each cell written to its place; 0 if it is not.
    """

    engine_id: str
    incarnation: str
    generation: int
    generations: Mapping[Rank, int] = field(default_factory=dict)
    plans: dict[Direction, EngineTransferPlan] = field(default_factory=dict)
    peers: Mapping[Rank, Peer] = field(default_factory=dict)
    memory: Mapping[Rank, tuple[str, int]] = field(default_factory=dict)
    leases: Mapping[Rank, Region] = field(default_factory=dict)
    gives: bool = False
    digests: bool = False
    answers: bool = False
    mute_s: float = 0.0
    lost: bool = False
    greeting: Transfer | None = None
    is_staged: bool = False
    packs_nbytes: int = 0

    @property
    def plan(self) -> EngineTransferPlan:
        """What this rank takes from that engine.

        Raises:
            UnknownEngineError: It was met only to give something to it.
        """
        return self.plan_to("read")

    def plan_to(self, direction: Direction) -> EngineTransferPlan:
        """Return the plan for a direction.

        Raises:
            UnknownEngineError: The engine was met for the other direction only.
        """
        plan = self.plans.get(direction)
        if plan is None:
            raise UnknownEngineError(
                f"engine {self.engine_id!r} was not met to {direction} from or to it, only to "
                f"{' and '.join(self.plans)}; connect with direction={direction!r} first"
            )
        return plan


def told_by(plan: EngineTransferPlan) -> list[Rank]:
    """Return the ranks of the other engine that this rank has to do with."""
    return sorted({*(source.rank for source in plan.sources), *plan.notify_only})


def open_session(
    topology: TransferTopology,
    local: RankCache,
    transport: Transport,
    metadata: Mapping[Rank, HandshakeMetadata],
    *,
    factors: Mapping[str, Any],
    local_engine: Mapping[Rank, RankCache] | None,
    timeout_s: float,
    direction: Direction = "read",
    known: Session | None = None,
) -> Session:
    """Pair this rank with a remote engine; a failure anywhere leaves nothing behind.

    Factors are compared first, then bodies decoded, then the plan is made and checked, and only
    then peers are added and the engine is registered in the topology.

    Args:
        topology: The local rank; learns of the remote engine.
        local: What the local rank holds.
        transport: Moves the bytes.
        metadata: What every rank of the remote engine published.
        factors: Ours, to compare with theirs.
        local_engine: Every rank of our engine, see ``generate_engine_transfer_plan``.
        timeout_s: How long each peer may take to answer.
        direction: Whether we read from there, or write to there.
        known: The session with the same start of the engine and the same registration of its
            memory, where only this direction is new: it learns of it.

    Raises:
        HandshakeError: The metadata is malformed or contradictory.
        IncompatibleError: The engines differ in a factor.
        PlanError: The engines' caches do not fit together.
        TransportError: A peer cannot be reached.
        TopologyConflictError: The engine is paired already, or carries our own id.
    """
    bodies = compatible_bodies(metadata, factors)
    first = next(iter(metadata.values()))
    if known is None and first.engine_id in topology.remote_engines:
        raise TopologyConflictError(
            f"engine {first.engine_id!r} is paired already; close its session first"
        )
    caches = {rank: body.cache for rank, body in bodies.items()}
    plan = generate_engine_transfer_plan(
        topology, local, caches, local_engine=local_engine, direction=direction
    )
    session = known or Session(
        first.engine_id, first.incarnation, generation_of(metadata), generations_of(metadata)
    )
    told = told_by(plan)
    memory = {rank: memory_of(caches[rank].regions, caches[rank].where) for rank in told}
    added: dict[Rank, Peer] = {}
    try:
        for rank in [rank for rank in told if rank not in session.peers]:
            added[rank] = transport.add_peer(
                bodies[rank].agent_info,
                (
                    *caches[rank].regions,
                    *filter(None, [bodies[rank].leases, bodies[rank].staging]),
                ),
                timeout_s=timeout_s,
            )
        if known is None:
            _register(topology, first.engine_id, caches)
    except Exception:
        for peer in added.values():
            transport.drop_peer(peer)
        raise
    session.memory = {**session.memory, **memory}
    session.leases = {
        **session.leases,
        **{rank: table for rank in added if (table := bodies[rank].leases) is not None},
    }
    session.gives = all(bodies[rank].gives for rank in told)
    session.digests = all(bodies[rank].digests for rank in told)
    session.peers = {**session.peers, **added}
    if direction == "read":
        session.is_staged = plan.strategy == "staged"  # all regions are looked at, once
        packs_nbytes = min((bodies[rank].packs_nbytes for rank in told), default=0)
        session.packs_nbytes = packs_nbytes if plan.is_packed else 0
    session.plans = {**session.plans, direction: plan}  # last: from here on it is used
    return session


def compatible_bodies(
    metadata: Mapping[Rank, HandshakeMetadata], factors: Mapping[str, Any]
) -> dict[Rank, RankPayload]:
    """Return what the ranks of an engine say of themselves, once its factors agree with ours.

    Raises:
        HandshakeError: The metadata is malformed or contradictory.
        IncompatibleError: The engines differ in a factor.
    """
    metadata = gather_handshake_metadata([metadata])
    if not metadata:
        raise HandshakeError("the remote engine published no ranks")
    engine_id = next(iter(metadata.values())).engine_id
    theirs = engine_factors(decode_factors(data.payload) for data in metadata.values())
    skewed = any(open_envelope(data.payload).wire != WIRE for data in metadata.values())
    check_compatible(factors, theirs, peer=f"engine {engine_id!r}", skewed=skewed)
    return {rank: body_of(data) for rank, data in metadata.items()}


def generation_of(metadata: Mapping[Rank, HandshakeMetadata]) -> int:
    """Return how often the ranks of an engine have registered their memory, together.

    So it is another number whenever one of them has.

    Raises:
        HandshakeError: An envelope cannot be read.
    """
    return sum(generations_of(metadata).values())


def generations_of(metadata: Mapping[Rank, HandshakeMetadata]) -> dict[Rank, int]:
    """Return how often each rank of an engine has registered its memory.

    Raises:
        HandshakeError: An envelope cannot be read.
    """
    return {rank: open_envelope(data.payload).generation for rank, data in metadata.items()}


def close_session(
    topology: TransferTopology,
    transport: Transport,
    session: Session,
    *,
    keep: Collection[Peer] = (),
) -> None:
    """Forget a remote engine and drop its peers, but those that are still needed."""
    topology.unregister_remote_engine(session.engine_id)
    for peer in session.peers.values():
        if peer not in keep:
            transport.drop_peer(peer)


def memory_of(regions: tuple[Region, ...], where: str) -> tuple[str, int]:
    """Return the one kind of memory, and device, that a rank's cache lies in.

    Raises:
        UnsupportedLayoutError: It lies in several.
    """
    kinds = sorted({(region.memory_kind, region.device) for region in regions})
    if len(kinds) != 1:
        raise UnsupportedLayoutError(
            f"{where}: the cache lies in {len(kinds)} kinds of memory {kinds}; one transfer can "
            "serve one kind"
        )
    return kinds[0]


def body_of(data: HandshakeMetadata) -> RankPayload:
    """Return what a rank says of itself, after checking that it speaks of itself.

    Raises:
        HandshakeError: The body cannot be read, or describes another rank.
    """
    envelope = open_envelope(data.payload)
    for what, said, known in (
        ("engine", envelope.engine_id or data.engine_id, data.engine_id),
        ("incarnation", envelope.incarnation or data.incarnation, data.incarnation),
    ):
        if said != known:
            raise HandshakeError(
                f"metadata of {what} {known!r} rank {data.rank} carries an envelope of {said!r}; "
                "each rank publishes its own"
            )
    body = decode_body(data.payload)
    announced = (body.cache.engine_id, body.cache.rank)
    if announced != (data.engine_id, data.rank):
        raise HandshakeError(
            f"metadata of engine {data.engine_id!r} rank {data.rank} describes engine "
            f"{announced[0]!r} rank {announced[1]}"
        )
    return body


def _register(topology: TransferTopology, engine_id: str, caches: Mapping[Rank, RankCache]) -> None:
    try:
        for info in transfer_infos(caches):
            topology.register_remote_engine(engine_id, info)
    except Exception:
        # Some stages may be in already; an engine is known whole or not at all.
        if engine_id in topology.remote_engines:
            topology.unregister_remote_engine(engine_id)
        raise
