"""What a seed stands for: the engines, their shapes, the traffic, and all that goes wrong."""

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Literal

from kvbridge.connector.values import OnFailure
from kvbridge.session.leases import SLOTS

LAYERS = 2
TOKENS_MAX = 64
TOKENS_MEAN = 20
SERVED_S = 0.4
"""About how long a request has blocks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        page_tokens: Tokens of a page.
        pages_per_block: Pages of a block.
        blocks: Blocks of the cache.
        axes: Order of the axes in a layer's array.
        role: Whether it prefills, decodes, or does both.
    """

    tp: int
    pp: int
    page_tokens: int
    pages_per_block: int
    blocks: int
    axes: str
    role: str

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.page_tokens * self.pages_per_block


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each fault is, at each occasion; of engines, how often in a second.

    Attributes:
        move_slow: A read or a write takes up to some times as long as a load may.
        move_fails: It fails, perhaps with a part of its bytes landed.
        move_hangs: It never ends, until its peer is dead or its engine closed.
        move_refused: The transport says at once that the peer is lost.
        zombie: Memory that is no longer registered can be read all the same.
        notice_lost: A notice does not arrive.
        notice_twice: It arrives twice.
        notice_late: It arrives seconds later.
        notice_very_late: It arrives an hour later.
        notice_garbled: It arrives as something else.
        notice_refused: The transport says at once that it could not be sent.
        ask_fails: The handshake server refuses.
        ask_silent: It does not answer.
        ask_stale: It answers what had been published before; of renewals, long ago.
        join_slow: Adding a peer takes nearly as long as it may.
        join_fails: The peer cannot be added.
        kill: An engine is killed, and starts again at the same address.
        wake: An engine takes another cache.
        wake_busy: It does so though loads are on their way.
        stall: A step takes seconds.
        drain: An engine is drained, ended in order, and started again.
        abort: A request is aborted at some time.
        never_comes: Nobody asks for what was prefilled.
        comes_late: Somebody does, after a while.
        elsewhere: A request that failed is tried in another engine, with the same params.
        again: A request that failed begins anew, under the same id.
        turns_back: A decoded request goes on to a third engine.
        preempted: A running request loses its blocks.
        full: An engine has no place for anything new, for up to some leases.
    """

    move_slow: float = 0.03
    move_fails: float = 0.03
    move_hangs: float = 0.004
    move_refused: float = 0.01
    zombie: float = 0.5
    notice_lost: float = 0.03
    notice_twice: float = 0.05
    notice_late: float = 0.02
    notice_very_late: float = 0.01
    notice_garbled: float = 0.01
    notice_refused: float = 0.01
    ask_fails: float = 0.05
    ask_silent: float = 0.05
    ask_stale: float = 0.1
    join_slow: float = 0.2
    join_fails: float = 0.03
    kill: float = 0.03
    wake: float = 0.05
    wake_busy: float = 0.5
    stall: float = 0.004
    drain: float = 0.05
    abort: float = 0.06
    never_comes: float = 0.02
    comes_late: float = 0.03
    elsewhere: float = 0.3
    again: float = 0.3
    turns_back: float = 0.1
    preempted: float = 0.01
    full: float = 0.05

    def drawn(self, rng: Random) -> "Faults":
        """Return some of them, all of them, or none, each as likely or more so, or less."""
        if rng.random() < 0.15:
            return replace(
                self, **{each.name: 0.0 for each in fields(self) if each.name not in CLIENTS}
            )
        scale = rng.choice((0.25, 0.5, 1.0))
        left_out = {
            kind
            for kind in ("move", "notice", "ask", "join", "kill", "wake", "drain")
            if rng.random() < 0.2
        }
        return replace(
            self,
            **{
                each.name: min(getattr(self, each.name) * scale, 1.0) * (rng.random() < 0.8)
                for each in fields(self)
                if each.name.partition("_")[0] not in left_out
            },
            **{each.name: 0.0 for each in fields(self) if each.name.partition("_")[0] in left_out},
        )

    @property
    def calm(self) -> bool:
        """Whether nothing goes wrong but what clients do."""
        return not any(
            getattr(self, each.name) for each in fields(self) if each.name not in CLIENTS
        )


CLIENTS = {
    *("abort", "never_comes", "comes_late", "elsewhere", "again", "turns_back", "preempted"),
    "full",
}
"""Faults that are none of the plant's."""

