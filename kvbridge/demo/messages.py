"""What the demo's parent and its rank processes say to each other, over a pipe of their own."""

from dataclasses import dataclass
from typing import Any

from kvbridge.demo.cache import Halves
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.shape import EngineShape
from kvbridge.session import SourceStats


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank process must know to come up.

    Attributes:
        engine_id: The engine it belongs to.
        incarnation: Which start of that engine.
        model: The model that both engines run.
        shape: How the engine is split and lays out its cache.
        pages: Pages of its cache.
        connectors: What its connector is made of; see ``connector_configs``.
        timeout_s: Longest wait for anything.
    """

    engine_id: str
    incarnation: str
    model: ModelConfig
    shape: EngineShape
    pages: int
    connectors: list[dict[str, Any]]
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the cache of a prompt."""

    page_ids: list[int]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """Do what the engine's scheduler asks of its ranks in one step."""

    metadata: object


@dataclass(frozen=True, slots=True)
class AwaitLoad:
    """Wait until the load of a request has ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Dump:
    """Send what the cache holds for a request's tokens."""

    page_ids: list[int]
    tokens: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Continue a prompt whose cache is there."""

    page_ids: list[int]
    prompt: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class AwaitSent:
    """Wait until no reader needs a request's blocks any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the transport and end."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """How the load of a request went on one rank.

    Attributes:
        sources: What each rank of the other engine contributed.
        seconds: From the first read to the last.
        via: The connector that moved the bytes.
        failovers: Connectors that could not, and which one went on.
        plan: What was read from whom, in words.
    """

    sources: tuple[SourceStats, ...]
    seconds: float
    via: str
    failovers: list[tuple[str, str]]
    plan: str


@dataclass(frozen=True, slots=True)
class Dumped:
    """The cache of some tokens, by layer and head.

    Attributes:
        cells: For ``(layer, head)`` K and V, float16 [tokens, content] each.
        rest_is_untouched: Whether every other byte of the cache is as it was at the start.
    """

    cells: dict[tuple[int, int], tuple[Halves, Halves]]
    rest_is_untouched: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Something went wrong in the rank.

    Attributes:
        kind: Name of the error's class.
        message: What it says.
    """

    kind: str
    message: str
