"""What the demo's parent and its rank processes say to each other, over a pipe of their own."""

from dataclasses import dataclass, field
from typing import Any

from kvbridge.demo.cache import Halves
from kvbridge.demo.model import ModelConfig
from kvbridge.demo.shape import EngineShape
from kvbridge.handshake import HandshakeMetadata
from kvbridge.model import Rank
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
        transport: Name of the transport.
        options: The transport's options.
        timeout_s: Longest wait for anything.
    """

    engine_id: str
    incarnation: str
    model: ModelConfig
    shape: EngineShape
    pages: int
    transport: str
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the cache of a prompt and hold it for its readers."""

    request_id: str
    page_ids: list[int]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Shake hands with the engine behind an address."""

    host: str
    port: int
    engine_id: str
    local_engine: dict[Rank, HandshakeMetadata]


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the cache of a request's tokens."""

    engine_id: str
    request_id: str
    page_ids: list[int]
    remote_page_ids: list[int]
    tokens: int


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
class AwaitRelease:
    """Wait until every reader of a request has reported."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the transport and end."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a pull went."""

    sources: list[SourceStats]
    seconds: float


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
