"""Where a MultiConnector decides: which child loads a request, and which stand by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvbridge.connector import params
from kvbridge.connector.base import Connector
from kvbridge.connector.isolation import Isolation, errors_of
from kvbridge.connector.stats import Stats
from kvbridge.connector.values import BlockIds, Request, WorkerReport


@dataclass(frozen=True, slots=True)
class MultiLoad:
    """Who loads a request.

    Attributes:
        first: Name of the child that begins.
        standby: Names and loads of those that are tried after it, in order.
    """

    first: str
    standby: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class MultiStep:
    """What the workers of an engine must know of one step.

    Attributes:
        steps: The metadata of every child.
        loads: Who loads the requests of this step.
        saving: Which children keep the blocks of the requests that have finished.
        aborted: Requests whose loads nobody wants any more.
    """

    steps: Mapping[str, object]
    loads: Mapping[str, MultiLoad] = field(default_factory=dict)
    saving: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    aborted: tuple[str, ...] = ()


class MultiScheduler:
    """Decides for several children; see :class:`~kvbridge.connector.Connector` for the hooks.

    Attributes:
        isolation: What became of each child.
    """

    def __init__(self, children: Mapping[str, Connector], clock: Callable[[], float]) -> None:
        """Take the children."""
        self._children = children
        self.isolation = {name: Isolation(name, clock) for name in children}
        self._offers: dict[str, dict[str, int]] = {}  # by request: tokens that each child has
        self._loads: dict[str, MultiLoad] = {}
        self._saving: dict[str, tuple[str, ...]] = {}
        self._loading: set[str] = set()
        self._aborted: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether every child is: what does not fit over one of them is hidden by the others.

        A child that raises is left alone in this too.
        """
        answers = {
            name: self._call(name, partial(getattr, child, "ready"), True)
            for name, child in self._children.items()
        }
        return all(answers.values())

    def refusals(self) -> dict[str, str]:
        """Return why peers do not fit, by child and address."""
        return {
            f"{name} {address}": why
            for name, child in self._children.items()
            for address, why in self._call(name, child.refusals, {}).items()
        }

    def drain(self, timeout_s: float) -> None:
        """Begin to end every child."""
        for name, child in self._children.items():
            self._call(name, partial(child.drain, timeout_s), None)

    @property
    def drained(self) -> bool:
        """Whether every child is; one that raises is not waited for."""
        return all(
            self._call(name, partial(getattr, child, "drained"), True)
            for name, child in self._children.items()
        )

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Ask the children in order; the first that has tokens will load."""
        self._offers.pop(request.request_id, None)
        if request.request_id in self._loading:
            return None, False  # two loads of one id could not be told apart
        offers: dict[str, int] = {}
        beside = False
        for name, child in self._children.items():
            ask = partial(child.get_num_new_matched_tokens, request, computed)
            tokens, child_beside = self._call(name, ask, (0, False))
            if tokens is None and not offers:
                return None, False
            if tokens:
                beside = beside if offers else child_beside
                offers[name] = tokens
        if not offers:
            return 0, False
        self._offers[request.request_id] = offers
        return next(iter(offers.values())), beside

    def allocated(self, request: Request, block_ids: BlockIds, tokens: int) -> None:
        """Have the first child load, those that could as well stand by, and tell the others."""
        offers = self._offers.pop(request.request_id, {})
        chosen = next(iter(offers), next(iter(self._children)))
        first = ""
        standby: list[tuple[str, object]] = []
        for name, child in self._children.items():
            # An engine may want fewer tokens than were offered; what several children are asked
            # for must be the same ones, so those stand by that offered as many.
            able = name == chosen or offers.get(name) == offers.get(chosen)
            if not tokens or not able:
                tell = partial(child.update_state_after_alloc, request, block_ids, 0)
                self._call(name, tell, None)
            elif not first:
                tell = partial(child.update_state_after_alloc, request, block_ids, tokens)
                first = name if self._call(name, partial(_done, tell), False) else ""
            else:
                ask = partial(child.standby_load, request, block_ids, tokens)
                load = self._call(name, ask, None)
                if load is None:
                    self._call(name, partial(child.not_needed, request), None)
                else:
                    standby.append((name, load))
        if first or standby:
            self._loads[request.request_id] = MultiLoad(first, tuple(standby))
            self._loading.add(request.request_id)

    def ended(self, report: WorkerReport) -> None:
        """Take note of what has ended on all ranks."""
        self._loading -= report.loaded.keys()
        self._aborted = [each for each in self._aborted if each not in report.loaded]
        self.tell_all(lambda child: child.update_connector_output(report))

    def not_needed(self, request: Request) -> None:
        """Tell every child."""
        self._offers.pop(request.request_id, None)
        self.tell_all(lambda child: child.not_needed(request))

    def finished(self, request: Request, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Have every child keep a request's blocks, and offer them by all."""
        self._offers.pop(request.request_id, None)
        given_up = request.request_id in self._loading
        if given_up and request.aborted:
            self._aborted.append(request.request_id)
        if given_up:  # its blocks are written to, so no child may keep them
            request = replace(request, aborted=True)
        saving: list[str] = []
        offers: dict[str, Mapping[str, Any]] = {}
        for name, child in self._children.items():
            ask = partial(child.request_finished, request, block_ids)
            saves, offer = self._call(name, ask, (False, None))
            if saves:
                saving.append(name)
            if offer:
                offers[name] = offer
        if given_up:
            return True, None
        if saving:
            self._saving[request.request_id] = tuple(saving)
        return bool(saving), params.merge_offers(offers) if offers else None

    def take_step(self) -> MultiStep:
        """Return what is new since the last step."""
        steps = {}
        for name, child in self._children.items():
            step = self._call(name, child.build_connector_meta, None)
            if step is not None:
                steps[name] = step
        taken = MultiStep(steps, self._loads, self._saving, tuple(self._aborted))
        self._loads, self._saving, self._aborted = {}, {}, []
        return taken

    def stats(self) -> Stats:
        """Return how often children have raised in this half."""
        return errors_of(self.isolation.values())

    def tell_all(self, tell: Callable[[Connector], object]) -> None:
        """Tell every child, whatever another one raises."""
        for name, child in self._children.items():
            self._call(name, partial(tell, child), None)

    def _call(self, name: str, action: Callable[[], Any], otherwise: Any) -> Any:
        isolation = self.isolation[name]
        return otherwise if isolation.is_quarantined else isolation.call(action, otherwise)


def _done(action: Callable[[], object]) -> bool:
    action()
    return True
