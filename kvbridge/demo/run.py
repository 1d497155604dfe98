"""The demo from end to end: prefill here, decode there, and nobody can tell."""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbridge.config import check_timeout
from kvbridge.connector import Connector, Request, connector_configs, scheduler_connector
from kvbridge.demo.cache import PageAllocator
from kvbridge.demo.cluster import Cluster, Engine
from kvbridge.demo.engine import pages_needed
from kvbridge.demo.messages import (
    AwaitLoad,
    AwaitSent,
    Decode,
    Dump,
    Dumped,
    Prefill,
    Pulled,
    RankSpec,
    Step,
)
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.shape import EngineShape, layer_range
from kvbridge.errors import ConfigError
from kvbridge.handshake import gather_handshake_metadata, hand_over
from kvbridge.model import Rank
from kvbridge.transport import check_transport

PROMPT_MAX_BYTES = 4096
LAYERS_MAX = 256
HEADS_MAX = 256
TOKENS_MAX = 100_000
PAGE_MAX_TOKENS = 4096
RANKS_MAX = 64
STEPS = ("start", "prefill", "pull", "compare", "decode", "reference", "stop")

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
        transports: Names of the transports, in the order in which they are tried.
        options: The options of each transport, by its name.
        broken: Transports that fail on the side that reads.
        direction: Who moves the bytes, as in the configuration of a connector.
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
    transports: tuple[str, ...] = ("local",)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    direction: str = "auto"
    port: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot run, before a process is started."""
        if not 1 <= len(self.prompt) <= PROMPT_MAX_BYTES:
            raise ConfigError(
                f"the prompt has {len(self.prompt)} bytes; the demo takes 1 to {PROMPT_MAX_BYTES}"
            )
        check_timeout(self.timeout_s, "timeout")
        for what, names in (("options for", self.options), ("to break", self.broken)):
            strangers = sorted(set(names) - set(self.transports))
            if strangers:
                raise ConfigError(
                    f"{what} {', '.join(strangers)}: not among the transports "
                    f"{', '.join(self.transports)}"
                )
        if self.broken and self.direction != "pull":
            object.__setattr__(self, "direction", self._pulled())
        connector_configs(self.connectors())
        for name in self.transports:
            check_transport(self._choice(name))
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

    def connectors(self, *, reads: bool = False) -> list[dict[str, Any]]:
        """Return what an engine's connector is made of.

        Args:
            reads: Whether it is the engine where transports may be broken.
        """
        connectors = []
        for i, name in enumerate(self.transports):
            choice = self._choice(name)
            if reads and name in self.broken:
                faults = [{"what": "fail", "share": 1.0}]
                choice = {
                    "transport": "faulty",
                    "options": {"inner": choice, "operations": faults},
                }
            port = self.port if i == 0 and not reads else 0
            connectors.append(
                {
                    **choice,
                    "name": name,
                    "direction": self.direction,
                    "timeout_s": self.timeout_s,
                    "lease_s": self.timeout_s,
                    "handshake": {"port": port, "timeout_s": self.timeout_s},
                }
            )
        return connectors

    def _pulled(self) -> str:
        """Return the direction in which what is broken would be used."""
        if self.direction == "push":
            raise ConfigError(
                f"reads of {', '.join(self.broken)} shall fail, and with direction 'push' there "
                "are none; leave one of the two out"
            )
        return "pull"

    def _choice(self, name: str) -> dict[str, Any]:
        return {"transport": name, "options": dict(self.options.get(name, {}))}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What came of it.

    Attributes:
        transport: The transports, in the order in which they are tried.
        tokens: What the decode engine wrote.
        reference: What one unsplit engine writes.
        pulls: What each decode rank read, and how long that took.
        differing_bytes: Bytes of moved cells that are not the producer's.
        touched_ranks: Decode ranks where a byte changed that is no part of the request.
    """

    transport: str
    tokens: list[int]
    reference: list[int]
    pulls: dict[Rank, Pulled]
    differing_bytes: int
    touched_ranks: list[Rank]

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
                    "via": pulled.via,
                    "failovers": [list(each) for each in pulled.failovers],
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
    cluster = Cluster()
    schedulers: list[Connector] = []
    try:
        return _run(config, schedulers, cluster, on_step)
    finally:
        cluster.kill()
        for scheduler in schedulers:
            scheduler.shutdown()


