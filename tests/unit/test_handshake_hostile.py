"""What strangers may send to the side channel, and what it may cost."""

import contextlib
import json
import math
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvbridge.connector.params import remote_request
from kvbridge.errors import ConfigError, HandshakeError, IncompatibleError
from kvbridge.handshake import (
    EngineAddress,
    HandshakeMetadata,
    Keys,
    MetadataReply,
    Release,
    check_compatible,
    engine_factors,
    fetch_metadata,
    keys_of_secret,
)
from kvbridge.handshake.messages import (
    MetadataRequest,
    RefusalReply,
    RenewalReply,
    RenewalRequest,
    decode_note,
    decode_reply,
    decode_request,
)
from kvbridge.handshake.metadata import (
    CHILDREN_MAX,
    Envelope,
    decode_body,
    decode_factors,
    open_envelope,
)
from kvbridge.handshake.wire import MESSAGE_MAX_BYTES, REQUEST_MAX_BYTES, decode, encode
from tests.fuzz import seeds
from tests.fuzz.mutate import HEADERS, ODDITIES, mutated
from tests.fuzz.targets import a_server

MIB = 1 << 20
SERVED_S = 4.0

Read = Callable[[bytes], object]


def decode_child(data: bytes) -> object:
    return decode(data, HandshakeMetadata, "metadata of a child")


READERS: dict[str, tuple[Read, ...]] = {
    "request": (decode_request,),
    "reply": (decode_reply,),
    "release": (decode_note,),
    "payload": (open_envelope, decode_factors, decode_body),
    "child": (decode_child,),
}


def array(item: bytes, nbytes: int) -> bytes:
    """Return a list of so many bytes, all entries of which are the same."""
    count = nbytes // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def asking(factors: bytes) -> bytes:
    """Return a request with factors that are encoded already."""
    return b"\x82\xa4type\xa9metadata?\xa7factors" + factors


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", READERS)
def test_no_message_can_be_read_that_ends_early(kind: str) -> None:
    message = seeds.messages()[kind][0]
    for read in READERS[kind]:
        read(message)
        for end in range(len(message)):
            with pytest.raises(HandshakeError):
                read(message[:end])


@pytest.mark.parametrize("kind", READERS)
def test_every_flipped_bit_is_read_or_refused(kind: str) -> None:
    message = seeds.messages()[kind][0]
    for at in range(0, 8 * len(message), 1 + len(message) // 500):
        flipped = bytearray(message)
        flipped[at // 8] ^= 1 << at % 8
        for read in READERS[kind]:
            with contextlib.suppress(HandshakeError):
                read(bytes(flipped))


@pytest.mark.parametrize("data", [*HEADERS, *ODDITIES], ids=bytes.hex)
@pytest.mark.parametrize("kind", READERS)
def test_what_promises_gigabytes_or_is_no_plain_data_is_refused(kind: str, data: bytes) -> None:
    for read in READERS[kind]:
        for message in (data, asking(data), asking(b"\x81\xa1a" + data), b"\x81\xa4wire" + data):
            with pytest.raises(HandshakeError):
                read(message)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, 2**64 - 1, math.nan, "x", b"\xff", [], {}])
