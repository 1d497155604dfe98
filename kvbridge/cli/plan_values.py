"""What ``kvbridge plan`` says, as values; written as they are, they are its JSON."""

import msgspec

from kvbridge.model import Rank
from kvbridge.plan.values import Direction

REPORT_VERSION = 1


class Units(msgspec.Struct, frozen=True):
    """Units ``[start, end)`` of the ``total`` of a component."""

    component: str
    start: int
    end: int
    total: int


class Share(msgspec.Struct, frozen=True):
    """A part of the cache of one cache group.

    Attributes:
        kind: Kind of the cache group.
        layers: Global indices of the layers.
        units: What of each of them.
    """

    kind: str
    layers: tuple[int, ...]
    units: tuple[Units, ...]


class Copies(msgspec.Struct, frozen=True):
    """What a request takes.

    Attributes:
        pieces: Copies before neighbours are merged.
        merged: Copies after.
        nbytes: Bytes.
    """

    pieces: int = 0
    merged: int = 0
    nbytes: int = 0


class Move(Share, frozen=True):
    """What a rank exchanges with another one in one cache group.

    Attributes:
        form: ``"pages"``, ``"rows"``, ``"runs"``, ``"cells"`` or ``"state"``.
        piece_nbytes: Bytes of a copy before merging, on average.
        block: What one block of the consumer takes.
        scattered: What the request takes if no two blocks are neighbours.
        contiguous: What it takes if all are.
    """

    form: str
    piece_nbytes: int
    block: Copies
    scattered: Copies
    contiguous: Copies


class Link(msgspec.Struct, frozen=True):
    """All that a rank exchanges with one remote rank."""

    rank: Rank
    moves: tuple[Move, ...]


class RankReport(msgspec.Struct, frozen=True):
    """The plan of one rank.

    Attributes:
        rank: Coordinate of the rank.
        links: The remote ranks that it exchanges bytes with.
        notify_only: The remote ranks that it only tells.
        scattered: What the request takes with all of them if no two blocks are neighbours.
        contiguous: What it takes if all are.
    """

    rank: Rank
    links: tuple[Link, ...]
    notify_only: tuple[Rank, ...]
    scattered: Copies
    contiguous: Copies


class RankHolding(msgspec.Struct, frozen=True):
    """What one rank holds."""

    rank: Rank
    shares: tuple[Share, ...]


class Side(msgspec.Struct, frozen=True):
    """One engine: its shape, as given on the command line, and who holds what."""

    shape: str
    ranks: tuple[RankHolding, ...]


class Reader(msgspec.Struct, frozen=True):
    """How many ranks of the acting engine report to a remote rank."""

    rank: Rank
    count: int


class PlanReport(msgspec.Struct, frozen=True):
    """The whole.

    Attributes:
        version: Version of this document.
        model: Name of the model.
        source: Where its figures were published.
        direction: ``"read"``: the decode engine acts; ``"write"``: the prefill engine does.
        tokens: Tokens of the request.
        layers: Layers of the model.
        prefill: The producer.
        decode: The consumer.
        ranks: The plans of the acting engine's ranks.
        readers: Who hears from how many of them.
        scattered: Sum over ``ranks``.
        contiguous: Sum over ``ranks``.
    """

    version: int
    model: str
    source: str
    direction: Direction
    tokens: int
    layers: int
    prefill: Side
    decode: Side
    ranks: tuple[RankReport, ...]
    readers: tuple[Reader, ...]
    scattered: Copies
    contiguous: Copies
