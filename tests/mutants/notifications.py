"""Notifications that are lost, early, changed, or somebody else's."""

from kvbridge.transport import Descriptors, Handle, Notification, Op, Peer, Poll
from tests.mutants.base import Mutant


class ReceivedWrongly(Mutant):
    """Changes what has come in."""

    _count = 0

    def received(self, notification: Notification) -> list[Notification]:
        raise NotImplementedError

    def poll(self) -> Poll:
        polled = super().poll()
        heard = [new for old in polled.notifications for new in self.received(old)]
        return Poll(polled.finished, tuple(heard))


class DropsEvery100th(ReceivedWrongly):
    """One notification of a hundred is lost."""

    killed_by = "NOTIFY-01"
    says = "did not come"

    def received(self, notification: Notification) -> list[Notification]:
        self._count += 1
        return [notification] if self._count % 100 else []


class DuplicatesEvery100th(ReceivedWrongly):
    """One notification of a hundred comes twice."""

    killed_by = "NOTIFY-07"
    says = "2 came that were not sent"

    def received(self, notification: Notification) -> list[Notification]:
        self._count += 1
        return [notification] if self._count % 100 else [notification, notification]


class TruncatesLongOnes(ReceivedWrongly):
    """Only 1 KiB of a notification arrives."""

    killed_by = "NOTIFY-01"
    says = "did not come"

    def received(self, notification: Notification) -> list[Notification]:
        return [notification._replace(payload=notification.payload[:1024])]


class TakesThemForText(ReceivedWrongly):
    """A notification ends at its first zero byte."""

    killed_by = "NOTIFY-01"
    says = "did not come"

    def received(self, notification: Notification) -> list[Notification]:
        return [notification._replace(payload=notification.payload.split(b"\0")[0])]


class NamesTheReceiver(ReceivedWrongly):
    """The sender of each notification is the agent that it came to."""

    killed_by = "NOTIFY-02"
    says = "sender and payload"

    def received(self, notification: Notification) -> list[Notification]:
        return [notification._replace(sender=self._opened().card.agent)]


class NotifiesBeforeTheBytes(Mutant):
    """The notification of a transfer overtakes its bytes."""

    killed_by = "NOTIFY-04"
    says = "when the write's notification came"

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if notification and local.total_nbytes:
            self.notify(peer, notification)
            notification = b""
        return super().submit(op, peer, local, remote, notification)


class NotifiesWhenAsked(Mutant):
    """The notification of a read travels with the request, and is heard when that comes."""

    killed_by = "NOTIFY-05"
    says = "when the read's notification came"

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if op == "write" or not notification:
            return super().submit(op, peer, local, remote, notification)
        handle = super().submit(op, peer, local, remote)
        self.notify(peer, notification)
        return handle


class NotifiesWithBytesOnly(Mutant):
    """An operation without bytes does not notify."""

    killed_by = "NOTIFY-06"
    says = "did not come"

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        return super().submit(op, peer, local, remote, notification if local.total_nbytes else b"")


class LosesABurst(Mutant):
    """Of what has come since the last poll, only a thousand are kept."""

    killed_by = "NOTIFY-03"
    says = "did not come"

    def poll(self) -> Poll:
        polled = super().poll()
        return Poll(polled.finished, polled.notifications[:1000])


class SendsWhenPolled(Mutant):
    """Notifications leave when poll is called, which is not declared."""

    killed_by = "NOTIFY-08"
    says = "did not come"

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[tuple[Peer, bytes]] = []

    def notify(self, peer: Peer, payload: bytes) -> None:
        self._mine(peer)
        self.check_notification(peer, payload)
        self._queued.append((peer, payload))

    def poll(self) -> Poll:
        queued, self._queued = self._queued, []
        for peer, payload in queued:
            super().notify(peer, payload)
        return super().poll()
