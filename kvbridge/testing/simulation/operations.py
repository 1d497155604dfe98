"""Reads and writes on their way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbridge.testing.simulation.memory import Arena
from kvbridge.transport import Handle

if TYPE_CHECKING:
    from kvbridge.testing.simulation.transport import SimulatedAgent


@dataclass(slots=True, eq=False)
class Operation:
    """A read or a write on its way.

    Attributes:
        number: Number of the operation.
        handle: What its owner has of it.
        owner: Who reads or writes.
        remote: The other agent.
        pieces: Source, destination and length of each piece, in the portions in which they land.
        lands: Blocks that it may still write to, as bits.
        takes: Blocks that it reads, as bits.
        source: The cache that it reads.
        target: The cache that it writes to.
        done: Portions that have landed.
        fails_after: Portions after which it fails.
        hangs_after: Portions after which nothing happens any more.
        dropped: Whether its peer was dropped meanwhile.
        over: Whether it has ended.
        disowned: Whether what it reads was taken away from its request.
    """

    number: int
    handle: Handle
    owner: "SimulatedAgent"
    remote: "SimulatedAgent"
    pieces: list[list[tuple[int, int, int]]]
    lands: int
    takes: int
    source: Arena
    target: Arena
    done: int = 0
    fails_after: int | None = None
    hangs_after: int | None = None
    dropped: bool = False
    over: bool = False
    disowned: bool = False

    @property
    def is_read(self) -> bool:
        """Whether its bytes come to its owner."""
        return self.handle.op == "read"

    @property
    def reader(self) -> "SimulatedAgent":
        """To whom the bytes come."""
        return self.owner if self.is_read else self.remote

    @property
    def giver(self) -> "SimulatedAgent":
        """Whose bytes they are."""
        return self.remote if self.is_read else self.owner

    @property
    def targets(self) -> set[int]:
        """Where its pieces go."""
        return {target for portion in self.pieces for _, target, _ in portion}

    def __str__(self) -> str:
        """Say what it does."""
        verb = "reads from" if self.is_read else "writes to"
        return f"{self.owner.where} {verb} {self.remote.where} (operation {self.number})"


@dataclass(slots=True, eq=False)
class Ask:
    """What a reader has asked another rank to write, until it has heard the answer.

    Attributes:
        number: The reader's number for it.
        reader: Who has asked.
        giver: Who is to write.
        lands: Blocks of the reader that are to be written, as bits; none if it is packed.
        target: The cache that they are in.
        into: From where to where it is to be written packed; empty if it is not.
        begun: Where writes for its sake land, piece by piece.
        lost: Whether what they were read from was taken away since, so that they come once more.
        withdrawn: Whether the other one has heard that nobody waits for it any more.
        answered: Whether the other one has said that it touches them no more.
    """

    number: int
    reader: "SimulatedAgent"
    giver: "SimulatedAgent"
    lands: int
    target: Arena
    into: range = range(0)
    begun: set[int] = field(default_factory=set)
    lost: bool = False
    withdrawn: bool = False
    answered: bool = False

    def may_land(self, op: Operation) -> bool:
        """Whether a write goes nowhere else than where this wants something."""
        if op.target is not self.target:
            return False
        if self.into:
            return op.targets <= set(self.into)
        return bool(op.lands) and not op.lands & ~self.lands

    def meets(self, op: Operation) -> bool:
        """Whether a write goes where this wants something."""
        if op.target is not self.target:
            return False
        return bool(op.lands & self.lands) or not op.targets.isdisjoint(self.into)


def blocks_in(ids: Sequence[int], start_token: int, end_token: int, block_tokens: int) -> int:
    """Return the blocks that hold some tokens, as bits."""
    mask = 0
    for block in ids[start_token // block_tokens : -(-end_token // block_tokens)]:
        mask |= 1 << block
    return mask
