"""An engine that sleeps: its memory is out of the transport before it is freed, and comes back."""

import gc
import mmap
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbridge.connector import Request
from kvbridge.errors import MemoryBusyError, OutOfBoundsError
from kvbridge.model import memory_region
from tests.integration import drivers
from tests.integration.tiny_engine import Make, TinyEngine, run, scheduler_of, several, worker_of

LOCAL: dict[str, Any] = {"transport": "local"}
SLOW: dict[str, Any] = {
    "name": "local",
    "transport": "faulty",
    "options": {"inner": LOCAL, "operations": [{"what": "delay", "share": 1.0, "delay_s": 0.3}]},
}


def unmoved(d: TinyEngine) -> bool:
    return all(bool((memory == -1).all()) for memory in d.memory.values())


def met(p: TinyEngine, d: TinyEngine) -> None:
    """Have one engine meet the other, by a request."""
    d.load("before", [9], 4, p.prefill("before", [8], 4))
    run([p, d], lambda: "before" in d.loaded and "before" in p.sent)
    assert d.loaded["before"].ok
    for memory in d.memory.values():
        memory[:] = -1


# --- what is in use ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_memory_that_is_loaded_into_is_not_given_back(engine: Make, direction: str) -> None:
    slow = {**SLOW, "direction": direction}
    p, d = engine("p", {**SLOW, "direction": "auto"}), engine("d", slow)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    d.load("s", [5], 4, p.prefill("s", [6], 4))
    d.step()
    with pytest.raises(MemoryBusyError, match=r"'local' cannot let go of .*: 2 loads into it have"):
        d.workers[0, 0].unregister_kv_caches()
    with pytest.raises(MemoryBusyError, match="2 requests have not been reported as loaded"):
        d.scheduler.unregister_kv_caches()
    run([p, d], lambda: {"r", "s"} <= d.loaded.keys())
    assert d.loaded["r"].ok, "nothing was changed by the question"
    d.sleep()


def test_memory_that_is_written_for_a_reader_is_not_given_back_before_that_has_ended(
    engine: Make,
) -> None:
    direct = {"name": "local", **LOCAL, "direction": "push", "staging_nbytes": 0}
    p, d = engine("p", SLOW), engine("d", direct)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    gifts = worker_of(p.workers[0, 0])._gifts
    assert gifts is not None
    run([p, d], lambda: any(each.pending for each in gifts._gifts.get("r#1", {}).values()))
    with pytest.raises(MemoryBusyError, match="1 requests are being read there for others"):
        p.sleep()
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok
    p.sleep()


# --- while it sleeps -----------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["all are told", "its ranks alone"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("direction", ["pull", "push"])
def test_nobody_reads_what_it_held(engine: Make, direction: str, known: bool, told: bool) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", {**LOCAL, "direction": direction, "timeout_s": 5})
    if known:
        met(p, d)
    params = p.prefill("r", [3], 4)
    p.step()
    for worker in p.workers.values():
        worker.unregister_kv_caches()
        for memory in p.memory.values():
            memory[:] = -9
    if told:
        p.scheduler.unregister_kv_caches()
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert p.expired == {"r"}
    assert not d.loaded["r"].ok
    if told and not known:
        assert "this engine has no cache now: it sleeps" in d.loaded["r"].error
    else:
        assert d.loaded["r"].cause == "lease", d.loaded["r"].error
    run([p, d], lambda: p.scheduler.drained and d.scheduler.drained)


