"""A MultiConnector and its children: what is refused when it is built, and what stays apart."""

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvbridge.connector import (
    BlockIds,
    Connector,
    Loaded,
    MultiConnector,
    ReportGatherer,
    Request,
    Stats,
    WorkerReport,
    connector_configs,
    scheduler_connector,
)
from kvbridge.errors import ConfigError, HandshakeError, WrongHalfError
from kvbridge.handshake import HandshakeMetadata
from kvbridge.handshake.wire import encode
from kvbridge.model import Rank, RankCache

BLOCKS: BlockIds = ((1, 2),)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Child(Connector):
    """A child that does what the test says, and keeps what it was told."""

    def __init__(self, tokens: int | None = 0, *, layout: str | None = None) -> None:
        self.required_layout = layout
        self.tokens = tokens
        self.saves = True
        self.stands_by = True
        self.is_busy = False
        self.reports: list[WorkerReport] = []
        self.raising: set[str] = set()
        self.told: list[tuple[Any, ...]] = []
        self.taken: dict[int, HandshakeMetadata] = {}

    def _say(self, hook: str, *what: Any) -> None:
        if hook in self.raising:
            raise RuntimeError(f"{hook} is broken")
        self.told.append((hook, *what))

    def hooks(self) -> list[str]:
        return [hook for hook, *_ in self.told]

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, HandshakeMetadata]) -> None:
        self.taken = dict(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, computed: int
    ) -> tuple[int | None, bool]:
        self._say("match")
        return self.tokens, True

    def update_state_after_alloc(self, request: Request, block_ids: BlockIds, tokens: int) -> None:
        self._say("alloc", tokens)

    def build_connector_meta(self) -> object:
        self._say("meta")
        return "metadata"

    def request_finished(self, request: Request, blocks: BlockIds) -> tuple[bool, Any]:
        self._say("finished")
        return self.saves, {"remote_port": id(self)} if self.saves else None

    def not_needed(self, request: Request) -> None:
        self._say("not_needed")

    def standby_load(self, request: Request, block_ids: BlockIds, tokens: int) -> object | None:
        self._say("standby")
        return f"load of {request.request_id}" if self.stands_by else None

    def register_kv_caches(self, cache: RankCache) -> None:
        self._say("register")

    def unregister_kv_caches(self) -> None:
        self._say("unregister")

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        return None

    def start_load_kv(self, metadata: object) -> None:
        self._say("start", metadata)

    def get_finished(self) -> WorkerReport:
        self._say("report")
        return self.reports.pop(0) if self.reports else WorkerReport()

    def start_standby(self, load: object, *, timeout_s: float) -> None:
        self._say("start_standby", load, timeout_s)

    @property
    def busy(self) -> bool:
        return self.is_busy

    def wait(self, timeout_s: float) -> None:
        self._say("wait", timeout_s)

    def drop_standby(self, load: object) -> None:
        self._say("drop_standby", load)

    def shutdown(self) -> None:
        self._say("shutdown")


class StageAware(Child):
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Rank, Any]) -> None:
        self.stages = dict(metadata)


def loaded(request_id: str, error: str = "") -> WorkerReport:
    return WorkerReport({request_id: Loaded(error)})


# --- what is refused when it is built ------------------------------------------------------------


def test_a_child_of_one_stage_is_refused_in_an_engine_of_two_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"child 'b' \(Child\) serves one pipeline stage.*has 2"):
        MultiConnector({"a": StageAware(), "b": Child()}, pp_size=2)
    MultiConnector({"a": StageAware(), "b": Child()}, pp_size=1)


def test_layouts_that_clash_are_refused_with_both_names() -> None:
    children = {"a": Child(layout="BHNC"), "b": Child(), "c": Child(layout="BNHC")}
    with pytest.raises(ConfigError, match="'a' needs BHNC, 'c' needs BNHC"):
        MultiConnector(children)
    del children["c"]
    assert MultiConnector(children).required_layout == "BHNC"


