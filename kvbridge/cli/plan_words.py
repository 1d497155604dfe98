"""The figures of a plan in few words, for tables and pictures."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from kvbridge.cli.plan_values import PlanReport, Share
from kvbridge.model import Rank


def bands(numbers: Sequence[int]) -> list[range]:
    """Return sorted numbers as ranges of neighbours."""
    cuts = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    ends = pairwise((0, *cuts, len(numbers)))
    return [range(numbers[a], numbers[b - 1] + 1) for a, b in ends if b > a]


def words_of_numbers(numbers: Sequence[int]) -> str:
    """Return sorted numbers briefly: ``"0-39"``, ``"3-47 step 4"``, ``"0-61 (52)"``."""
    if not numbers:
        return "none"
    if len(numbers) == 1 or (len(numbers) == 2 and numbers[1] - numbers[0] > 1):
        return ", ".join(map(str, numbers))
    steps = Counter(b - a for a, b in pairwise(numbers))
    ends = f"{numbers[0]}-{numbers[-1]}"
    if len(steps) > 1:
        return f"{ends} ({len(numbers)})"
    (step,) = steps
    return ends if step == 1 else f"{ends} step {step}"


def words_of_units(share: Share) -> str:
    """Return the units of a share briefly: ``"heads 0-1"``, ``"latent"``, ``"state 0-7"``."""
    if share.kind == "state":
        heads = share.units[-1]
        return f"state {words_of_numbers(range(heads.start, heads.end))}"
    (start, end, total), *more = dict.fromkeys((u.start, u.end, u.total) for u in share.units)
    if more:
        return ", ".join(f"{u.component} {u.start}-{u.end - 1}" for u in share.units)
    if total == 1:
        return share.units[0].component
    word = "head" if end - start == 1 else "heads"
    return f"{word} {words_of_numbers(range(start, end))}"


def words_of_share(share: Share) -> str:
    """Return a share briefly: ``"layers 0-39, heads 0-1"``."""
    word = "layer" if len(share.layers) == 1 else "layers"
    return f"{word} {words_of_numbers(share.layers)}, {words_of_units(share)}"


def words_of_bytes(nbytes: int) -> str:
    """Return a number of bytes with a unit: ``"19.5 MiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def words_of_rank(rank: Rank, *, staged: bool = True) -> str:
    """Return a rank as people say it; without its stage where there is only one."""
    return f"pp {rank[0]} tp {rank[1]}" if staged else f"tp {rank[1]}"


def words_of_copies(report: PlanReport) -> list[str]:
    """Return how many copies a plan takes, in two lines."""
    apart, together = report.scattered, report.contiguous
    lines = [f"{report.tokens:,} tokens: {words_of_bytes(apart.nbytes)} in {apart.pieces:,} copies"]
    if together.merged == together.pieces:
        return [*lines, "none of them can be merged with its neighbours"]
    merged = f"{apart.merged:,} if blocks are scattered, {together.merged:,} if they are neighbours"
    return [*lines, f"merged: {merged}"]
