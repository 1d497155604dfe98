"""The demo from end to end: prefill here, decode there, and nobody can tell."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbridge.config import check_timeout
from kvbridge.demo.cache import PageAllocator
from kvbridge.demo.cluster import Cluster
from kvbridge.demo.engine import pages_needed
from kvbridge.demo.messages import (
    AwaitRelease,
    Connect,
    Decode,
    Dump,
    Dumped,
    Prefill,
    Pull,
    Pulled,
    RankSpec,
)
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.shape import EngineShape, layer_range
from kvbridge.errors import ConfigError
from kvbridge.handshake import HandshakeServer, gather_handshake_metadata
from kvbridge.model import Rank
from kvbridge.transport import check_transport

PROMPT_MAX_BYTES = 4096
LAYERS_MAX = 256
HEADS_MAX = 256
TOKENS_MAX = 100_000
PAGE_MAX_TOKENS = 4096
RANKS_MAX = 64
STEPS = ("start", "connect", "prefill", "pull", "compare", "decode", "reference", "stop")

DEFAULT_PROMPT = b"""\
A cache of keys and values is what a language model remembers of a text. One machine reads the
prompt and fills the cache; another one writes the answer. Between them the cache must travel:
split over other ranks, cut into other pages, laid out in another order, and yet the very same
bytes. If a single head lands in the wrong place, the answer is fluent, confident and wrong."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demo runs.

    Attributes:
        model: The model.
        prefill: Shape of the engine that reads the prompt.
        decode: Shape of the engine that writes the answer.
        prompt: The prompt, not empty.
        tokens: How many tokens to write.
        transport: Name of the transport.
        options: The transport's options.
        port: Port of the prefill engine's handshake server; 0 takes a free one.
        timeout_s: Longest wait for anything.

    Raises:
        ConfigError: The prompt or a number is out of range, or a shape does not fit the model.
    """

    model: ModelConfig
    prefill: EngineShape
    decode: EngineShape
    prompt: bytes = DEFAULT_PROMPT
    tokens: int = 32
    transport: str = "local"
    options: Mapping[str, Any] = field(default_factory=dict)
    port: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot run, before a process is started."""
        if not 1 <= len(self.prompt) <= PROMPT_MAX_BYTES:
            raise ConfigError(
                f"the prompt has {len(self.prompt)} bytes; the demo takes 1 to {PROMPT_MAX_BYTES}"
            )
        check_timeout(self.timeout_s, "timeout")
        check_transport({"transport": self.transport, "options": dict(self.options)})
        _check_bounds(self.model.layers, LAYERS_MAX, "layers of the model")
        _check_bounds(self.model.kv_heads, HEADS_MAX, "KV heads of the model")
        _check_bounds(self.tokens, TOKENS_MAX, "tokens to write")
        for shape in (self.prefill, self.decode):
            _check_bounds(shape.page, PAGE_MAX_TOKENS, "tokens of a page")
            _check_bounds(shape.pp * shape.tp, RANKS_MAX, "ranks of an engine, each a process,")
            try:
                layer_range(self.model.layers, shape.pp, 0)
            except ValueError as error:
                raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What came of it.

    Attributes:
        transport: The transport that was used.
        tokens: What the decode engine wrote.
        reference: What one unsplit engine writes.
        pulls: What each decode rank read, and how long that took.
        differing_bytes: Bytes of moved cells that are not the producer's.
        touched_ranks: Decode ranks where a byte changed that is no part of the request.
        plans: The plan of each decode rank, in words.
    """

    transport: str
    tokens: list[int]
    reference: list[int]
    pulls: dict[Rank, Pulled]
    differing_bytes: int
    touched_ranks: list[Rank]
    plans: dict[Rank, str]

    @property
    def equal(self) -> bool:
        """Whether nobody could tell that the cache has moved."""
        return self.tokens == self.reference and not self.differing_bytes and not self.touched_ranks

    def to_builtins(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "equal": self.equal,
            "tokens": self.tokens,
            "reference": self.reference,
            "transport": self.transport,
            "ranks": [
                {
                    "rank": list(rank),
                    "reads": [
                        {
                            "from": list(source.rank),
                            "nbytes": source.nbytes,
                            "copies": source.copies,
                            "merged": source.merged,
                        }
                        for source in pulled.sources
                    ],
                    "seconds": pulled.seconds,
                }
                for rank, pulled in sorted(self.pulls.items())
            ],
        }


def _check_bounds(value: int, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{value} {what} are not possible here; choose 1 to {most}")


def _ignore(_step: str) -> None:
    pass


def run_demo(config: DemoConfig, *, on_step: Callable[[str], None] = _ignore) -> DemoReport:
    """Run two engines of different shape, move the cache, and compare with one engine.

    Args:
        config: What to run.
        on_step: Called with the name of each step of :data:`STEPS` as it begins.

    Raises:
        ConfigError: Something in the configuration cannot be.
        TransportError: The transport is unknown or cannot run here.
        HandshakeError: The handshake port cannot be bound.
        DemoError: A rank failed or died.
    """
    server = HandshakeServer(port=config.port)
    cluster = Cluster()
    try:
        return _run(config, server, cluster, on_step)
    finally:
        cluster.kill()
        server.close()


def _spec(name: str, config: DemoConfig, shape: EngineShape) -> RankSpec:
    return RankSpec(
        engine_id=f"{name}-{uuid.uuid4().hex[:8]}",
        incarnation=uuid.uuid4().hex,
        model=config.model,
        shape=shape,
        pages=_pages(config, shape),
        transport=config.transport,
        options=dict(config.options),
        timeout_s=config.timeout_s,
    )


def _pages(config: DemoConfig, shape: EngineShape) -> int:
    """Return twice what the request needs: half of the cache must come out untouched."""
    return 2 * pages_needed(len(config.prompt), config.tokens, shape.page) + 2


def _run(
    config: DemoConfig,
    server: HandshakeServer,
    cluster: Cluster,
    on_step: Callable[[str], None],
) -> DemoReport:
    on_step("start")
    prefill = cluster.start("prefill", _spec("prefill", config, config.prefill))
    decode = cluster.start("decode", _spec("decode", config, config.decode))
    unsplit = cluster.start("unsplit", _spec("unsplit", config, EngineShape()))
    producers, consumers, _ = cluster.gather(prefill, decode, unsplit)
    server.set_xfer_handshake_metadata_pp_aware(
        gather_handshake_metadata([producers], pp_size=config.prefill.pp, tp_size=config.prefill.tp)
    )
    on_step("connect")
    engine_id = prefill.spec.engine_id
    plans = cluster.ask(decode, Connect(server.host, server.port, engine_id, consumers))
    on_step("prefill")
    request_id, moved = "request-0", len(config.prompt) - 1
    there = _allocate(config, config.prefill, seed=1)
    cluster.ask(prefill, Prefill(request_id, there, config.prompt[:-1]))
    on_step("pull")
    here = _allocate(config, config.decode, seed=2)
    pulls = cluster.ask(decode, Pull(engine_id, request_id, here, there, moved))
    on_step("compare")
    cluster.ask(prefill, AwaitRelease(request_id))
    given = cluster.ask(prefill, Dump(there, moved))
    differing, touched = _compare(given, cluster.ask(decode, Dump(here, moved)))
    on_step("decode")
    written = cluster.ask(decode, Decode(here, config.prompt, config.tokens))
    on_step("reference")
    alone = _allocate(config, unsplit.spec.shape, seed=3)
    cluster.ask(unsplit, Prefill(request_id, alone, config.prompt[:-1]))
    reference = cluster.ask(unsplit, Decode(alone, config.prompt, config.tokens))[0, 0]
    on_step("stop")
    cluster.stop()
    return DemoReport(
        transport=config.transport,
        tokens=written[0, 0],
        reference=reference,
        pulls=pulls,
        differing_bytes=differing,
        touched_ranks=touched,
        plans=plans,
    )


def _allocate(config: DemoConfig, shape: EngineShape, seed: int) -> list[int]:
    needed = pages_needed(len(config.prompt), config.tokens, shape.page)
    return PageAllocator(_pages(config, shape), seed).allocate(needed)


def _compare(given: Mapping[Rank, Dumped], taken: Mapping[Rank, Dumped]) -> tuple[int, list[Rank]]:
    """Compare every cell that was moved with every rank that holds the original."""
    originals = [dumped.cells for dumped in given.values()]
    differing = 0
    for dumped in taken.values():
        for key, parts in dumped.cells.items():
            for original in (cells[key] for cells in originals if key in cells):
                for mine, theirs in zip(parts, original, strict=True):
                    differing += int((mine.view("u1") != theirs.view("u1")).sum())
    touched = [rank for rank, dumped in taken.items() if not dumped.rest_is_untouched]
    return differing, touched
