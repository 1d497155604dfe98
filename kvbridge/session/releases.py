"""The producer's side: which requests' blocks are still needed by whom."""

from collections import OrderedDict

from kvbridge.handshake.messages import Release
from kvbridge.model import Rank

Reader = tuple[str, str, Rank]
"""Engine id, incarnation and rank of a reader."""

_EARLY_MAX = 4096


class ReleaseBook:
    """Counts, for every request held, the distinct readers that are done with it.

    How many must report is in their plan and travels with each report. Reports that come before
    the request is held are kept, up to a bound (report B27); repeated ones change nothing.

    Attributes:
        duplicates: Reports by a reader that had reported already.
        forgotten: Early reports that fell out of the bound.
    """

    def __init__(self) -> None:
        """Start with nothing held."""
        self._held: set[str] = set()
        self._reports: OrderedDict[str, dict[Reader, int]] = OrderedDict()
        self.duplicates = 0
        self.forgotten = 0

    @property
    def held(self) -> frozenset[str]:
        """Requests whose blocks must stay as they are."""
        return frozenset(self._held)

    def hold(self, request_id: str) -> bool:
        """Keep a request's blocks for its readers.

        Returns:
            Whether all readers had reported already, so that the blocks are free at once.
        """
        self._held.add(request_id)
        return self._settle(request_id)

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self._held.discard(request_id)
        self._reports.pop(request_id, None)

    def report(self, release: Release) -> bool:
        """Note that a reader is done.

        Returns:
            Whether the request is held and this was the last reader, so that its blocks are free.
        """
        reports = self._reports.setdefault(release.request_id, {})
        reader = (release.engine_id, release.incarnation, release.rank)
        if reader in reports:
            self.duplicates += 1
            return False
        reports[reader] = release.readers
        if self._settle(release.request_id):
            return True
        if len(self._reports) > _EARLY_MAX:
            early = next((r for r in self._reports if r not in self._held), None)
            if early is not None:
                del self._reports[early]
                self.forgotten += 1
        return False

    def _settle(self, request_id: str) -> bool:
        if request_id not in self._held:
            return False
        reports = self._reports.get(request_id, {})
        if not reports or len(reports) < max(reports.values()):
            return False
        self._held.remove(request_id)
        del self._reports[request_id]
        return True
