"""Real messages: what fuzzing starts from, and mutates."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

from kvbridge.connector.params import RemoteRequest, offer
from kvbridge.handshake import (
    DigestRequest,
    Digests,
    EngineAddress,
    HandshakeMetadata,
    MetadataReply,
    RankPayload,
    Release,
    RenewalReply,
    RenewalRequest,
    engine_factors,
    factors_of,
)
from kvbridge.handshake.messages import MetadataRequest
from kvbridge.handshake.metadata import decode_factors, seal
from kvbridge.handshake.wire import WIRE, encode
from kvbridge.model import CacheComponent, CacheGroup, LayerCache, Rank, RankCache, Region
from kvbridge.plan import CellRange, Probe, TokenShare

BASE, PAGES, BLOCK_TOKENS, HEADS = 1 << 20, 8, 4, 8


def a_cache(engine_id: str, rank: Rank, *, tp: int = 2, pp: int = 2, layers: int = 4) -> RankCache:
    """Return what a rank of a small engine holds."""
    stage, tp_rank = rank
    heads = HEADS // tp
    page = heads * BLOCK_TOKENS * 16
    component = CacheComponent(
        "kv", "float16", 0, 16, tp_rank * heads, heads, HEADS, 16, BLOCK_TOKENS, 16 * heads
    )
    mine = range(stage * layers // pp, (stage + 1) * layers // pp)
    return RankCache(
        engine_id,
        stage,
        tp_rank,
        tuple(
            LayerCache(i, f"layers.{i}", 0, BASE + i * PAGES * page, page, PAGES, (component,))
            for i in mine
        ),
        (CacheGroup("attention", BLOCK_TOKENS),),
        (Region(BASE, layers * PAGES * page),),
    )


@cache
def an_engine(engine_id: str = "prefill", tp: int = 2, pp: int = 2) -> dict[Rank, RankCache]:
    """Return what every rank of a small engine holds."""
    ranks = [(stage, rank) for stage in range(pp) for rank in range(tp)]
    return {rank: a_cache(engine_id, rank, tp=tp, pp=pp) for rank in ranks}


@cache
def published(
    engine_id: str = "prefill", tp: int = 2, pp: int = 2
) -> tuple[HandshakeMetadata, ...]:
    """Return what every rank of a small engine publishes."""
    return tuple(
        HandshakeMetadata(
            engine_id,
            "incarnation-1",
            *rank,
            seal(
                factors_of(held, model="m", transport="local", revision="r1"),
                RankPayload(held, b"agent info"),
                engine_id=engine_id,
                incarnation="incarnation-1",
                generation=1,
            ),
        )
        for rank, held in an_engine(engine_id, tp, pp).items()
    )


@cache
def factors() -> dict[str, Any]:
    """Return the factors of the small engine."""
    return engine_factors(decode_factors(data.payload) for data in published())


def params() -> dict[str, Any]:
    """Return what a request carries from the small engine to another one."""
    address = EngineAddress("10.0.0.7", 5600)
    remote = RemoteRequest("prefill", "r#1", address, ((3, 1), (0,)), 8, "incarnation-1", 1)
    return offer(remote, "local", tp_size=2, pp_size=2)


def digest_request() -> DigestRequest:
    """Return what a reader asks of a rank of the small engine."""
    shares = (TokenShare(1, 2, 4),)
    probes = tuple(
        Probe(CellRange(i, f"layers.{i}", each, 0, 4, 16, shares), ((0, 4), (4, 8)))
        for i in range(2)
        for each in ("k", "v")
    )
    reader = ("decode", "incarnation-2", 1, (0, 1), ("10.0.0.8", 5600))
    return DigestRequest(7, "r#1", *reader, epoch=99, probes=probes)


@cache
def messages() -> dict[str, tuple[bytes, ...]]:
    """Return real messages of every kind."""
    ranks = published()
    children = replace(ranks[0], payload=(encode(ranks[0]), None, encode(ranks[1])))
    payloads = tuple(data.payload for data in ranks if isinstance(data.payload, bytes))
    refusal = {"type": "refusal", "reason": "because", "not_yet": False}
    differences = {"model": ("m", "n"), "heads": ({"kv": [4]}, {"kv": [8]})}
    flat = {key: value for key, value in params().items() if key != "kvbridge"}
    return {
        "request": (
            encode(MetadataRequest()),
            encode(MetadataRequest(WIRE, "prefill", ((0, 0), (1, 1)), "decode", factors())),
            encode(RenewalRequest("prefill", "incarnation-1", ("r#1", "r#2"), asker="decode")),
        ),
        "reply": (
            encode(MetadataReply(1, ranks, WIRE)),
            encode(MetadataReply(1, (children,), WIRE)),
            encode({**refusal, "differences": differences}),
            encode({**refusal, "not_yet": True}),
            encode(RenewalReply((True, False), 30.0)),
        ),
        "release": (
            encode(Release("r#1", "decode", "incarnation-2", (0, 1), readers=2)),
            encode(digest_request()),
            encode(Digests(7, b"12345678", "because", "lease")),
        ),
        "payload": payloads,
        "child": tuple(encode(data) for data in (*ranks, children)),
        "params": (json.dumps(params()).encode(), json.dumps(flat).encode()),
        "address": (b"10.0.0.7:5600", b"[fd00::7]:5600", b"node-7.cluster.local:1"),
    }