def test_memory_that_has_been_freed_can_be_asked_for(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    memory = p.memory[0, 0]
    mapped = mmap.mmap(-1, memory.nbytes)
    p.memory[0, 0] = np.frombuffer(mapped, memory.dtype).reshape(memory.shape)
    p.workers[0, 0].register_kv_caches(p.cache((0, 0), memory.shape[0], memory.shape[4]))
    p.publish()
    met(p, d)
    params = p.prefill("r", [3], 4)
    p.step()
    p.workers[0, 0].unregister_kv_caches()
    p.memory.clear()
    gc.collect()
    mapped.close()  # which nobody can, while anything still refers to it
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert not d.loaded["r"].ok
    assert unmoved(d)


FREED = """
    import gc
    import mmap
    import numpy as np
    from kvbridge.namespaces import private_network
    network = private_network()
    network.__enter__()
    from tests.integration.tiny_engine import TinyEngine, run
    p = TinyEngine("p", {{"transport": {name!r}}})
    d = TinyEngine("d", {{"transport": {name!r}, "direction": "pull", "timeout_s": 5}})

    def move(name):
        d.load(name, [9], 4, p.prefill(name, [8], 4))
        run([p, d], lambda: name in d.loaded and name in p.sent)
        assert d.loaded[name].ok, d.loaded[name].error
        assert (d.tokens([9], 4) == p.tokens([8], 4)).all()

    memory = p.memory[0, 0]
    mapped = mmap.mmap(-1, memory.nbytes)
    p.memory[0, 0] = np.frombuffer(mapped, memory.dtype).reshape(memory.shape)
    p.workers[0, 0].register_kv_caches(p.cache((0, 0), memory.shape[0], memory.shape[4]))
    p.publish()
    move("before")
    old = p.prefill("old", [3], 4)
    p.step()
    p.workers[0, 0].unregister_kv_caches()
    p.memory[0, 0] = memory
    gc.collect()
    mapped.close()
    d.load("old", [2], 4, old)
    run([p, d], lambda: "old" in d.loaded and "old" in p.sent)
    assert not d.loaded["old"].ok
    print(d.loaded["old"].error)
    p.renew()
    move("after")
    p.close()
    d.close()
    print("slept")
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("lanes", ["all", "tcp"])
@pytest.mark.parametrize("name", ["nixl", "ucx"])
def test_nobody_dies_of_memory_that_has_been_freed(
    name: str, lanes: str, usable_transport: Callable[[str], Any]
) -> None:
    """A read that the owner takes part in, as over TCP, is refused there."""
    usable_transport(name)
    done = drivers.run(textwrap.dedent(FREED.format(name=name)), UCX_TLS=lanes)
    assert (done.returncode, done.stdout[-6:]) == (0, "slept\n"), done.stderr
    refused = "is outside the 1 registered regions of this agent" in done.stdout
    assert refused == (lanes == "tcp"), done.stdout


def test_the_transport_lets_go_of_it(engine: Make) -> None:
    p = engine("p", LOCAL)
    transport = worker_of(p.workers[0, 0])._transport
    (region,) = p.cache((0, 0), 2, 4).regions
    part = memory_region(p.memory[0, 0][0])
    assert region in transport.memory.regions
    with pytest.raises(OutOfBoundsError, match="overlap"):
        transport.register([part])
    p.sleep()
    assert region not in transport.memory.regions
    transport.register([part])
    transport.unregister([part])


def test_what_it_is_asked_to_load_is_refused_and_the_other_engine_told(engine: Make) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    d.sleep()
    assert d.workers[0, 0].get_handshake_metadata() is None
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert not p.expired
    assert d.loaded["r"].cause == "refused"
    assert "this rank has no cache to load into: it was unregistered;" in d.loaded["r"].error
    d.workers[0, 0].unregister_kv_caches()  # a load that only tells is none


def test_it_offers_nothing_and_says_why(engine: Make, caplog: pytest.LogCaptureFixture) -> None:
    p = engine("p", LOCAL)
    p.sleep()
    assert p.prefill("r", [3], 4) is None
    assert "request r is not offered: the engine has published no cache, or has" in caplog.text
    counted = p.scheduler.stats().value("kvbridge_offers_total", outcome="declined", reason="cache")
    assert counted == 1


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_what_it_offered_at_the_last_moment_is_kept_by_nobody(engine: Make, direction: str) -> None:
    """Its workers hear of it when they have given their memory back."""
    p, d = engine("p", LOCAL, tp=2), engine("d", {**LOCAL, "direction": direction, "timeout_s": 5})
    met(p, d)
    params = p.prefill("r", [3], 4)
    for worker in p.workers.values():
        worker.unregister_kv_caches()
    d.load("r", [2], 4, params)
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert p.expired == {"r"}
    assert d.loaded["r"].cause == "lease", d.loaded["r"].error
    assert d.loaded["r"].seconds < 2, "it need not wait for its deadline"


# --- and after that ------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["all are told", "its ranks alone"])
def test_it_wakes_up_with_other_memory_and_is_not_believed_to_hold_the_old(
    engine: Make, told: bool
) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    met(p, d)
    old = p.prefill("old", [3], 4)
    p.step()
    if told:
        p.sleep()
    else:
        for worker in p.workers.values():
            worker.unregister_kv_caches()
    run([p, d], lambda: "old" in p.sent)
    p.renew()
    assert [worker_of(worker).agent.generation for worker in p.workers.values()] == [2, 2]
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert np.array_equal(p.tokens([3], 4), d.tokens([2], 4))
    d.load("old", [5], 4, old)
    run([p, d], lambda: "old" in d.loaded)
    assert d.loaded["old"].cause == "stale"


def test_a_load_that_was_on_its_way_when_the_other_engine_slept_fails(engine: Make) -> None:
    p, d = engine("p", {"name": "local", **LOCAL}), engine("d", SLOW)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    reading = worker_of(d.workers[0, 0])
    run([p, d], lambda: reading.stats().value("kvbridge_transfers_pending", phase="reading") == 1)
    p.sleep()
    p.renew()
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert (d.loaded["r"].cause, p.expired) == ("lease", {"r"})


def test_an_engine_that_has_slept_loads_again(engine: Make) -> None:
    p, d = engine("p", LOCAL, tp=2), engine("d", LOCAL)
    met(p, d)
    d.sleep()
    d.step()
    d.renew()
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    assert d.loaded["r"].ok, d.loaded["r"].error
    assert np.array_equal(p.tokens([3], 4), d.tokens([2], 4))


def test_to_sleep_twice_is_to_sleep_once(engine: Make) -> None:
    p = engine("p", LOCAL)
    p.sleep()
    p.sleep()
    p.renew()
    assert p.prefill("r", [3], 4) is not None


def test_several_connectors_sleep_and_wake_together(engine: Make) -> None:
    both = {"connectors": [{"name": "a", **LOCAL}, {"name": "b", **LOCAL}], "timeout_s": 5}
    p, d = engine("p", both, tp=2), engine("d", both)
    d.load("r", [2], 4, p.prefill("r", [3], 4))
    d.step()
    with pytest.raises(MemoryBusyError, match="connector 'a' cannot let go"):
        d.sleep()
    run([p, d], lambda: "r" in d.loaded and "r" in p.sent)
    held = p.prefill("held", [3], 4)
    p.step()
    p.sleep()
    assert p.workers[0, 0].get_handshake_metadata() is None
    d.load("held", [2], 4, held)
    run([p, d], lambda: "held" in d.loaded and "held" in p.sent)
    assert not d.loaded["held"].ok
    assert p.expired == {"held"}
    p.renew()
    children = [scheduler_of(child) for child in several(p.scheduler).children.values()]
    assert all(child.server.address.port for child in children)
    d.load("s", [2], 4, p.prefill("s", [3], 4))
    run([p, d], lambda: "s" in d.loaded and "s" in p.sent)
    assert d.loaded["s"].ok, d.loaded["s"].error


def test_requests_that_are_aborted_while_it_sleeps_are_free_at_once(engine: Make) -> None:
    p, d = engine("p", LOCAL), engine("d", LOCAL)
    d.sleep()
    request = Request("r", 4, params=p.prefill("r", [3], 4), aborted=True)
    assert d.scheduler.request_finished(request, ()) == (False, None)
    run([p, d], lambda: "r" in p.sent)
    assert not p.expired