def test_b66_a_child_that_lacks_a_hook_is_refused_with_the_hooks_name() -> None:
    class Almost:
        def get_finished(self) -> None: ...

    with pytest.raises(
        ConfigError, match=r"child 'b' is a Almost, no Connector \(it lacks.*start_load"
    ):
        MultiConnector({"a": Child(), "b": Almost()})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at least one child"):
        MultiConnector({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "no connector"),
        ({"connectors": []}, "no connector"),
        ({"connectors": 5}, "must be a list of mappings, got int"),
        (["nixl"], "a mapping of names to values, got 'nixl'"),
        ([{}, {}], "two connectors are called 'local'"),
        ([{"transprot": "nixl"}], "did you mean 'transport'"),
        ([{"lease_s": 0}], "lease_s"),
        ({"connectors": [{"name": "a"}], "timeuot_s": 1}, "did you mean 'timeout_s'"),
        (
            {"handshake": {"secret_flie": "x"}},
            r"connectors\[0\], handshake: unknown option 'secret_flie'; did you mean 'secret_file'",
        ),
        ({"handshake": {"peers": ["prefill-0"]}}, "peers: 'prefill-0' is no address; write host:"),
        ({"handshake": {"peers": ["::1:5600"]}}, r"no address; write .*\[address\]:port for IPv6"),
        ({"handshake": {"peers": ["h:0"]}}, "'h:0' has no port that can be dialled"),
        (
            {"handshake": {"peers": ["10.0.0.7:5600"]}},
            r"10\.0\.0\.7:5600 is outside.*127\.0\.0\.0/8",
        ),
        ({"handshake": {"peers": "h:1"}}, "handshake: option 'peers' is 'h:1': expected array"),
        (
            {"connectors": [{"name": "a"}, {"name": "b"}], "handshake": {"peers": ["h:1"]}},
            "connectors 'a' and 'b' both have h:1 in handshake.peers",
        ),
        (
            {"connectors": [{"name": "a"}, {"name": "b"}], "handshake": {"port": 5600}},
            "connectors 'a' and 'b' would both listen on 127.0.0.1 port 5600",
        ),
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connector_configs(values)


def test_what_stands_beside_the_children_is_their_default() -> None:
    configs = connector_configs(
        {"connectors": [{"transport": "nixl"}, {"name": "b", "lease_s": 7}], "lease_s": 5}
    )
    assert {name: config.lease_s for name, config in configs.items()} == {"nixl": 5, "b": 7}
    assert list(connector_configs({"transport": "nixl"})) == ["nixl"]
    ports = connector_configs(
        {
            "connectors": [{"name": "a", "handshake": {"port": 1}}, {"name": "b"}],
            "handshake": {"timeout_s": 3},
        }
    )
    handshakes = [(each.handshake.port, each.handshake.timeout_s) for each in ports.values()]
    assert handshakes == [(1, 3), (0, 3)]


# --- handshake -----------------------------------------------------------------------------------


def metadata(*payloads: bytes | None) -> HandshakeMetadata:
    return HandshakeMetadata("e", "i", 0, 0, payloads)


def test_metadata_of_other_children_is_refused_with_both_numbers() -> None:
    multi = MultiConnector({"a": Child(), "b": Child()})
    for wrong in (metadata(b"x"), HandshakeMetadata("e", "i", 0, 0, b"x")):
        with pytest.raises(HandshakeError, match=r"has 1 payloads.*2 children \['a', 'b'\]"):
            multi.set_xfer_handshake_metadata({0: wrong})
    with pytest.raises(HandshakeError, match="metadata of a child"):
        multi.set_xfer_handshake_metadata({0: metadata(b"\xff", None)})


def test_a_child_without_metadata_is_not_called() -> None:
    own = HandshakeMetadata("e", "i", 0, 0, b"mine")
    a, b = Child(), Child()
    MultiConnector({"a": a, "b": b}).set_xfer_handshake_metadata({0: metadata(encode(own), None)})
    assert (a.taken, b.taken) == ({0: own}, {})


# --- who loads -----------------------------------------------------------------------------------


def test_b33_the_first_child_that_has_tokens_loads_and_the_next_stands_by() -> None:
    none, first, second, other = Child(0), Child(8), Child(8), Child(4)
    multi = MultiConnector({"n": none, "a": first, "b": second, "o": other})
    request = Request("r", 8)
    assert multi.get_num_new_matched_tokens(request, 0) == (8, True)
    multi.update_state_after_alloc(request, BLOCKS, 8)
    assert first.told[-1] == ("alloc", 8)
    assert second.hooks()[-1] == "standby"
    assert none.told[-1] == other.told[-1] == ("alloc", 0)
    step = multi.build_connector_meta()
    assert step.loads["r"].first == "a"
    assert step.loads["r"].standby == (("b", "load of r"),)
    assert multi.build_connector_meta().loads == {}


def test_a_child_that_asks_for_time_is_waited_for_unless_an_earlier_one_has_tokens() -> None:
    request = Request("r", 8)
    assert MultiConnector({"a": Child(None), "b": Child(8)}).get_num_new_matched_tokens(
        request, 0
    ) == (None, False)
    assert MultiConnector({"a": Child(8), "b": Child(None)}).get_num_new_matched_tokens(
        request, 0
    ) == (8, True)


def test_a_later_lookup_forgets_the_earlier_choice() -> None:
    first, second = Child(8), Child(8)
    multi = MultiConnector({"a": first, "b": second})
    request = Request("r", 8)
    multi.get_num_new_matched_tokens(request, 0)
    first.tokens = 0
    assert multi.get_num_new_matched_tokens(request, 0) == (8, True)
    multi.update_state_after_alloc(request, BLOCKS, 8)
    assert (first.told[-1], second.told[-1]) == (("alloc", 0), ("alloc", 8))


def test_a_child_that_cannot_stand_by_is_told_that_it_is_not_needed() -> None:
    second = Child(8)
    second.stands_by = False
    multi = MultiConnector({"a": Child(8), "b": second})
    request = Request("r", 8)
    multi.get_num_new_matched_tokens(request, 0)
    multi.update_state_after_alloc(request, BLOCKS, 8)
    assert second.hooks()[-2:] == ["standby", "not_needed"]


# --- what one child cannot, the next one does ----------------------------------------------------


class Both:
    """Scheduler and worker of one small engine with two children."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.a, self.b = Child(8), Child(8)
        children = {"a": self.a, "b": self.b}
        self.multi = MultiConnector(children, clock=self.clock, timeout_s=10, **options)

    def begin(self, request_id: str = "r") -> None:
        request = Request(request_id, 8)
        self.multi.get_num_new_matched_tokens(request, 0)
        self.multi.update_state_after_alloc(request, BLOCKS, 8)
        self.multi.start_load_kv(self.multi.build_connector_meta())


def test_a_load_that_failed_goes_on_with_the_time_that_is_left() -> None:
    both = Both()
    both.begin()
    both.clock.now_s = 4.0
    both.a.reports.append(loaded("r", "no link"))
    assert both.multi.get_finished().loaded == {}
    assert both.b.told[-2] == ("start_standby", "load of r", 6.0)
    both.b.reports.append(loaded("r"))
    assert both.multi.get_finished().loaded == {"r": Loaded(via="b")}
    assert dict(both.multi.worker_half.failovers) == {("a", "b"): 1}


def test_a_load_without_time_left_fails_with_the_reason() -> None:
    both = Both()
    both.begin()
    both.clock.now_s = 10.0
    both.a.reports.append(WorkerReport({"r": Loaded("no link", cause="transport")}))
    ended = both.multi.get_finished().loaded["r"]
    assert (ended.error, ended.cause) == ("a: no link; no time left for b", "transport")


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_what_no_child_could_load_is_computed_or_fails_whatever_they_say(on_failure: Any) -> None:
    both = Both(on_failure=on_failure)
    both.begin()
    both.a.reports.append(loaded("r", "no link"))
    both.multi.get_finished()
    both.b.reports.append(WorkerReport({"r": Loaded("no link", recompute=on_failure == "fail")}))
    assert both.multi.get_finished().loaded["r"].recompute == (on_failure == "recompute")


def test_what_children_could_not_load_because_they_raise_is_computed_too() -> None:
    both = Both()
    both.a.raising.add("start")
    both.b.raising.add("start_standby")
    both.begin()
    ended = both.multi.get_finished().loaded["r"]
    assert (ended.cause, ended.recompute) == ("fault", True)


def test_the_child_that_stood_by_is_told_once_the_first_one_is_done() -> None:
    both = Both()
    both.begin()
    assert "drop_standby" not in both.b.hooks()
    both.a.reports.append(loaded("r"))
    both.multi.get_finished()
    assert ("drop_standby", "load of r") in both.b.told


def test_a_child_that_raises_as_it_starts_is_passed_over() -> None:
    both = Both()
    both.a.raising.add("start")
    both.begin()
    assert both.b.told[-1][:2] == ("start_standby", "load of r")
    both.b.reports.append(loaded("r"))
    assert both.multi.get_finished().loaded["r"].ok


def test_if_every_child_raises_the_request_fails_with_all_reasons() -> None:
    both = Both()
    both.a.raising.add("start")
    both.b.raising.add("start_standby")
    both.begin()
    ended = both.multi.get_finished().loaded["r"]
    assert ended.error == (
        "a: RuntimeError: start is broken; b: RuntimeError: start_standby is broken"
    )
    assert ended.cause == "fault"
    errors = both.multi.stats().value
    assert errors("kvbridge_connector_errors_total", connector="a") == 1
    assert errors("kvbridge_connector_errors_total", connector="b") == 1


def test_b71_a_child_that_counts_nothing_or_raises_is_left_out_of_the_counts() -> None:
    class Counting(Child):
        def stats(self) -> Stats:
            self._say("stats")
            return Stats({("kvbridge_leases_held", "a", "x"): 1})

    counting = Counting()
    multi = MultiConnector({"a": counting, "b": Child()})
    assert multi.stats().value("kvbridge_leases_held") == 1
    counting.raising.add("stats")
    assert multi.stats().value("kvbridge_leases_held") == 0
    assert not multi.worker_half.isolation["a"].is_quarantined, "its requests go on"


def test_b33_reports_of_unknown_requests_and_of_the_wrong_child_are_counted() -> None:
    both = Both()
    both.begin()
    both.b.reports.append(loaded("r"))
    both.a.reports.append(loaded("who"))
    assert both.multi.get_finished().loaded == {}
    assert both.multi.worker_half.unknown == 2
    assert both.multi.stats().value("kvbridge_connector_reports_ignored_total") == 2


# --- a child that raises -------------------------------------------------------------------------


def test_a_child_that_raises_is_left_alone_for_a_growing_while_and_the_others_go_on() -> None:
    both = Both()
    both.a.raising.add("report")
    tries = []
    for _ in range(2000):
        before = both.multi.worker_half.isolation["a"].errors
        both.multi.get_finished()
        if both.multi.worker_half.isolation["a"].errors > before:
            tries.append(round(both.clock.now_s, 2))
        both.clock.now_s += 0.01
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.02)
    assert max(gaps) <= 10.01
    assert both.b.hooks().count("report") == 2000
    both.a.raising.clear()
    both.clock.now_s += 11
    both.a.reports.append(WorkerReport(sent=frozenset({"x"})))
    both.multi.get_finished()
    assert not both.multi.worker_half.isolation["a"].is_quarantined


def test_children_that_have_something_to_do_are_waited_for_and_share_the_time() -> None:
    children = {name: Child() for name in "abc"}
    multi = MultiConnector(children)
    children["a"].is_busy = children["c"].is_busy = True
    multi.wait(0.5)
    assert {name: child.told for name, child in children.items()} == {
        "a": [("wait", 0.25)],
        "b": [],
        "c": [("wait", 0.25)],
    }


def test_a_child_that_raises_in_its_wait_is_left_alone_and_time_passes_all_the_same() -> None:
    both = Both()
    both.a.is_busy = both.b.is_busy = True
    both.a.raising.add("wait")
    both.multi.wait(0.5)
    assert both.b.told == [("wait", 0.25)]
    both.multi.wait(0.5)
    assert both.b.told[1:] == [("wait", 0.5)]
    assert both.multi.worker_half.isolation["a"].errors == 1
    both.b.is_busy = False
    start = time.monotonic()
    both.multi.wait(0.05)  # who is not waited for would be asked again and again
    assert time.monotonic() - start >= 0.05


def test_a_scheduler_child_that_raises_costs_nothing_but_itself() -> None:
    both = Both()
    both.a.raising |= {"match", "alloc", "finished", "meta"}
    request = Request("r", 8, 8)
    assert both.multi.get_num_new_matched_tokens(request, 0) == (8, True)
    saves, params = both.multi.request_finished(request, BLOCKS)
    assert saves
    assert params is not None
    assert list(params["kvbridge"]["children"]) == ["b"]
    assert list(both.multi.build_connector_meta().steps) == ["b"]


def test_a_hook_of_the_other_half_is_the_engines_mistake_and_no_childs() -> None:
    half = scheduler_connector([{"name": "a"}, {"name": "b"}], engine_id="e")
    assert isinstance(half, MultiConnector)
    try:
        with pytest.raises(WrongHalfError, match="'a' of the scheduler was asked to move bytes"):
            half.get_finished()
        assert {each.errors for each in half.worker_half.isolation.values()} == {0}
        assert half.build_connector_meta().steps.keys() == {"a", "b"}
    finally:
        half.shutdown()


def test_children_are_ready_together_and_one_that_raises_is_left_out() -> None:
    class Picky(Child):
        def refusals(self) -> Mapping[str, str]:
            self._say("refusals")
            return {"h:1": "other pages"}

    fits, picky = Child(), Picky()
    multi = MultiConnector({"a": fits, "b": picky})
    assert (multi.ready, multi.refusals()) == (False, {"b h:1": "other pages"})
    picky.raising.add("refusals")
    assert (multi.ready, multi.refusals()) == (True, {})


def test_all_children_are_shut_down_though_one_raises() -> None:
    both = Both()
    both.a.raising.add("shutdown")
    with pytest.raises(RuntimeError, match="shutdown is broken"):
        both.multi.shutdown()
    assert both.b.hooks() == ["shutdown"]


# --- finished sending ----------------------------------------------------------------------------


def sent(*request_ids: str, expired: bool = False) -> WorkerReport:
    ids = frozenset(request_ids)
    return WorkerReport(sent=ids, expired=ids if expired else frozenset())


def finish(both: Both, request_id: str = "r") -> None:
    both.multi.request_finished(Request(request_id, 8, 8), BLOCKS)
    both.multi.start_load_kv(both.multi.build_connector_meta())


def test_blocks_are_free_once_when_the_last_child_that_saves_is_done() -> None:
    both = Both()
    finish(both)
    both.a.reports.append(sent("r"))
    assert both.multi.get_finished().sent == frozenset()
    both.a.reports.append(sent("r"))  # twice
    assert both.multi.get_finished().sent == frozenset()
    both.b.reports.append(sent("r", expired=True))
    report = both.multi.get_finished()
    assert report.sent == report.expired == frozenset({"r"})
    both.b.reports.append(sent("r"))
    assert both.multi.get_finished().sent == frozenset()
    assert both.multi.worker_half.unknown >= 1


def test_a_child_that_does_not_save_is_not_waited_for() -> None:
    both = Both()
    both.b.saves = False
    finish(both)
    both.a.reports.append(sent("r"))
    assert both.multi.get_finished().sent == {"r"}


def test_a_report_before_the_step_that_names_who_saves_is_kept() -> None:
    both = Both()
    both.a.reports.append(sent("r"))
    assert both.multi.get_finished().sent == frozenset()
    finish(both)
    both.b.reports.append(sent("r"))
    assert both.multi.get_finished().sent == {"r"}
    assert both.multi.worker_half.unknown == 0


def test_blocks_of_a_child_that_took_no_note_of_them_are_not_kept_for_ever() -> None:
    both = Both()
    both.a.raising.add("start")
    finish(both)
    both.b.reports.append(sent("r"))
    assert both.multi.get_finished().sent == frozenset()
    both.clock.now_s = 10.0
    report = both.multi.get_finished()
    assert report.sent == report.expired == frozenset({"r"})


# --- every rank reports --------------------------------------------------------------------------


def test_an_end_counts_once_every_rank_has_reported_it() -> None:
    gatherer = ReportGatherer([(0, 0), (1, 0)])
    gatherer.add((0, 0), WorkerReport({"r": Loaded(via="a")}, frozenset({"s"})))
    gatherer.add((0, 0), WorkerReport({"r": Loaded(via="a")}, frozenset({"s"})))
    assert gatherer.take() == WorkerReport()
    assert gatherer.repeated == 2
    failed = Loaded("no link", "b", cause="transport")
    gatherer.add((1, 0), WorkerReport({"r": failed}, frozenset({"s"})))
    report = gatherer.take()
    assert report.loaded == {"r": Loaded("rank (1, 0): no link", "a, b", cause="transport")}
    assert report.sent == {"s"}
    assert gatherer.take() == WorkerReport()


@pytest.mark.parametrize(
    ("ranks", "recompute"),
    [
        ([Loaded(), Loaded("no link", recompute=True)], True),
        ([Loaded("no link", recompute=True)] * 2, True),
        ([Loaded(), Loaded("no link")], False),
        ([Loaded("no link", recompute=True), Loaded("aborted", cause="aborted")], False),
        ([Loaded(), Loaded()], False),
    ],
    ids=["one failed", "both", "one shall fail", "one was aborted", "none"],
)
def test_a_request_is_computed_if_every_rank_that_failed_says_so(
    ranks: list[Loaded], recompute: bool
) -> None:
    gatherer = ReportGatherer([(0, 0), (0, 1)])
    for i, each in enumerate(ranks):
        gatherer.add((0, i), WorkerReport({"r": each}))
    assert gatherer.take().loaded["r"].recompute == recompute