@pytest.mark.parametrize(
    "kind",
    [
        MetadataRequest,
        RenewalRequest,
        MetadataReply,
        RenewalReply,
        RefusalReply,
        Release,
        Envelope,
        HandshakeMetadata,
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_the_name_of_its_field(
    kind: type, value: object
) -> None:
    samples: dict[type, tuple[str, int]] = {
        MetadataRequest: ("request", 1),
        RenewalRequest: ("request", 2),
        MetadataReply: ("reply", 0),
        RefusalReply: ("reply", 2),
        RenewalReply: ("reply", 4),
        Release: ("release", 0),
        Envelope: ("payload", 0),
        HandshakeMetadata: ("child", 0),
    }
    name, which = samples[kind]
    whole = msgspec.msgpack.decode(seeds.messages()[name][which])
    for field in whole:
        message = msgspec.msgpack.encode({**whole, field: value})
        for read in READERS[name]:
            try:
                read(message)
            except HandshakeError as error:
                text = str(error)
                blamed = (field, "rank description", "the peer refused")
                assert any(each in text for each in blamed), (field, text)


def factors_in(data: bytes) -> dict[str, Any] | None:
    found = decode_request(data)
    assert isinstance(found, MetadataRequest)
    return found.factors


def test_a_name_that_comes_twice_counts_once() -> None:
    factors = b"\x82\xa5model\xa1m\xa5model\xa1n"
    assert factors_in(asking(factors)) == {"model": "n"}


def test_facts_are_plain_and_not_deep() -> None:
    plain: tuple[Any, ...] = ([[[1]]], {"a": {"b": {"c": 1}}}, {"a": [[1]]})
    for fact in plain:
        assert factors_in(asking(encode({"f": fact}))) == {"f": fact}
    other: tuple[Any, ...] = ([[[[1]]]], {"a": [{"b": []}]}, b"bytes", [b""], {1: 1})
    for fact in other:
        with pytest.raises(HandshakeError, match=r"\$\.factors"):
            decode_request(asking(encode({"f": fact})))


@pytest.mark.parametrize("unit", [b"\x91", b"\x81\xa1a", b"\x81\x01"])
@pytest.mark.parametrize("depth", [5, 100, 330, 500, 900, 985, 20_000])
def test_nesting_does_not_exhaust_the_stack(unit: bytes, depth: int) -> None:
    """Reading is not the only recursion: values are compared, and written into messages, too."""
    answer = a_server()._answer(asking(b"\x81\xa5model" + unit * depth + b"\xc0"))
    with pytest.raises(HandshakeError, match="cannot be read"):
        decode_reply(answer)


def test_a_mistake_in_a_request_is_told_rather_than_what_it_is_not() -> None:
    with pytest.raises(HandshakeError, match=r"Expected .*- at `\$\.asker`"):
        decode_request(encode({"type": "metadata?", "asker": 7}))


@pytest.mark.parametrize("kind", READERS)
def test_messages_of_other_kinds_are_refused(kind: str) -> None:
    others = {"request", "reply", "release"} if kind == "request" else {*seeds.messages()}
    for other in others - {kind}:
        for read in READERS[kind]:
            with pytest.raises(HandshakeError):
                read(seeds.messages()[other][0])


# --- what it costs -------------------------------------------------------------------------------

ROOM = REQUEST_MAX_BYTES - 100
GREEDY = {
    "tables": asking(b"\x81\xa5model" + array(b"\x80", ROOM)),
    "lists": asking(b"\x81\xa5model" + array(b"\x90", ROOM)),
    "layers": asking(b"\x81\xa6layers" + array(b"\x91\x90", ROOM)),
    "transports": asking(b"\x81\xa9transport" + array(b"\xcb" + b"\1" * 8, ROOM)),
    "ranks": b"\x82\xa4type\xa9metadata?\xa5ranks" + array(b"\x92\x07\x07", ROOM),
    "fields": asking(
        b"\xdf" + struct.pack(">I", 17_000) + b"".join(b"\xa5%05d\x80" % i for i in range(17_000))
    ),
    "asker": encode(MetadataRequest(asker="\0" * ROOM, factors={"a": 1})),
    "text": encode(MetadataRequest(factors={"model": "\0" * ROOM})),
    "tag": b"\x81\xa4type\xdb" + struct.pack(">I", ROOM) + b"\0" * ROOM,
}


def peak(action: Callable[[], object]) -> float:
    """Return the MiB that an action uses at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()


def calls(action: Callable[[], object]) -> int:
    """Return how many calls and returns an action makes."""
    count = 0

    def tick(*_: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(tick)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("name", GREEDY)
def test_no_request_costs_much_memory_time_or_log(name: str) -> None:
    server, data = a_server(), GREEDY[name]
    assert REQUEST_MAX_BYTES * 0.9 < len(data) <= REQUEST_MAX_BYTES
    started_s = time.thread_time()
    assert calls(lambda: server._answer(data)) < 4 * len(data)
    assert time.thread_time() - started_s < 20, "what grows faster than the request takes minutes"
    assert peak(lambda: server._answer(data)) < 16
    assert len(server.refusals[-1]) < 4000


def test_no_answer_costs_more_than_a_few_times_its_size() -> None:
    rank = msgspec.to_builtins(HandshakeMetadata("", "", 0, 0, (None,) * CHILDREN_MAX))
    head = b"\x83\xa4type\xa8metadata\xaageneration\x01\xa5ranks"
    answers = {
        "ranks": head + array(encode(rank), MESSAGE_MAX_BYTES - 100),
        "children": head
        + b"\x91"
        + encode({**rank, "payload": None})[:-1]
        + array(b"\xc0", 1 << 23),
        "differences": b"\x83\xa4type\xa7refusal\xa6reason\xa0\xabdifferences\x81\xa1a\x92\xc0"
        + array(b"\x80", MESSAGE_MAX_BYTES - 100),
    }
    for name, answer in answers.items():
        assert len(answer) <= MESSAGE_MAX_BYTES

        def read(answer: bytes = answer) -> None:
            with contextlib.suppress(HandshakeError):
                decode_reply(answer)

        assert peak(read) < 72, name


def grows(prepare: Callable[[int], Callable[[], object]], n: int) -> float:
    """Return how many times longer eight times as much takes; 64 times if it is quadratic."""

    def seconds(action: Callable[[], object]) -> float:
        samples = []
        for _ in range(3):
            started_s = time.thread_time()
            action()
            samples.append(time.thread_time() - started_s)
        return min(samples)

    most_s = seconds(prepare(8 * n))
    assert most_s < 2
    return most_s / seconds(prepare(n))


def test_comparing_takes_time_in_proportion() -> None:
    def compared(n: int) -> Callable[[], object]:
        ours, theirs = (
            {
                "layers": [[i, name] for i in range(n)],
                "dtype": {f"{name}{i}": ["a"] for i in range(n)},
                "transport": [f"{name}{i}" for i in range(n)],
                **{f"{name}{i}": i for i in range(n)},
            }
            for name in "xy"
        )

        def refuse() -> None:
            with contextlib.suppress(IncompatibleError):
                check_compatible(ours, theirs, peer="p")

        return refuse

    def merged(n: int) -> Callable[[], object]:
        ranks = [{"layers": [[i, "x"]], "dtype": {f"{i}": ["a"]}} for i in range(n)]
        return lambda: engine_factors(ranks)

    assert grows(compared, 2000) < 24
    assert grows(merged, 2000) < 24


# --- answers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """Listen on a port, and say the same to everybody."""
    context = zmq.Context()
    port = context.socket(zmq.ROUTER)
    number = port.bind_to_random_port("tcp://127.0.0.1")

    def answer_one() -> None:
        if port.poll(5000):
            port.send_multipart([port.recv_multipart()[0], answer])
            port.poll(200)

    thread = threading.Thread(target=answer_one)
    thread.start()
    try:
        yield number
    finally:
        thread.join()
        context.destroy(linger=0)


def test_b47_an_engine_cannot_speak_for_another_one() -> None:
    with (
        answering(encode(MetadataReply(1, seeds.published("victim")))) as port,
        pytest.raises(HandshakeError, match=r"'liar' was asked.*answers for \['victim'\]"),
    ):
        fetch_metadata("127.0.0.1", port, timeout_s=5, engine_id="liar")


@pytest.mark.parametrize("kind", ["request", "release", "payload", "child"])
def test_an_answer_that_is_none_is_refused(kind: str) -> None:
    with answering(seeds.messages()[kind][0]) as port, pytest.raises(HandshakeError, match="reply"):
        fetch_metadata("127.0.0.1", port, timeout_s=5)


def test_an_answer_of_no_ranks_is_refused() -> None:
    with pytest.raises(HandshakeError, match="no ranks"):
        decode_reply(encode(MetadataReply(1, ())))


# --- params and addresses ------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 2**70, 10**5000, -(10**5000), 1.5, math.nan, math.inf, 1e300),
    *("", "\0", "\ud800", "a\udfffb", "x" * 100_000, "a;tcp://b", b"bytes", object()),
    *([], {}, [[]], {1: 1}, {"\ud800": 1}, nested(900), nested(100_000)),
)


def test_params_are_read_or_refused() -> None:
    """Half a surrogate pair in an engine id would otherwise come up again when it is sent on."""
    params = seeds.params()
    entry = params["kvbridge"]["children"]["local"]
    flat = {key: value for key, value in params.items() if key != "kvbridge"}
    for value in HOSTILE:
        for key in entry:
            for given in (
                {**flat, key: value},
                {"kvbridge": {"version": 1, "children": {"local": {**entry, key: value}}}},
            ):
                with contextlib.suppress(ConfigError):
                    read = remote_request(given, "local")
                    assert read is not None
                    encode(read)
        for ours in (
            value,
            {"version": value, "children": {}},
            {"version": 1, "children": value},
            {"version": 1, "children": {"local": value}},
        ):
            with contextlib.suppress(ConfigError):
                assert remote_request({"kvbridge": ours}, "local") is None


def test_addresses_are_read_or_refused() -> None:
    for value in HOSTILE:
        for host, port in (("h", value), (value, 1), (value, value)):
            with contextlib.suppress(ConfigError):
                address = EngineAddress.of(host, port)
                assert EngineAddress.parse(str(address)) == address
        if isinstance(value, str):
            for text in (value, f"{value}:1", f"[{value}]:1", f"h:{value}"):
                with contextlib.suppress(ConfigError):
                    EngineAddress.parse(text)


# --- the port ------------------------------------------------------------------------------------

SERVER = """
import json, logging, os, sys, threading
from kvbridge.handshake import HandshakeServer, keys_of_secret
from tests.fuzz import seeds
logging.disable()
secret = sys.argv[1].encode()
server = HandshakeServer(keys=keys_of_secret(secret) if secret else None)
ranks = {data.rank: data for data in seeds.published("prefill", 8, 2)}
server.set_xfer_handshake_metadata_pp_aware(ranks)
print(server.port, flush=True)
for _ in sys.stdin:
    resident = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(json.dumps({"rss": resident / 2**20, "fds": len(os.listdir("/proc/self/fd")),
        "alive": server._thread.is_alive(), "refused": server.refused,
        "strangers": server.unauthenticated}), flush=True)
server.close()
"""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%s" + b"\0" + bytes(31)
PLAIN, CURVE = (GREETING % name.ljust(20, b"\0") for name in (b"NULL", b"CURVE"))
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


class Engine:
    """A handshake server in a process of its own."""

    def __init__(self, secret: str) -> None:
        self.keys: Keys | None = keys_of_secret(secret.encode()) if secret else None
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
        assert self.process.stdin
        assert self.process.stdout
        self._ask, self._told = self.process.stdin, self.process.stdout
        self.port = int(self._told.readline())
        self.serve()
        self.before = self.look()

    def look(self) -> dict[str, Any]:
        self._ask.write("\n")
        self._ask.flush()
        seen: dict[str, Any] = json.loads(self._told.readline())
        return seen

    def serve(self) -> None:
        """Be served, in time."""
        reply = fetch_metadata("127.0.0.1", self.port, timeout_s=SERVED_S, keys=self.keys)
        assert len(reply.ranks) == 16

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def speak(self) -> socket.socket:
        """Connect and greet, as an asker without keys does."""
        caller = self.connect()
        caller.sendall(PLAIN)
        heard = 0
        while heard < len(PLAIN) + 43:  # its greeting, and that it is ready
            heard += len(caller.recv(4096))
        caller.sendall(READY)
        return caller

    def check(self, *, grown_mib: float, refused: int = 0, strangers: int = 0) -> None:
        """Check that it lives, serves and has counted, and that its costs are bounded."""
        self.serve()
        deadline_s = time.monotonic() + 15
        while True:
            now = self.look()
            more = {key: now[key] - self.before[key] for key in self.before}
            settled = (
                more["fds"] <= 1 and more["refused"] >= refused and more["strangers"] >= strangers
            )
            if settled or time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        assert now["alive"]
        assert settled, more
        assert more["rss"] < grown_mib, more

    def close(self) -> None:
        self._ask.close()
        try:
            assert self.process.wait(20) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self._told.close()


@contextlib.contextmanager
def an_engine(secret: str = "") -> Iterator[Engine]:
    engine = Engine(secret)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["", "sixteen bytes at least"], ids=["open", "keys"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with an_engine(request.param) as engine:
        yield engine


def framed(data: bytes) -> bytes:
    return b"\x02" + struct.pack(">Q", len(data)) + data


BEFORE_AUTHENTICATION = {
    "nothing": b"",
    "pickle": b"\x80\x04\x95\x05\0\0\0\0\0\0\0]\x94a.",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "half a greeting": PLAIN[:30],
    "no mechanism": GREETING % b"NONE".ljust(20, b"\0") + READY,
    "plain": PLAIN + b"\x04\xff",
    "curve": CURVE + b"\x04\xc8\x05HELLO" + os.urandom(194),
    "a long command": CURVE + b"\x06" + struct.pack(">Q", 1 << 40) + os.urandom(1000),
    "a message instead": CURVE + framed(encode(MetadataRequest())),
    "noise": os.urandom(10 * MIB),
    "noise after a greeting": CURVE + os.urandom(10 * MIB),
}


@pytest.mark.multi_process
def test_b68_noise_on_the_port_costs_nothing_and_is_counted(engine: Engine) -> None:
    for noise in BEFORE_AUTHENTICATION.values():
        with contextlib.suppress(ConnectionError, BrokenPipeError), engine.connect() as caller:
            caller.sendall(noise)
    engine.check(grown_mib=16, strangers=len(BEFORE_AUTHENTICATION))


@pytest.mark.multi_process
def test_half_open_connections_hold_up_nobody(engine: Engine) -> None:
    half_open = [engine.connect() for _ in range(300)]
    for caller in half_open:
        caller.sendall(b"\xff")
    for _ in range(3):
        engine.serve()
    for caller in half_open:
        caller.close()
    engine.check(grown_mib=16, strangers=300)


@pytest.mark.multi_process
def test_connections_that_close_at_once_hold_up_nobody(engine: Engine) -> None:
    def slam() -> None:
        for _ in range(500):
            with contextlib.suppress(OSError):
                engine.connect().close()

    slamming = [threading.Thread(target=slam) for _ in range(2)]
    for thread in slamming:
        thread.start()
    engine.serve()
    for thread in slamming:
        thread.join()
    engine.check(grown_mib=16, strangers=900)


@pytest.mark.multi_process
def test_a_server_can_be_closed_while_it_is_flooded(engine: Engine) -> None:
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), engine.connect() as caller:
                caller.sendall(BEFORE_AUTHENTICATION["http"])

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    try:
        time.sleep(0.5)
        engine.serve()
        engine._ask.close()
        assert engine.process.wait(10) == 0
    finally:
        stop.set()
        for thread in flooding:
            thread.join()


@pytest.mark.multi_process
def test_b68_hostile_requests_are_refused_counted_and_the_next_peer_served() -> None:
    """What is sent here, only those can send who have the key, or are on this machine."""
    real = seeds.messages()["request"][1]
    deep = [asking(b"\x81\xa5model" + b"\x81\xa1a" * n + b"\xc0") for n in (330, 500, 985)]
    with an_engine() as engine:
        hostile = [
            *(asking(each) for each in (*HEADERS, *ODDITIES)),
            *deep,
            *GREEDY.values(),
            *(seeds.messages()[kind][0] for kind in ("reply", "release")),
        ]
        for data in hostile:
            with engine.speak() as caller:
                caller.sendall(framed(data))
        engine.check(grown_mib=64, refused=len(hostile))
        with engine.speak() as caller:
            for seed in range(300):
                caller.sendall(framed(mutated(real, seed)[:REQUEST_MAX_BYTES]))
                if not seed % 50:
                    engine.serve()
        engine.check(grown_mib=64, refused=len(hostile))


@pytest.mark.multi_process
def test_a_message_that_is_too_long_ends_the_connection_before_it_is_read() -> None:
    with an_engine() as engine:
        for promised in (REQUEST_MAX_BYTES + 1, 1 << 40, (1 << 63) - 1):
            with engine.speak() as caller:
                caller.sendall(b"\x02" + struct.pack(">Q", promised))
                assert not caller.recv(1)
        engine.check(grown_mib=8)


@pytest.mark.multi_process
def test_an_asker_that_never_reads_costs_a_few_answers_and_no_more() -> None:
    with an_engine() as engine:
        asked = framed(encode(MetadataRequest())) * 1000
        with contextlib.ExitStack() as stack:
            deaf = [stack.enter_context(engine.speak()) for _ in range(20)]
            for caller in deaf:
                caller.settimeout(0.2)
                with contextlib.suppress(TimeoutError):  # the engine takes no more of them
                    for _ in range(5):
                        caller.sendall(asked)
            for _ in range(10):  # while it answers what it was asked
                engine.serve()
                assert engine.look()["rss"] - engine.before["rss"] < 48
                time.sleep(0.2)
        engine.check(grown_mib=48)


@pytest.mark.multi_process
def test_requests_wait_in_the_memory_of_those_who_send_them() -> None:
    slow = framed(GREEDY["lists"])
    with an_engine() as engine, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(engine.speak()) for _ in range(8)]
        for caller in callers:
            caller.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                for _ in range(80):
                    caller.sendall(slow)
        assert engine.look()["rss"] - engine.before["rss"] < 64


@pytest.mark.full
@pytest.mark.multi_process
def test_connections_that_stay_half_open_are_ended_and_file_descriptors_come_back() -> None:
    import resource

    with an_engine() as engine:
        resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (100, 100))
        half_open = [engine.connect() for _ in range(150)]
        for caller in half_open:
            caller.sendall(b"\xff")
        time.sleep(11)  # the time that a greeting may take
        for _ in range(3):
            engine.serve()
        for caller in half_open:
            caller.close()
        engine.check(grown_mib=16)
