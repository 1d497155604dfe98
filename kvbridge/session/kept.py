"""The requests whose blocks this rank keeps for readers, and what it has promised of them."""

from collections.abc import Sequence
from typing import NamedTuple

from kvbridge.errors import BlockTableError, ConfigError
from kvbridge.handshake.messages import Release, Want
from kvbridge.plan import BlockTable
from kvbridge.session.computed import Computed, Ready
from kvbridge.session.leases import Lease, LeaseTable
from kvbridge.session.releases import ReleaseBook
from kvbridge.session.tokens import digest_of_ids


class _Promise(NamedTuple):
    """What is promised of a request, in which attempt its blocks were filled, and with what."""

    lease: Lease | None
    tables: Sequence[BlockTable]
    num_tokens: int
    attempt: int
    ids: bytes

    def is_of(self, want: Want) -> bool:
        """Whether its tokens are those of a want, as far as both sides say which ones they are."""
        if not (self.ids and want.tokens_digest):
            return True
        return want.tokens_digest == digest_of_ids(self.ids, want.end_token)


class Kept:
    """What is kept until all its readers have reported, or until it expires.

    Attributes:
        computed: What is there of requests that are not kept yet, since they have not finished.
    """

    def __init__(self, leases: LeaseTable, releases: ReleaseBook) -> None:
        """Keep nothing yet.

        Args:
            leases: Where readers see what is promised.
            releases: Counts the readers that are done.
        """
        self._leases, self._releases = leases, releases
        self.computed = Computed()
        self._promises: dict[str, _Promise] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._promises)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's blocks are kept."""
        return request_id in self._promises

    def hold(
        self,
        request_id: str,
        lease: Lease | None,
        tables: Sequence[BlockTable],
        num_tokens: int,
        ids: bytes = b"",
    ) -> bool:
        """Keep a request's blocks; see :meth:`RankAgent.hold`."""
        attempt = self.computed.finish(request_id, tables, num_tokens)
        if self._releases.hold(request_id):
            return True
        if lease is not None:
            self._leases.grant(lease)
        self._promises[request_id] = _Promise(lease, tables, num_tokens, attempt, ids)
        return False

    def refuse(self, request_id: str, lease: Lease | None) -> None:
        """Do not keep a request's blocks, and let its readers know."""
        if lease is not None:
            self._leases.refuse(lease)
        self.computed.forget(request_id)
        self._releases.expire(request_id)

    def expire(self, request_id: str) -> None:
        """Keep a request's blocks no longer, whoever has not reported."""
        self.computed.forget(request_id)
        self._revoke(request_id)
        self._releases.expire(request_id)

    def report(self, release: Release) -> bool:
        """Take note that a reader is done; whether the blocks are free by that."""
        if not self._releases.report(release):
            return False
        self._revoke(release.request_id)
        return True

    def clear(self) -> None:
        """Promise nothing any more."""
        self._leases.revoke_all()
        self._promises.clear()
        self.computed.clear()

    def tables(self, request_id: str, epoch: int | None) -> Sequence[BlockTable]:
        """Return the blocks of a request that is held.

        Raises:
            ConfigError: Another promise is meant than that for the request that is held.
        """
        return self._promise(request_id, epoch).tables

    def attempt(self, request_id: str) -> int:
        """Return in which attempt a held request's blocks were filled."""
        return self._promises[request_id].attempt

    def ready_for(self, want: Want) -> Ready | None:
        """Return what can be written now for a want; None if nothing is held or computed.

        Raises:
            ConfigError: Another promise is meant than that for the request that is held, or other
                tokens than those of it.
            BlockTableError: It has finished with fewer tokens than are wanted.
        """
        if want.request_id not in self:
            return self.computed.ready(want.request_id, want.end_token)
        promise = self._promise(want.request_id, want.epoch)
        if want.end_token > promise.num_tokens:
            raise BlockTableError(
                f"tokens [{want.start_token}, {want.end_token}) are wanted, {promise.num_tokens} "
                "have been computed; give the reader their number as remote_num_tokens"
            )
        if not promise.is_of(want):
            raise ConfigError(
                f"the first {want.end_token} tokens of request {want.request_id!r} are others than "
                "those that the reader has; give each request a transfer_id of its own"
            )
        return Ready(promise.tables, want.end_token, promise.attempt, is_all=True)

    def _promise(self, request_id: str, epoch: int | None) -> _Promise:
        promise = self._promises[request_id]
        if epoch is not None and (promise.lease is None or promise.lease.epoch != epoch):
            raise ConfigError(
                f"request {request_id!r} is held under another lease than the reader knows"
            )
        return promise

    def _revoke(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        if promise is not None and promise.lease is not None:
            self._leases.revoke(promise.lease)
