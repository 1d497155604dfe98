"""Life cycle, registration, capabilities: what is said and not kept."""

import atexit
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvbridge.errors import OutOfBoundsError
from kvbridge.transport import (
    Availability,
    Descriptors,
    Events,
    LocalMemory,
    Notification,
    Op,
    Peer,
    Poll,
    Region,
    TransportConfig,
)
from tests.mutants.base import Mutant, leak


class ProbeRaises(Mutant):
    """Probe lets an exception out, where the library does not like to be loaded twice."""

    killed_by = "LIFE-02"
    says = "ImportError"
    _probed: ClassVar[int] = 0

    @classmethod
    def probe(cls) -> Availability:
        cls._probed += 1
        if cls._probed > 1:
            raise ImportError("libabsent.so: cannot open shared object file")
        return super().probe()


class CrashesAtExit(Mutant):
    """The process of an agent dies when its interpreter ends."""

    killed_by = "LIFE-10"
    says = "exit status"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        atexit.register(os._exit, 139)


class CloseWaitsForNothing(Mutant):
    """Close says that all is quiet while it still copies."""

    killed_by = "LIFE-07"
    says = "after close"

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        return ()


class CloseRaisesTheSecondTime(Mutant):
    """Only an open transport can be closed."""

    killed_by = "LIFE-06"
    says = "is closed"

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self._opened()
        return super().close(timeout_s=timeout_s)


class CloseLeavesAThread(Mutant):
    """A thread of the transport goes on after close."""

    killed_by = "LIFE-09"
    says = "threads"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class CloseForgetsTheSocket(Mutant):
    """The descriptors of a closed transport stay open."""

    killed_by = "LIFE-09"
    says = "descriptors"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        leak()


class WorksWhenClosed(Mutant):
    """Memory that is registered with a closed transport is silently left out."""

    killed_by = "LIFE-06"
    says = "raised nothing"

    def register(self, regions: Sequence[Region]) -> None:
        if not self._closed:
            super().register(regions)


class OpensTwice(Mutant):
    """A second open replaces the first."""

    killed_by = "LIFE-04"
    says = "raised nothing"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        if self._agent is None:
            super().open(config)


class IgnoresUnknownOptions(Mutant):
    """An option that does not exist is not noticed."""

    killed_by = "LIFE-05"
    says = "raised nothing"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(None)


class WorksInAForkedChild(Mutant):
    """A forked child is not noticed."""

    killed_by = "LIFE-08"
    says = "forked child"

    def check_process(self) -> None:
        pass


class PollWaits(Mutant):
    """Poll waits for something to happen."""

    killed_by = "CONC-05"
    says = "poll took"

    def poll(self) -> Poll:
        threading.Event().wait(0.2)
        return super().poll()


class SleepsThroughIt(Mutant):
    """A wait takes its whole time, whatever happens."""

    killed_by = "CONC-07"
    says = "of a wait of 4 s for a read"

    def wait(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


class HearsNothingInItsSleep(Mutant):
    """The end of an operation ends a wait, a notification does not."""

    killed_by = "CONC-07"
    says = "of a wait of 4 s for a notification"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        self._events.heard = self._hear  # type: ignore[method-assign]
        super().open(config)

    def _hear(self, sender: str, payload: bytes) -> None:
        self._events.notifications.append(Notification(sender, payload))


class WaitsForTheNextOne(Mutant):
    """What has ended when a wait begins does not end it."""

    killed_by = "CONC-07"
    says = "of a wait of 4 s for a read"

    def wait(self, timeout_s: float) -> None:
        self._events._news.clear()
        super().wait(timeout_s)


class WaitsUntilThereIsSomething(Mutant):
    """A wait ends when something happens, and not before."""

    killed_by = "CONC-07"
    says = "'time_idle_wait' did not return"

    def wait(self, timeout_s: float) -> None:
        self._events._news.wait()


class _NothingIsBusy(LocalMemory):
    def remove(self, regions: Sequence[Region]) -> None:
        users, self._users = self._users, {}
        try:
            super().remove(regions)
        finally:
            self._users = users


class UnregistersWhatIsBusy(Mutant):
    """Memory can be taken back while an operation uses it."""

    killed_by = "REG-04"
    says = "still pending"

    def __init__(self) -> None:
        super().__init__()
        self.memory = _NothingIsBusy()
        self._events = Events(self.memory)


class RegistersTwice(Mutant):
    """Regions that overlap registered ones are silently left out."""

    killed_by = "REG-01"
    says = "raised nothing"

    def register(self, regions: Sequence[Region]) -> None:
        try:
            super().register(regions)
        except OutOfBoundsError:
            self._opened()


class UnregistersAnything(Mutant):
    """What was never registered can be taken back."""

    killed_by = "REG-02"
    says = "raised nothing"

    def unregister(self, regions: Sequence[Region]) -> None:
        known = set(self.memory.regions)
        super().unregister([region for region in regions if region in known])


class KeepsUnregistered(Mutant):
    """Memory that was taken back can still be read into."""

    killed_by = "REG-03"
    says = "raised nothing"

    def unregister(self, regions: Sequence[Region]) -> None:
        self._opened()


class ShoutsItsName(Mutant):
    """Its name cannot be written in a configuration."""

    killed_by = "LIFE-01"
    says = "small letters"
    name = "LOCAL!"


class IsSurprisedWhenNotOpen(Mutant):
    """Use before open fails somewhere inside."""

    killed_by = "LIFE-03"
    says = "AttributeError"

    def agent_info(self) -> bytes:
        return self._agent.info()  # type: ignore[union-attr]


class LeaksARegistration(Mutant):
    """What belongs to a registration outlives it."""

    killed_by = "REG-08"
    says = "descriptors"

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        leak()


class UsesOneRegionAtATime(Mutant):
    """An operation that touches several regions is refused."""

    killed_by = "REG-05"
    says = "several regions"

    def check_submit(
        self, op: Op, peer: Peer, local: Descriptors, remote: Descriptors, notification: bytes
    ) -> frozenset[Region]:
        pinned = super().check_submit(op, peer, local, remote, notification)
        if len(pinned) > 1:
            self.memory.unpin(pinned)
            raise OutOfBoundsError("the pieces lie in several regions")
        return pinned


class TakesNeighboursForOne(Mutant):
    """A piece may lie in two regions that touch."""

    killed_by = "REG-06"
    says = "raised nothing"

    def register(self, regions: Sequence[Region]) -> None:
        first, *others = sorted(regions, key=lambda region: region.address)
        merged = [first]
        for region in others:
            if region.address == merged[-1].end:
                merged[-1] = Region(merged[-1].address, merged[-1].nbytes + region.nbytes)
            else:
                merged.append(region)
        super().register(merged)
