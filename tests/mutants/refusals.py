"""Capabilities, limits and refusals: what should not work and does."""

from collections.abc import Sequence

import numpy as np

from kvbridge.errors import OutOfBoundsError
from kvbridge.transport import Descriptors, Handle, Op, Peer, Region
from kvbridge.transport.local.worker import LocalPeer
from tests.mutants.base import CapabilityMutant, Mutant, PieceMutant


class UncheckedSubmit(Mutant):
    """Pins the memory here, and checks nothing else."""

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        return self.memory.pin(local)


class RegistersAnyKind(Mutant):
    """Memory of a kind that is not declared is accepted."""

    killed_by = "REFUSE-05"
    says = "raised nothing"

    def check_regions(self, regions: Sequence[Region]) -> None:
        pass


class ReadsUndeclared(CapabilityMutant, UncheckedSubmit):
    """Reads are not declared, and work by accident."""

    killed_by = "REFUSE-01"
    says = "raised nothing"
    changes = {"read": False}


class WritesUndeclared(CapabilityMutant, UncheckedSubmit):
    """Writes are not declared, and work by accident."""

    killed_by = "REFUSE-02"
    says = "raised nothing"
    changes = {"write": False}


class NotifiesUndeclared(CapabilityMutant):
    """Notifications are not declared, and work by accident."""

    killed_by = "REFUSE-03"
    says = "raised nothing"
    changes = {"notify": False}

    def check_notification(self, peer: Peer, payload: bytes) -> None:
        pass


class NotifiesWithTransfersUndeclared(CapabilityMutant, UncheckedSubmit):
    """Notifications with transfers are not declared, and work by accident."""

    killed_by = "REFUSE-04"
    says = "raised nothing"
    changes = {"notify_with_transfer": False}


class TakesAnyOperation(Mutant):
    """What is no read is taken for a write."""

    killed_by = "REFUSE-06"
    says = "raised nothing"

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        known: Op = "read" if op == "read" else "write"
        return super().submit(known, peer, local, remote, notification)


class ChecksNoBounds(UncheckedSubmit):
    """Pieces outside the peer's regions are read."""

    killed_by = "REFUSE-07"
    says = "raised nothing"


class AddsUpTo64Bits(Mutant):
    """The end of a piece is computed in 64 bits, which wraps."""

    killed_by = "REFUSE-08"
    says = "raised nothing"

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        for pieces, regions in ((local, self.memory.regions), (remote, peer.table.regions)):
            start, end = np.uint64(regions[0].address), np.uint64(regions[-1].end)
            inside = (pieces.address >= start) & (pieces.address + pieces.nbytes <= end)
            if not inside.all():
                raise OutOfBoundsError("outside the registered memory")
        return frozenset()


class TakesTheEndForOutside(Mutant):
    """A piece that ends where the owner's region ends is taken for one byte too long."""

    killed_by = "WRITE-05"
    says = "OutOfBoundsError"

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        ends = [region.end for region in peer.table.regions]
        if op == "write" and np.isin(remote.address + remote.nbytes, ends).any():
            raise OutOfBoundsError("outside the peer's regions")
        return super().check_submit(op, peer, local, remote, notification)


class ForgetsTheKind(PieceMutant):
    """All pieces are taken for main memory."""

    killed_by = "REFUSE-09"
    says = "raised nothing"

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        return Descriptors(local.address, local.nbytes), Descriptors(remote.address, remote.nbytes)


class JoinsRegionsThatOverlap(Mutant):
    """Regions of a peer that overlap are taken for one."""

    killed_by = "PEER-10"
    says = "overlap: raised nothing"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        first, *others = sorted(regions, key=lambda region: region.address)
        joined = [first]
        for region in others:
            if region.address < joined[-1].end:
                end = max(region.end, joined[-1].end)
                joined[-1] = Region(joined[-1].address, end - joined[-1].address)
            else:
                joined.append(region)
        return super().add_peer(agent_info, joined, timeout_s=timeout_s)


class ForgetsThePeersKind(Mutant):
    """All memory of a peer is taken for main memory."""

    killed_by = "PEER-10"
    says = "'core rope' memory: raised nothing"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        main = [Region(region.address, region.nbytes) for region in regions]
        return super().add_peer(agent_info, main, timeout_s=timeout_s)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        main = Descriptors(remote.address, remote.nbytes)
        return super().submit(op, peer, local, main, notification)


class KeepsWhatItRefused(Mutant):
    """A refused operation keeps its memory busy."""

    killed_by = "REFUSE-11"
    says = "MemoryBusyError"

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        pinned = self.memory.pin(local)
        checked = super().check_submit(op, peer, local, remote, notification)
        self.memory.unpin(pinned)
        return checked


class ContradictsItself(CapabilityMutant):
    """Notifications have a largest size, and are not declared."""

    killed_by = "LIMIT-01"
    says = "notify_max_bytes"
    changes = {"notify": False, "notify_with_transfer": False}
    declares_a_lie = True


class TakesLargeNotifications(CapabilityMutant):
    """The largest notification is declared, and not looked at."""

    killed_by = "LIMIT-02"
    says = "raised nothing"
    changes = {"notify_max_bytes": 100}

    def check_notification(self, peer: Peer, payload: bytes) -> None:
        pass


class TakesLargeTiedNotifications(CapabilityMutant, UncheckedSubmit):
    """The largest notification is declared, and not looked at where it is tied to a transfer."""

    killed_by = "LIMIT-03"
    says = "raised nothing"
    changes = {"notify_max_bytes": 100}


class TakesTooManyDescriptors(CapabilityMutant, UncheckedSubmit):
    """The most descriptors of an operation are declared, and not looked at."""

    killed_by = "LIMIT-04"
    says = "raised nothing"
    changes = {"descriptors_max": 16}


class TakesTooManyBytes(CapabilityMutant, UncheckedSubmit):
    """The most bytes of an operation are declared, and not looked at."""

    killed_by = "LIMIT-05"
    says = "raised nothing"
    changes = {"transfer_max_bytes": 1 << 20}


class LetsTheOwnerTrust(CapabilityMutant):
    """The owner is declared to check bounds, and believes what the peer was told."""

    killed_by = "FAIL-11"
    says = "out of the owner's bounds"
    changes = {"owner_checks_bounds": True}
    declares_a_lie = True


class LearnsOfLossByUse(CapabilityMutant):
    """The loss of a peer is declared an event, and is noticed when the peer is used."""

    killed_by = "FAIL-10"
    says = "raised nothing"
    changes = {"peer_loss": "event"}
    declares_a_lie = True

    def _mine(self, peer: Peer) -> LocalPeer:
        assert isinstance(peer, LocalPeer)
        return peer
