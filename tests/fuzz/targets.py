"""What is fuzzed: everything that reads what others sent. Each may raise our own errors only."""

import contextlib
import json
from collections.abc import Callable
from functools import cache

from kvbridge.connector.params import remote_request
from kvbridge.errors import ConfigError, HandshakeError, KVBridgeError
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    MetadataReply,
    check_compatible,
    compare,
    engine_factors,
    gather_handshake_metadata,
)
from kvbridge.handshake.messages import Release, decode_note, decode_reply
from kvbridge.handshake.metadata import decode_body, decode_factors, open_envelope
from kvbridge.handshake.wire import decode
from kvbridge.model import TransferTopology, transfer_infos
from kvbridge.plan import BlockTable, generate_engine_transfer_plan
from kvbridge.session import ReleaseBook
from kvbridge.session.session import body_of, generation_of
from tests.fuzz import seeds
from tests.fuzz.mutate import mutated, mutated_json


@cache
def a_server() -> HandshakeServer:
    """Return an engine's server; what is fuzzed goes past its socket."""
    server = HandshakeServer()
    ranks = {data.rank: data for data in seeds.published()}
    server.set_xfer_handshake_metadata_pp_aware(ranks)
    server.keep = lambda requests: ([True] * len(requests), 30.0)
    return server


def request(data: bytes) -> None:
    """An engine answers a request, and the asker reads the answer."""
    with contextlib.suppress(HandshakeError):
        decode_reply(a_server()._answer(data))


def reply(data: bytes) -> None:
    """A consumer reads what an engine says of itself, and plans with it."""
    with contextlib.suppress(KVBridgeError):
        found = decode_reply(data)
        if isinstance(found, MetadataReply):
            meet(found)


def meet(found: MetadataReply) -> None:
    """Do what opening a session does, short of connecting to the ranks."""
    ranks = gather_handshake_metadata([found.by_rank])
    generation_of(ranks)
    theirs = engine_factors(decode_factors(data.payload) for data in ranks.values())
    for skewed in (False, True):
        list(map(str, compare(seeds.factors(), theirs, skewed=skewed)))
    caches = {rank: body_of(data).cache for rank, data in ranks.items()}
    ours = seeds.an_engine("decode", 4, 1)
    topology = TransferTopology(
        tp_rank=0,
        tp_size=4,
        block_size=seeds.BLOCK_TOKENS,
        engine_id="decode",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=seeds.HEADS,
    )
    plan = generate_engine_transfer_plan(topology, ours[0, 0], caches, local_engine=ours)
    plan.lower([BlockTable([1, 5])], [BlockTable([7, 2])], end_token=8)
    for info in transfer_infos(caches):
        topology.register_remote_engine(next(iter(caches.values())).engine_id, info)
    check_compatible(seeds.factors(), theirs, peer="the engine")


def release(data: bytes) -> None:
    """A producer hears of a reader."""
    with contextlib.suppress(HandshakeError):
        book = ReleaseBook()
        book.hold("r#1")
        note = decode_note(data)
        if isinstance(note, Release):
            book.report(note)


def payload(data: bytes) -> None:
    """An engine gathers what its workers publish."""
    for read in (open_envelope, decode_factors, decode_body):
        with contextlib.suppress(HandshakeError):
            read(data)


def child(data: bytes) -> None:
    """A MultiConnector gives its children their metadata back."""
    with contextlib.suppress(HandshakeError):
        decode(data, HandshakeMetadata, "metadata of a child")


def params(data: bytes) -> None:
    """A scheduler reads what came with a request."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # nothing that would reach us
        return
    if isinstance(found, dict):
        with contextlib.suppress(ConfigError):
            remote_request(found, "local")


def address(data: bytes) -> None:
    """Somebody reads an address."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(ConfigError):
        EngineAddress.parse(text)
    with contextlib.suppress(ConfigError):
        EngineAddress.of(text, text)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (request, reply, release, payload, child, params, address)
}


def mutate(target: str, data: bytes, seed: int) -> bytes:
    """Return a message for a target that is not quite what it was."""
    return (mutated_json if target == "params" else mutated)(data, seed)
