"""What the ranks of an engine report, put together: an end counts once all have reported it."""

from collections import defaultdict
from collections.abc import Iterable

from kvbridge.connector.values import Loaded, WorkerReport
from kvbridge.model import Rank


class ReportGatherer:
    """Gathers reports, keyed by the rank that made them: one that reports twice is one rank.

    Attributes:
        repeated: Reports of what the same rank had reported before.
    """

    def __init__(self, ranks: Iterable[Rank]) -> None:
        """Take the ranks that must report."""
        self._ranks = frozenset(ranks)
        self._loaded: dict[str, dict[Rank, Loaded]] = defaultdict(dict)
        self._sent: dict[str, dict[Rank, bool]] = defaultdict(dict)  # and whether it expired
        self.repeated = 0

    def add(self, rank: Rank, report: WorkerReport) -> None:
        """Take what a rank has reported."""
        for request_id, loaded in report.loaded.items():
            self.repeated += rank in self._loaded[request_id]
            self._loaded[request_id][rank] = loaded
        for request_id in report.sent:
            self.repeated += rank in self._sent[request_id]
            self._sent[request_id][rank] = request_id in report.expired

    def take(self) -> WorkerReport:
        """Return what has ended on every rank, once; a load that failed on one has failed."""
        loaded = {}
        for request_id in [r for r, by in self._loaded.items() if by.keys() >= self._ranks]:
            by_rank = self._loaded.pop(request_id)
            failed = [(rank, each) for rank, each in sorted(by_rank.items()) if each.error]
            loaded[request_id] = Loaded(
                "; ".join(f"rank {rank}: {each.error}" for rank, each in failed),
                ", ".join(sorted({each.via for each in by_rank.values()})),
                tuple(source for _, each in sorted(by_rank.items()) for source in each.sources),
                max(each.seconds for each in by_rank.values()),
                failed[0][1].cause if failed else "",
                bool(failed) and all(each.recompute for _, each in failed),
            )
        sent, expired = set(), set()
        for request_id in [r for r, by in self._sent.items() if by.keys() >= self._ranks]:
            sent.add(request_id)
            if any(self._sent.pop(request_id).values()):
                expired.add(request_id)
        return WorkerReport(loaded, frozenset(sent), frozenset(expired))
