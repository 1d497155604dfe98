"""The reader's side of leases: proof that blocks were kept until they had been read."""

import numpy as np

from kvbridge.session.leases import WORD_NBYTES, Lease, LeaseTable, Standing
from kvbridge.session.operations import Operations
from kvbridge.session.transfer import Transfer
from kvbridge.transport import Descriptors


class Proofs:
    """Looks at the leases of what has been read."""

    def __init__(self, table: LeaseTable, operations: Operations) -> None:
        """Take the table in which others' words land, and what reads them."""
        self._table, self._operations = table, operations

    def are_awaited(self, transfer: Transfer, now_s: float) -> bool:
        """Whether the word of a transfer's lease must be looked at still; begins to.

        Fails what was not kept.
        """
        lease = transfer.lease
        if lease is None or transfer.reason:
            return False
        standing = self.standing(transfer, lease)
        if standing == "not yet" and now_s < transfer.deadline_s:
            self.look(transfer, lease)
            return True
        if standing != "kept":
            transfer.fail(
                f"engine {transfer.session.engine_id!r} had not kept the blocks of request "
                f"{transfer.request_id!r} until they were read: its lease "
                + ("was over" if standing == "over" else "had not begun"),
                "lease",
            )
        return False

    def standing(self, transfer: Transfer, lease: Lease) -> Standing:
        """Return what is known of a lease from what the words of all sources said last."""
        if transfer.seen is None:
            return "not yet"
        said = {lease.standing(self._table.word(at)) for at in transfer.seen}
        worst: tuple[Standing, ...] = ("over", "not yet")
        return next((standing for standing in worst if standing in said), "kept")

    def look(self, transfer: Transfer, lease: Lease) -> None:
        """Read the word of the lease on every rank that bytes came from, after those bytes."""
        session = transfer.session
        transfer.seen = []
        for source in transfer.sources:
            table = session.leases.get(source.rank)
            if table is None:
                transfer.fail(
                    f"rank {source.rank} has no table of leases; upgrade that engine",
                    "incompatible",
                )
                return
            at = self._table.landing()
            here = np.array([self._table.address_of(at)], np.uint64)
            there = np.array([table.address + lease.slot * WORD_NBYTES], np.uint64)
            nbytes = np.array([WORD_NBYTES], np.uint64)
            transfer.seen.append(at)
            pieces = (Descriptors(here, nbytes), Descriptors(there, nbytes))
            self._operations.submit_part("read", session, transfer, source.rank, *pieces)
