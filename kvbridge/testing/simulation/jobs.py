"""What clients want: jobs, and their legs in the engines that serve them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvbridge.connector import Request

if TYPE_CHECKING:
    from kvbridge.testing.simulation.engine import Engine

State = Literal["waiting", "loading", "running", "held", "over"]


@dataclass(slots=True, eq=False)
class Job:
    """One request of a client.

    Attributes:
        number: Which one.
        request_id: What engines call it; a client that begins anew keeps it.
        key: What its content is in a cell.
        tokens: Tokens of its prompt.
        due_s: Until when the client waits.
        outcome: How it ended; empty before.
        leg: Where it is.
        retried: Whether it may not be tried again.
        goes_to: The engine where it must be decoded; any if not given.
        goes_ahead: Whether an engine waits for it from the beginning.
    """

    number: int
    request_id: str
    key: int
    tokens: int
    due_s: float
    outcome: str = ""
    leg: "Leg | None" = None
    retried: bool = False
    goes_to: "Engine | None" = None
    goes_ahead: bool = False


class Offer(NamedTuple):
    """How readers know held blocks.

    Attributes:
        transfer_id: What they call them.
        slot: Which word of a rank's table says that they are held.
        epoch: What it says.
    """

    transfer_id: str
    slot: int
    epoch: int


@dataclass(slots=True, eq=False)
class Leg:
    """A job in one engine.

    Attributes:
        job: The job.
        engine: The engine.
        params: What the engine is given with it.
        tokens: Tokens to have in the end.
        hit: Of them, those that are here already.
        linger: Steps to decode.
        state: How it stands.
        blocks: Its blocks.
        computed: Tokens that are computed, or loaded.
        end: Up to which token it loads.
        aborted: Whether nobody wants it any more.
        error: Why it could not be loaded.
        generation: Of the engine's cache, when it got its blocks.
        told_s: Clock when its ranks were told to load it, or to hold it.
        begun_s: Clock when the last one has done so.
        kept_s: Clock until when its blocks may be held for readers.
        ended_s: Clock when its blocks were offered.
        asked_s: Clock when its engine first heard that something can be loaded for it.
        over_s: Clock when its engine was done with it.
        polls: Whole steps of the engine since it should have ended.
        offers: What its readers are told, by connector.
        until_s: Until when that is promised to be kept, by connector.
        expired: Whether a reader did not report.
    """

    job: Job
    engine: "Engine"
    params: dict[str, Any] | None
    tokens: int
    hit: int = 0
    linger: int = 0
    state: State = "waiting"
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    end: int = 0
    aborted: bool = False
    error: str = ""
    generation: int = 0
    told_s: float = float("inf")
    begun_s: float = float("inf")
    kept_s: float = 0.0
    ended_s: float = 0.0
    asked_s: float = float("inf")
    over_s: float = 0.0
    polls: int = 0
    offers: dict[str, Offer] = field(default_factory=dict)
    until_s: dict[str, float] = field(default_factory=dict)
    expired: bool = False

    @property
    def decodes(self) -> bool:
        """Whether another engine has prefilled it."""
        return bool(self.params and self.params.get("do_remote_prefill"))

    @property
    def source_id(self) -> str:
        """What the engine that has prefilled it, or is about to, calls it."""
        params = self.params or {}
        return str(params.get("remote_request_id") or params.get("transfer_id"))

    @property
    def goes_ahead(self) -> bool:
        """Whether an engine waits for it while it is computed."""
        return self.job.goes_ahead and not self.decodes

    @property
    def waits(self) -> bool:
        """Whether it is decoded by an engine that waits for it while it is computed."""
        return self.decodes and "transfer_id" in (self.params or {})

    @property
    def request(self) -> Request:
        """The request as a connector sees it."""
        return Request(
            self.job.request_id, self.tokens, self.computed, self.params, aborted=self.aborted
        )
