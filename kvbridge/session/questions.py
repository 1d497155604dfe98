"""What a reader asks of a rank that bytes came from, to compare them with what that rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from kvbridge.errors import ConfigError
from kvbridge.handshake.digests import DIGEST_NBYTES, DigestRequest
from kvbridge.handshake.wire import encode
from kvbridge.model import RankCache
from kvbridge.plan import BlockTable, Probe, RegionPlan, probes_of, sample_probes

CheckMode = Literal["sampled", "full"]

SAMPLES = 16
"""So many chunks of each rank are compared, where not all are."""
CHUNK_TOKENS = 256
"""So many tokens share a digest, unless question and answer get too long."""
ANSWER_NBYTES = 64
"""An answer without its digests."""


@dataclass(frozen=True, slots=True)
class PayloadCheck:
    """What of a request is to be compared once it is here.

    Attributes:
        mode: Whether some chunks are compared, or all.
        tables: Where the tokens have gone.
        start_token: First token that was moved.
        end_token: One past the last one.
        asks: The question, without number and probes.
    """

    mode: CheckMode
    tables: Sequence[BlockTable]
    start_token: int
    end_token: int
    asks: DigestRequest


class Question(NamedTuple):
    """One that is ready to be sent.

    Attributes:
        note: As it is sent.
        probes: What it asks for.
    """

    note: bytes
    probes: tuple[Probe, ...]


def question(
    cache: RankCache,
    regions: Sequence[RegionPlan],
    check: PayloadCheck,
    asks: DigestRequest,
    most_nbytes: int,
) -> Question:
    """Return what one rank is asked, in chunks so long that question and answer can be sent.

    Args:
        cache: What this rank holds.
        regions: What the other one gives to it.
        check: What is to be compared.
        asks: The question, without probes.
        most_nbytes: The most that question or answer may have.

    Raises:
        ConfigError: One chunk for all tokens is too long still.
        BlockTableError: The tables do not cover the tokens.
        PlanError: The regions are not of this rank.
    """
    chunk_tokens = CHUNK_TOKENS
    while True:
        probes = probes_of(
            cache,
            regions,
            check.tables,
            start_token=check.start_token,
            end_token=check.end_token,
            chunk_tokens=chunk_tokens,
        )
        if check.mode == "sampled":
            probes = sample_probes(probes, SAMPLES, seed=asks.epoch or asks.number)
        answer_nbytes = ANSWER_NBYTES + DIGEST_NBYTES * sum(len(each.chunks) for each in probes)
        note = encode(replace(asks, probes=probes))
        nbytes = max(len(note), answer_nbytes)
        if nbytes <= most_nbytes:
            return Question(note, probes)
        if chunk_tokens >= check.end_token:
            raise ConfigError(
                f"a payload check of {len(probes)} ranges of cells takes notifications of {nbytes} "
                f"bytes, the transport takes {most_nbytes}; "
                + (
                    "set payload_check to 'sampled' or 'off'"
                    if check.mode == "full"
                    else "set payload_check to 'off'"
                )
            )
        chunk_tokens *= 2
