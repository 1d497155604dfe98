"""Metadata of ranks: gathered, served, fetched, compared; and everything that can be wrong."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.errors import (
    ConfigError,
    HandshakeError,
    HandshakeTimeoutError,
    IncompatibleError,
    KVBridgeError,
)
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    HandshakeServer,
    PPAwareHandshake,
    RankPayload,
    check_compatible,
    engine_factors,
    factors_of,
    fetch_metadata,
    gather_handshake_metadata,
    hand_over,
)
from kvbridge.handshake.messages import (
    MetadataRequest,
    Release,
    decode_note,
    decode_reply,
    decode_request,
)
from kvbridge.handshake.metadata import decode_body, decode_factors, seal
from kvbridge.handshake.wire import encode
from kvbridge.model import CacheComponent, CacheGroup, LayerCache, RankCache, Region


def a_cache(name: str = "kv", dtype: str = "float16", heads: int = 2) -> RankCache:
    component = CacheComponent(name, dtype, 0, 8, 0, heads, 4, 8, 16, 8 * heads)
    page = 16 * 8 * heads
    layer = LayerCache(0, "layers.0", 0, 4096, page, 10, (component,))
    return RankCache(
        "engine-a", 0, 0, (layer,), (CacheGroup("attention", 16),), (Region(4096, 10 * page),)
    )


def payload(**factors: object) -> bytes:
    return seal(factors, RankPayload(a_cache(), b"agent"))


def metadata(
    pp: int, tp: int, payload: bytes = payload(model="m"), engine: str = "e"
) -> HandshakeMetadata:
    return HandshakeMetadata(engine, "incarnation-1", pp, tp, payload)


# --- gathering ---------------------------------------------------------------------------------


def test_gather_merges_workers_and_ignores_those_without_anything() -> None:
    merged = gather_handshake_metadata(
        [{(0, 0): metadata(0, 0)}, None, {(1, 0): metadata(1, 0)}], pp_size=2, tp_size=1
    )
    assert sorted(merged) == [(0, 0), (1, 0)]


def test_gather_accepts_the_same_rank_twice_but_not_with_other_content() -> None:
    same = {(0, 0): metadata(0, 0)}
    assert gather_handshake_metadata([same, same]) == same
    with pytest.raises(HandshakeError, match=r"rank \(0, 0\) with different"):
        gather_handshake_metadata([same, {(0, 0): metadata(0, 0, b"y")}])


@pytest.mark.parametrize(
    ("results", "sizes", "message"),
    [
        ([{(0, 0): metadata(0, 0)}], {"pp_size": 2, "tp_size": 1}, r"\(1, 0\)"),
        ([{(0, 0): metadata(0, 0)}], {"tp_size": 2}, r"\(0, 1\)"),
        ([{}], {"pp_size": 1, "tp_size": 1}, r"\(0, 0\)"),
        ([{(0, 1): metadata(0, 0)}], {}, r"listed under \(0, 1\)"),
        (
            [{(0, 0): metadata(0, 0)}, {(0, 1): metadata(0, 1, engine="f")}],
            {},
            "several engine ids: 'e'.*'f'",
        ),
        (
            [{(0, 0): metadata(0, 0)}, {(0, 1): replace(metadata(0, 1), incarnation="2")}],
            {},
            "several incarnations",
        ),
    ],
)
def test_gather_refuses(
    results: list[Mapping[tuple[int, int], HandshakeMetadata]],
    sizes: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(HandshakeError, match=message):
        gather_handshake_metadata(results, **sizes)


# --- the base class ----------------------------------------------------------------------------


class OneStage(PPAwareHandshake):
    def __init__(self) -> None:
        self.taken: dict[int, HandshakeMetadata] = {}

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        self.taken = dict(metadata)


def test_a_class_of_one_stage_gets_tp_ranks() -> None:
    handshake = OneStage()
    handshake.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata(0, 0), (0, 1): metadata(0, 1)})
    assert handshake.taken == {0: metadata(0, 0), 1: metadata(0, 1)}


def test_a_class_of_one_stage_refuses_a_second_one_by_its_name() -> None:
    handshake = OneStage()
    with pytest.raises(ValueError, match=r"OneStage.*\(1, 0\)"):
        handshake.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): metadata(0, 0), (1, 0): metadata(1, 0)}
        )
    assert handshake.taken == {}


# --- the wire ----------------------------------------------------------------------------------


def test_a_rank_comes_through_the_wire_as_it_was() -> None:
    cache = a_cache()
    factors = factors_of(cache, model="m", transport="local")
    payload = seal(factors, RankPayload(cache, b"agent"))
    assert decode_factors(payload) == factors
    assert decode_body(payload) == RankPayload(cache, b"agent")


def test_factors_can_be_read_whatever_the_body_is() -> None:
    payload = msgspec.msgpack.encode(
        {"wire": [1, 99], "factors": {"model": "m"}, "body": b"\xff from the future", "new": 1}
    )
    assert decode_factors(payload) == {"model": "m"}
    with pytest.raises(HandshakeError, match="rank description"):
        decode_body(payload)


def test_another_major_version_is_refused_with_both_versions() -> None:
    payload = msgspec.msgpack.encode({"wire": [2, 0], "factors": {}, "body": b""})
    with pytest.raises(HandshakeError, match=r"2\.0.*1\.2"):
        decode_factors(payload)


def test_a_body_that_describes_an_impossible_cache_is_refused() -> None:
    cache = msgspec.to_builtins(a_cache())
    cache["regions"][0]["nbytes"] = 8
    body = msgspec.msgpack.encode({"cache": cache, "agent_info": b""})
    payload = msgspec.msgpack.encode({"wire": [1, 0], "factors": {}, "body": body})
    with pytest.raises(HandshakeError, match="no single region"):
        decode_body(payload)


@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_our_own_errors(noise: bytes) -> None:
    for decode in (decode_request, decode_reply, decode_note, decode_factors, decode_body):
        try:
            decode(noise)
        except KVBridgeError:
            continue


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_raises_nothing_but_our_own_errors(at: int, bit: int) -> None:
    payload = bytearray(seal({}, RankPayload(a_cache(), b"agent")))
    payload[at % len(payload)] ^= 1 << bit
    try:
        decode_body(bytes(payload))
    except KVBridgeError:
        return


def test_deeply_nested_data_is_refused() -> None:
    with pytest.raises(HandshakeError):
        decode_factors(b"\x91" * 100_000)


def test_a_release_without_readers_is_refused() -> None:
    release = Release("r", "e", "i", (0, 0), readers=0)
    with pytest.raises(HandshakeError, match="0 readers"):
        decode_note(encode(release))


# --- compatibility -----------------------------------------------------------------------------


def test_equal_engines_of_other_shape_are_compatible() -> None:
    ours = factors_of(a_cache(heads=2), model="m", transport="local")
    theirs = factors_of(a_cache(heads=1), model="m", transport="local")
    check_compatible(ours, theirs, peer="p")


def test_k_and_v_apart_are_compatible_with_joint_cells() -> None:
    joint = a_cache()
    k, v = (
        replace(joint.layers[0].components[0], name=name, cell_bytes=4, offset=offset)
        for name, offset in (("k", 0), ("v", 4))
    )
    apart = replace(joint, layers=(replace(joint.layers[0], components=(k, v)),))
    ours = factors_of(joint, model="m", transport="local")
    check_compatible(ours, factors_of(apart, model="m", transport="local"), peer="p")


def test_every_differing_field_is_listed_with_both_values() -> None:
    """B22, B49, B50: refused at the handshake, naming field and values on both sides."""
    ours = factors_of(a_cache(dtype="float16"), model="m", transport="local")
    theirs = factors_of(a_cache(dtype="float8_e4m3"), model="n", transport="nixl")
    with pytest.raises(IncompatibleError) as caught:
        check_compatible(ours, {**theirs, "extra": 1}, peer="engine 'p'")
    assert caught.value.differences == {
        "dtype": ({"kv": ["float16"]}, {"kv": ["float8_e4m3"]}),
        "extra": (None, 1),
        "model": ("m", "n"),
        "transport": (["local"], ["nixl"]),
    }
    for text in ("engine 'p'", "'m' here and 'n' there", "float16", "float8_e4m3"):
        assert text in str(caught.value)


# --- the channel -------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[HandshakeServer]:
    server = HandshakeServer()
    yield server
    server.close()


def test_all_ranks_of_an_engine_are_served_on_one_port(server: HandshakeServer) -> None:
    ranks = {(pp, tp): metadata(pp, tp) for pp in range(2) for tp in range(2)}
    server.set_xfer_handshake_metadata_pp_aware(ranks)
    reply = fetch_metadata(server.host, server.port, timeout_s=5, engine_id="e")
    assert {data.rank: data for data in reply.ranks} == ranks
    assert reply.generation == 1


def test_publishing_anew_raises_the_generation(server: HandshakeServer) -> None:
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    server.set_xfer_handshake_metadata({0: metadata(0, 0, payload(model="moved"))})
    reply = fetch_metadata(server.host, server.port, timeout_s=5)
    assert (reply.generation, reply.ranks[0].payload) == (2, payload(model="moved"))


def test_a_server_that_has_nothing_yet_says_so(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeTimeoutError, match="nothing but 'not yet'"):
        fetch_metadata(server.host, server.port, timeout_s=0.3)


def test_what_is_withdrawn_is_refused_at_once_until_something_is_published(
    server: HandshakeServer,
) -> None:
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    server.withdraw()
    with pytest.raises(HandshakeError, match="refused: this engine has no cache now: it sleeps"):
        fetch_metadata(server.host, server.port, timeout_s=20)
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    assert fetch_metadata(server.host, server.port, timeout_s=5).generation == 2


def test_an_engine_that_is_still_starting_is_waited_for(server: HandshakeServer) -> None:
    publish = threading.Timer(0.3, server.set_xfer_handshake_metadata, args=[{0: metadata(0, 0)}])
    publish.start()
    assert fetch_metadata(server.host, server.port, timeout_s=20).by_rank == {
        (0, 0): metadata(0, 0)
    }
    publish.join()


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), float("inf")])
def test_a_wait_that_is_no_time_is_refused(server: HandshakeServer, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=f"timeout_s {timeout_s:g} must be"):
        fetch_metadata(server.host, server.port, timeout_s=timeout_s)


def test_b47_the_wrong_engine_behind_an_address_is_named(server: HandshakeServer) -> None:
    server.set_xfer_handshake_metadata({0: metadata(0, 0, engine="x")})
    with pytest.raises(HandshakeError, match="'y' was expected here, this is 'x'"):
        fetch_metadata(server.host, server.port, timeout_s=5, engine_id="y")


def test_metadata_under_a_wrong_rank_is_not_served(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=r"wrong ranks: \[\(0, 1\)\]"):
        server.set_xfer_handshake_metadata({1: metadata(0, 0)})
    with pytest.raises(HandshakeError, match="no ranks to serve"):
        server.set_xfer_handshake_metadata({})
    assert server.generation == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_b65_every_kind_of_loopback_address_works(host: str) -> None:
    server = HandshakeServer(host)
    try:
        server.set_xfer_handshake_metadata({0: metadata(0, 0)})
        assert fetch_metadata(host, server.port, timeout_s=5).ranks == (metadata(0, 0),)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("::1", 5600, "tcp://[::1]:5600"),
        ("[::1]", 5600, "tcp://[::1]:5600"),
        ("localhost", 5600, "tcp://localhost:5600"),
        ("127.0.0.1", 0, "tcp://127.0.0.1:0"),
    ],
)
def test_b65_endpoints(host: str, port: int, endpoint: str) -> None:
    assert EngineAddress.of(host, port).endpoint == endpoint


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=str(port)):
        fetch_metadata("127.0.0.1", port, timeout_s=1)


def test_b65_a_port_in_use_is_reported_by_the_constructor(server: HandshakeServer) -> None:
    with pytest.raises(HandshakeError, match=rf"127\.0\.0\.1:{server.port}.*in use"):
        HandshakeServer(port=server.port)


def test_an_address_that_others_can_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0\.0\.0\.0'.*loopback"):
        HandshakeServer("0.0.0.0")


def test_a_peer_that_never_answers_ends_in_a_time_out() -> None:
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(HandshakeTimeoutError, match=f"{port} within 0.2 s"):
            fetch_metadata("127.0.0.1", port, timeout_s=0.2)
    finally:
        context.destroy(linger=0)


def test_nobody_listening_ends_in_a_time_out(server: HandshakeServer) -> None:
    server.close()
    with pytest.raises(HandshakeTimeoutError):
        fetch_metadata(server.host, server.port, timeout_s=0.2)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x80\x04."],  # a pickle
        [b"noise" * 1000],
        [b""],
        [b"a", b"b", b"c"],
        [encode(MetadataRequest())[:-3]],
        [b"\x91" * 50_000],
    ],
)
def test_b68_a_hostile_frame_is_counted_and_the_next_peer_served(
    server: HandshakeServer, frames: list[bytes]
) -> None:
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address.endpoint)
        socket.send_multipart(frames)
        assert fetch_metadata(server.host, server.port, timeout_s=5).ranks
        socket.poll(200)
        assert server.refused == 1
    finally:
        context.destroy(linger=0)


def test_another_wire_version_is_refused_in_words(server: HandshakeServer) -> None:
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address.endpoint)
        socket.send(encode(MetadataRequest(wire=(2, 0))))
        assert socket.poll(5000)
        with pytest.raises(HandshakeError, match=r"2\.0.*1\.2"):
            decode_reply(socket.recv())
    finally:
        context.destroy(linger=0)


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    before = threading.active_count()
    server = HandshakeServer()
    server.close()
    server.close()
    assert threading.active_count() == before
    HandshakeServer(port=server.port).close()


# --- versions, and who is told what --------------------------------------------------------------


def test_an_older_minor_version_is_answered_in_its_own(server: HandshakeServer) -> None:
    """A peer of 1.0 knows no factors, and sends an envelope without ids; both still talk."""
    server.set_xfer_handshake_metadata({0: metadata(0, 0)})
    old = msgspec.msgpack.encode({"type": "metadata?", "wire": [1, 0], "engine_id": None})
    future = msgspec.msgpack.encode(
        {"type": "metadata?", "wire": [1, 9], "engine_id": "e", "whatever": {"is": ["new"]}}
    )
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address.endpoint)
        for request, spoken in ((old, (1, 0)), (future, (1, 2))):
            socket.send(request)
            assert socket.poll(5000)
            reply = decode_reply(socket.recv())
            assert reply is not None
            assert tuple(reply.wire) == spoken
    finally:
        context.destroy(linger=0)
    envelope = {"wire": [1, 0], "factors": {"model": "m"}, "body": b""}
    assert decode_factors(msgspec.msgpack.encode(envelope)) == {"model": "m"}


def test_a_fact_that_the_older_side_does_not_know_is_no_reason_to_refuse() -> None:
    ours = factors_of(a_cache(), model="m", transport="local")
    theirs = {name: value for name, value in ours.items() if name != "draft_layers"}
    with pytest.raises(IncompatibleError, match="draft_layers"):
        check_compatible(ours, theirs, peer="p")
    (found,) = check_compatible(ours, theirs, peer="p", skewed=True)
    assert (found.field, found.severity) == ("draft_layers", "warning")


def test_a_revision_that_one_side_does_not_pin_is_a_warning() -> None:
    pinned = factors_of(a_cache(), model="m", transport="local", revision="abc")
    free = factors_of(a_cache(), model="m", transport="local")
    other = factors_of(a_cache(), model="m", transport="local", revision="def")
    assert [each.severity for each in check_compatible(pinned, free, peer="p")] == ["warning"]
    with pytest.raises(IncompatibleError, match="revision is 'abc' here and 'def' there"):
        check_compatible(pinned, other, peer="p")


def test_one_transport_in_common_is_enough() -> None:
    ours = {"transport": ["nixl", "mooncake"]}
    assert check_compatible(ours, {"transport": ["mooncake", "ucx"]}, peer="p") == []
    with pytest.raises(IncompatibleError, match="configure a transport that both engines have"):
        check_compatible(ours, {"transport": ["ucx"]}, peer="p")


def test_factors_of_an_engine_are_the_union_over_its_ranks() -> None:
    first, second = (
        factors_of(cache, model="m", transport="local", draft_layers=[1])
        for cache in (
            a_cache(),
            replace(
                a_cache(),
                layers=(replace(a_cache().layers[0], layer=1, name="layers.1"),),
                pp_rank=1,
            ),
        )
    )
    engine = engine_factors([first, second, first])
    assert engine["layers"] == [[0, "layers.0"], [1, "layers.1"]]
    assert engine["draft_layers"] == [1]
    assert engine["heads"] == first["heads"]
    with pytest.raises(HandshakeError, match="contradict each other: model is 'm' and 'n'"):
        engine_factors([first, {**second, "model": "n"}])


def test_five_differing_facts_are_all_listed_with_what_to_do() -> None:
    ours = factors_of(a_cache(), model="llama", transport="nixl", revision="a")
    theirs = factors_of(
        a_cache(dtype="bfloat16", heads=2), model="qwen", transport="ucx", revision="b"
    )
    theirs["cache_groups"] = [["sliding_window", 1024]]
    with pytest.raises(IncompatibleError) as caught:
        check_compatible(ours, theirs, peer="engine 'p'")
    said = str(caught.value)
    assert len(caught.value.differences) == 5
    for words in (
        "model is 'llama' here and 'qwen' there (serve the same model on both engines, or ",
        "revision is 'a' here and 'b' there",
        "transport is 'nixl' here and 'ucx' there (configure a transport that both engines have)",
        "dtype is {'kv': 'float16'} here and {'kv': 'bfloat16'} there",
        "cache_groups is [['attention', None]] here and [['sliding_window', 1024]] there",
    ):
        assert words in said


class AnyStage(OneStage):
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], HandshakeMetadata]
    ) -> None:
        self.stages = dict(metadata)


def test_the_setter_for_stages_is_called_when_there_are_stages_and_only_then() -> None:
    one, two = {(0, 0): metadata(0, 0)}, {(0, 0): metadata(0, 0), (1, 0): metadata(1, 0)}
    handshake = AnyStage()
    hand_over(handshake, one)
    assert (handshake.taken, hasattr(handshake, "stages")) == ({0: metadata(0, 0)}, False)
    hand_over(handshake, two)
    assert handshake.stages == two
    with pytest.raises(ValueError, match="OneStage"):
        hand_over(OneStage(), two)
