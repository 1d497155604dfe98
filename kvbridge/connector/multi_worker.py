"""Where a MultiConnector works: what one child cannot load, the next one tries."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

from kvbridge.connector.base import Connector
from kvbridge.connector.isolation import Isolation, errors_of
from kvbridge.connector.multi_scheduler import MultiStep
from kvbridge.connector.series import CHILD_REPORTS_IGNORED, FAILOVERS
from kvbridge.connector.stats import Key, Stats
from kvbridge.connector.values import Loaded, OnFailure, WorkerReport
from kvbridge.session import Cause

_log = logging.getLogger(__name__)

_EARLY_MAX = 4096


@dataclass(slots=True)
class _Running:
    """A request that is being loaded."""

    child: str
    standby: list[tuple[str, object]]
    deadline_s: float
    errors: list[str] = field(default_factory=list)
    is_aborted: bool = False


@dataclass(slots=True)
class _Saving:
    """A request whose blocks some children keep.

    Attributes:
        children: Those that have not said that they are done.
        until_s: Clock when those are given up that could not be told to keep them.
        expired: Whether a reader of one of them has not reported.
    """

    children: set[str]
    until_s: dict[str, float] = field(default_factory=dict)
    expired: bool = False


class MultiWorker:
    """Works for several children; see :class:`~kvbridge.connector.Connector` for the hooks.

    Attributes:
        isolation: What became of each child.
        failovers: How often a load went from one child to another.
        unknown: Reports of requests that nobody waits for, or that had been reported before.
    """

    def __init__(
        self,
        children: Mapping[str, Connector],
        timeout_s: float,
        on_failure: OnFailure,
        clock: Callable[[], float],
    ) -> None:
        """Take the children."""
        self._children, self._timeout_s, self._clock = children, timeout_s, clock
        self._on_failure = on_failure
        self.isolation = {name: Isolation(name, clock) for name in children}
        self._running: dict[str, _Running] = {}
        self._saving: dict[str, _Saving] = {}
        self._early: OrderedDict[tuple[str, str], bool] = OrderedDict()  # and whether it expired
        self._loaded: dict[str, Loaded] = {}
        self._sent: set[str] = set()
        self._expired: set[str] = set()
        self.failovers: Counter[tuple[str, str]] = Counter()
        self.unknown = 0

    def begin(self, step: MultiStep) -> None:
        """Begin what the scheduler half asked for."""
        deadline_s = self._clock() + self._timeout_s
        for request_id, load in step.loads.items():
            self._running[request_id] = _Running(load.first, list(load.standby), deadline_s)
        for request_id, children in step.saving.items():
            self._saving[request_id] = _Saving(set(children))
            for name in children:
                expired = self._early.pop((request_id, name), None)
                if expired is not None:
                    self._sent_by(name, request_id, expired=expired)
        starts = {
            name: self.isolation[name].call(partial(self._started, name, metadata), otherwise=False)
            for name, metadata in step.steps.items()
        }
        # Only now: the child that a load goes on with must know of this step too.
        for name in [name for name, started in starts.items() if not started]:
            self._fail_over_all(name, self.isolation[name].last_error, step)
            self._give_up_later(name, step)
        for request_id, load in step.loads.items():
            if load.first not in step.steps:  # it could not even be asked
                error = f"{load.first or 'the first child'} did not take the request"
                self._next(request_id, self._running[request_id], error, "fault")
        for request_id in step.aborted:
            running = self._running.get(request_id)
            if running is not None:
                running.is_aborted = True
                abort = partial(self._children[running.child].abort_load, request_id)
                self.isolation[running.child].call(abort, None)

    def report(self) -> WorkerReport:
        """Make progress, and return what has ended."""
        for name, child in self._children.items():
            isolation = self.isolation[name]
            if isolation.is_quarantined:
                continue
            report = isolation.call(child.get_finished, WorkerReport())
            for request_id, loaded in report.loaded.items():
                self._loaded_by(name, request_id, loaded)
            for request_id in report.sent:
                self._sent_by(name, request_id, expired=request_id in report.expired)
        now_s = self._clock()
        for request_id, saving in list(self._saving.items()):
            for name in [name for name, until_s in saving.until_s.items() if now_s >= until_s]:
                del saving.until_s[name]
                self._sent_by(name, request_id, expired=True)
        report = WorkerReport(self._loaded, frozenset(self._sent), frozenset(self._expired))
        self._loaded, self._sent, self._expired = {}, set(), set()
        return report

    @property
    def busy(self) -> bool:
        """Whether a request is loaded or kept, or a child has something else to do."""
        return bool(self._running or self._saving) or any(
            self._is_busy(name, child) for name, child in self._children.items()
        )

    def _is_busy(self, name: str, child: Connector) -> bool:
        return bool(self.isolation[name].call(partial(getattr, child, "busy"), otherwise=False))

    def wait(self, timeout_s: float) -> None:
        """Wait for the children that have something to do, for each of them a share of the time."""
        busy = {
            name: child
            for name, child in self._children.items()
            if not self.isolation[name].is_quarantined and self._is_busy(name, child)
        }
        for name, child in busy.items():
            self.isolation[name].call(partial(child.wait, timeout_s / len(busy)), None)
        if not busy:
            time.sleep(timeout_s)

    def stats(self) -> Stats:
        """Return what became of the children's loads and reports here."""
        values: dict[Key, float] = {(CHILD_REPORTS_IGNORED.name,): self.unknown}
        for pair in permutations(self._children, 2):
            values[FAILOVERS.name, *pair] = self.failovers[pair]
        return Stats(values) + errors_of(self.isolation.values())

    def tell_all(self, tell: Callable[[Connector], object]) -> None:
        """Tell every child, whatever another one raises."""
        for name, child in self._children.items():
            self.isolation[name].call(partial(tell, child), None)

    def _started(self, name: str, metadata: object) -> bool:
        self._children[name].start_load_kv(metadata)
        return True

    def _fail_over_all(self, name: str, error: str, step: MultiStep) -> None:
        for request_id in step.loads:
            running = self._running.get(request_id)
            if running is not None and running.child == name:
                self._next(request_id, running, f"{name}: {error}", "fault")

    def _give_up_later(self, name: str, step: MultiStep) -> None:
        """Keep the blocks for readers of a child that took no note of them, but not for ever."""
        for request_id, children in step.saving.items():
            if name in children and request_id in self._saving:
                self._saving[request_id].until_s[name] = self._clock() + self._timeout_s

    def _loaded_by(self, name: str, request_id: str, loaded: Loaded) -> None:
        running = self._running.get(request_id)
        if running is None or running.child != name:
            self.unknown += 1
            return
        if not loaded.ok:
            self._next(request_id, running, f"{name}: {loaded.error}", loaded.cause)
            return
        del self._running[request_id]
        self._loaded[request_id] = replace(loaded, via=name)
        self._drop_standby(running)

    def _drop_standby(self, running: _Running) -> None:
        """Tell those that stand by that they are not needed."""
        for name, load in running.standby:
            self.isolation[name].call(partial(self._children[name].drop_standby, load), None)
        running.standby.clear()

    def _next(self, request_id: str, running: _Running, error: str, cause: Cause) -> None:
        """Have the next child load what the last one could not; its blocks are quiet."""
        running.errors.append(error)
        if running.is_aborted:
            self._drop_standby(running)
        while running.standby:
            name, load = running.standby.pop(0)
            left_s = running.deadline_s - self._clock()
            if left_s <= 0:
                running.errors.append(f"no time left for {name}")
                break
            start = partial(self._standby_started, name, load, left_s)
            if self.isolation[name].call(start, otherwise=False):
                self.failovers[running.child, name] += 1
                _log.warning("request %s goes on over %s: %s", request_id, name, error)
                running.child = name
                return
            running.errors.append(f"{name}: {self.isolation[name].last_error}")
            cause = "fault"
        del self._running[request_id]
        loaded = Loaded("; ".join(running.errors), running.child, cause=cause)
        on_failure = "fail" if running.is_aborted else self._on_failure
        self._loaded[request_id] = loaded.under(on_failure)

    def _standby_started(self, name: str, load: object, timeout_s: float) -> bool:
        self._children[name].start_standby(load, timeout_s=timeout_s)
        return True

    def _sent_by(self, name: str, request_id: str, *, expired: bool) -> None:
        saving = self._saving.get(request_id)
        if saving is None:
            # A child may be done before this rank was told who saves: that comes with the step.
            if (request_id, name) in self._early:
                self.unknown += 1
            self._early[request_id, name] = expired
            if len(self._early) > _EARLY_MAX:
                self._early.popitem(last=False)
                self.unknown += 1
            return
        if name not in saving.children:
            self.unknown += 1
            return
        saving.children.discard(name)
        saving.expired |= expired
        if not saving.children:
            del self._saving[request_id]
            self._sent.add(request_id)
            if saving.expired:
                self._expired.add(request_id)