def _spec(name: str, config: DemoConfig, shape: EngineShape, **which: bool) -> RankSpec:
    return RankSpec(
        engine_id=f"{name}-{uuid.uuid4().hex[:8]}",
        incarnation=uuid.uuid4().hex,
        model=config.model,
        shape=shape,
        pages=_pages(config, shape),
        connectors=config.connectors(**which),
        timeout_s=config.timeout_s,
    )


def _scheduler(spec: RankSpec) -> Connector:
    return scheduler_connector(spec.connectors, engine_id=spec.engine_id, pp_size=spec.shape.pp)


def _pages(config: DemoConfig, shape: EngineShape) -> int:
    """Return twice what the request needs: half of the cache must come out untouched."""
    return 2 * pages_needed(len(config.prompt), config.tokens, shape.page) + 2


def _run(
    config: DemoConfig,
    schedulers: list[Connector],
    cluster: Cluster,
    on_step: Callable[[str], None],
) -> DemoReport:
    on_step("start")
    given, taken = (
        _spec("prefill", config, config.prefill),
        _spec("decode", config, config.decode, reads=True),
    )
    schedulers.extend(map(_scheduler, (given, taken)))
    producer, consumer = schedulers
    prefill = cluster.start("prefill", given)
    decode = cluster.start("decode", taken)
    unsplit = cluster.start("unsplit", _spec("unsplit", config, EngineShape()))
    metadata = cluster.gather(prefill, decode, unsplit)
    for scheduler, published, shape in (
        (producer, metadata[0], config.prefill),
        (consumer, metadata[1], config.decode),
    ):
        gathered = gather_handshake_metadata([published], pp_size=shape.pp, tp_size=shape.tp)
        hand_over(scheduler, gathered)
    on_step("prefill")
    moved = len(config.prompt) - 1
    there = _allocate(config, config.prefill, seed=1)
    cluster.ask(prefill, Prefill(there, config.prompt[:-1]))
    finished = Request("request-0", moved, moved, {"do_remote_decode": True})
    _, params = producer.request_finished(finished, (tuple(there),))
    cluster.ask(prefill, Step(producer.build_connector_meta()))
    on_step("pull")
    here = _allocate(config, config.decode, seed=2)
    pulls = _pull(cluster, decode, consumer, Request("request-0", moved, params=params), here)
    on_step("compare")
    if moved:
        cluster.ask(prefill, AwaitSent(finished.request_id))
    originals = cluster.ask(prefill, Dump(there, moved))
    differing, touched = _compare(originals, cluster.ask(decode, Dump(here, moved)))
    on_step("decode")
    written = cluster.ask(decode, Decode(here, config.prompt, config.tokens))
    on_step("reference")
    alone = _allocate(config, unsplit.spec.shape, seed=3)
    cluster.ask(unsplit, Prefill(alone, config.prompt[:-1]))
    reference = cluster.ask(unsplit, Decode(alone, config.prompt, config.tokens))[0, 0]
    on_step("stop")
    cluster.stop()
    return DemoReport(
        transport=",".join(config.transports),
        tokens=written[0, 0],
        reference=reference,
        pulls=pulls,
        differing_bytes=differing,
        touched_ranks=touched,
    )


def _pull(
    cluster: Cluster, decode: Engine, scheduler: Connector, request: Request, here: list[int]
) -> dict[Rank, Pulled]:
    """Have the decode engine load a request, as a scheduler does."""
    tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, (tuple(here),), tokens or 0)
    cluster.ask(decode, Step(scheduler.build_connector_meta()))
    if not tokens:
        return {rank: Pulled((), 0.0, "", [], "") for rank in decode.ranks}
    return cluster.ask(decode, AwaitLoad(request.request_id))


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