Way = Literal["auto", "pull", "push"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a seed stands for.

    Attributes:
        seed: The seed.
        requests: How many there are.
        heads: KV heads of the model.
        shapes: The engines.
        children: Names of the connectors; several are one MultiConnector.
        slots: How many requests an engine can hold at once.
        descriptors_max: How many pieces the transport takes at once; 0 for any number.
        rate: Requests in a second.
        open_max: Requests at a time, as a proxy would have it.
        timeout_s: How long a load may take.
        lease_s: How long blocks are kept.
        lease_longest_s: How long in all, where they are asked for again and again.
        meet_s: How long an engine may take to answer.
        patience_s: How long a client waits.
        on_failure: Whether engines compute what could not be loaded.
        faults: What goes wrong.
        reads: Whether the transport can read.
        writes: Whether it can write.
        prefers_to_write: Whether it says that this is better.
        ways: Whether each engine reads what it loads, or has it written.
        notify_max_bytes: Largest notice; where what cannot be written may be read, long lists of
            blocks may not fit.
        ahead: How many requests are decoded by an engine that waits for them while they are
            computed.
        staging_nbytes: Memory of a rank for loads that are staged, a few pages; 0 for none.
        slow_work_s: How long cells may take now and then to be packed or put in their places; 0 if
            that is never slow.
    """

    seed: int
    requests: int
    heads: int
    shapes: tuple[Shape, ...]
    children: tuple[str, ...]
    slots: int
    descriptors_max: int
    rate: float
    open_max: int
    timeout_s: float
    lease_s: float
    lease_longest_s: float
    meet_s: float
    patience_s: float
    on_failure: OnFailure
    faults: Faults
    reads: bool
    writes: bool
    prefers_to_write: bool
    ways: tuple[Way, ...]
    notify_max_bytes: int
    ahead: float
    staging_nbytes: int
    slow_work_s: float

    @property
    def pushes(self) -> bool:
        """Whether any engine may have anything written."""
        return self.writes and (self.prefers_to_write or not self.reads or "push" in self.ways)

    @classmethod
    def of(cls, seed: int, requests: int) -> "Scenario":
        """Return what a seed stands for."""
        rng = Random(f"scenario {seed}")
        heads = rng.choice((2, 4))
        count = rng.choice((2, 3, 3, 4))
        both = rng.random() < 0.4
        shapes = tuple(
            draw_shape(rng, "both" if both else ("producer", "consumer")[i % 2])
            for i in range(count)
        )
        children = ("first", "second") if rng.random() < 0.2 else ("only",)
        timeout_s = rng.choice((0.5, 1.0, 1.5))
        tokens = min(
            sum(shape.blocks * shape.block_tokens for shape in shapes if shape.role != idle)
            for idle in ("consumer", "producer")
        )
        lease_s = rng.choice((1.0, 2.0, 4.0)) * timeout_s
        reads, writes = rng.choice(((True, True), (True, True), (True, False), (False, True)))
        # Who only reads does not write for others either: then nobody may rely on being written to.
        others: tuple[Way, ...] = ("pull", "push")
        other = rng.choice(others[not reads : 1 + writes])
        ways = tuple(rng.choice(("auto", other)) for _ in shapes)
        small = reads and "push" not in ways and rng.random() < 0.5
        can_wait = writes and "pull" not in ways and not small and len(children) == 1
        drawn = cls(
            seed=seed,
            requests=requests,
            heads=heads,
            shapes=shapes,
            children=children,
            slots=rng.choice((SLOTS, SLOTS, 24)),
            descriptors_max=rng.choice((0, 0, 3)),
            rate=rng.choice((0.3, 0.5, 0.8)) * tokens / (TOKENS_MEAN * SERVED_S),
            open_max=max(8, tokens // (2 * TOKENS_MEAN)),
            timeout_s=timeout_s,
            lease_s=lease_s,
            lease_longest_s=rng.choice((1.5, 3.0, 6.0)) * lease_s,
            meet_s=rng.choice((0.2, 0.5)),
            patience_s=rng.choice((6.0, 12.0)),
            on_failure="recompute" if rng.random() < 0.5 else "fail",
            faults=Faults().drawn(rng),
            reads=reads,
            writes=writes,
            prefers_to_write=rng.random() < 0.6,
            ways=ways,
            notify_max_bytes=210 if small else 1 << 16,
            # What is not computed yet must be written, and by one connector.
            ahead=0.4 if can_wait and seed % 4 == 1 else 0.0,
            staging_nbytes=Random(f"staging {seed}").choice((0, 0, 2048, 8192)),
            slow_work_s=2 * timeout_s if seed % 8 == 4 else 0.0,
        )
        if drawn.pushes and timeout_s < len(children):
            # To be packed a few pages at a time takes longer, even where nothing goes wrong.
            drawn = replace(drawn, staging_nbytes=0)
        if not drawn.faults.calm:
            return drawn
        # Nothing may fail here, not even loads for which two engines have to meet first.
        factor = 2.0 * len(children)
        return replace(
            drawn,
            timeout_s=factor * drawn.timeout_s,
            lease_s=factor * drawn.lease_s,
            lease_longest_s=factor * drawn.lease_longest_s,
            staging_nbytes=8 * drawn.staging_nbytes,  # nor those that would have to wait for it
            slow_work_s=0.0,
        )


def draw_shape(rng: Random, role: str) -> Shape:
    """Return some engine."""
    tp, pp = rng.choice(((1, 1), (1, 1), (2, 1), (2, 1), (4, 1), (4, 1), (1, 2), (2, 2)))
    page_tokens = rng.choice((4, 4, 8))
    return Shape(
        tp=tp,
        pp=pp,
        page_tokens=page_tokens,
        pages_per_block=rng.choice((1, 1, 2)),
        blocks=rng.choice((32, 48, 80)),
        axes=rng.choice(("BHNC", "BNHC", "KBNHC", "BKNHC")),
        role=role,
    )
