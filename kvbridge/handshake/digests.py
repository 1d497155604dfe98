"""What ranks say to each other to compare what a request's blocks hold on both sides."""

from itertools import pairwise

import msgspec

from kvbridge.errors import PlanError
from kvbridge.handshake.reader_note import ReaderNote
from kvbridge.plan import Probe

DIGEST_NBYTES = 8


class DigestRequest(ReaderNote, frozen=True, kw_only=True, tag="digests?"):
    """Asks a producer rank for digests of what a request's blocks hold there.

    Attributes:
        probes: Which cells, in which chunks.
    """

    probes: tuple[Probe, ...] = ()

    def __post_init__(self) -> None:
        """Refuse to have cells digested again and again for one question."""
        cells = sorted(
            (c.layer, c.name, c.component, c.unit_start, c.unit_end)
            for c in (probe.cells for probe in self.probes)
        )
        for (*one, _, end), (*other, start, _) in pairwise(cells):
            if one == other and start < end:
                layer, name, component = one
                raise PlanError(
                    f"unit {start} of layer {layer} {name!r}, component {component!r}, is asked "
                    "for twice; ask for each cell once"
                )


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Answers a :class:`DigestRequest`, or says why it cannot be answered.

    Attributes:
        number: That of the question.
        values: Digests of eight bytes, little-endian, one for each chunk of each probe.
        reason: Why there are none; empty if there are.
        cause: The same in a word.
    """

    number: int
    values: bytes = b""
    reason: str = ""
    cause: str = ""
