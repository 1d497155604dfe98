"""Who waits for a transport is woken by what can be polled, and by nothing later than its time."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvbridge.errors import ConfigError, TransportError
from kvbridge.transport import (
    Agent,
    Availability,
    Capabilities,
    Driver,
    Events,
    LocalMemory,
    TransportConfig,
)

LONG_S, SHORT_S = 20.0, 5.0
"""A wait that is to be cut short, and what counts as short."""


class Looker(Agent[Any]):
    """Has no thread that tells anything: what is there is found by looking."""

    def __init__(self, events: Events, look_every_s: float) -> None:
        self.events, self.look_every_s = events, look_every_s
        self.looks, self.comes_at = 0, math.inf
        self.why = ""

    @property
    def crash(self) -> str:
        return self.why

    def poll(self) -> None:
        self.looks += 1
        if self.looks == self.comes_at:
            self.events.heard("somebody", b"news")

    def info(self) -> bytes:
        raise NotImplementedError

    def connect(self, *args: object) -> Any:
        raise NotImplementedError

    def submit(self, *args: object) -> None:
        raise NotImplementedError

    def notify(self, *args: object) -> None:
        raise NotImplementedError

    def stop(self, timeout_s: float) -> bool:
        return True


class Looking(Driver[TransportConfig, Looker]):
    name = "looking"

    def __init__(self, look_every_s: float) -> None:
        super().__init__()
        self.look_every_s = look_every_s
        self.agent: Looker

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def start(self, options: TransportConfig, events: Events) -> Looker:
        self.agent = Looker(events, self.look_every_s)
        return self.agent


def opened(look_every_s: float) -> Looking:
    transport = Looking(look_every_s)
    transport.open()
    return transport


def seconds_of(wait: Callable[[float], object], timeout_s: float = LONG_S) -> float:
    start = time.monotonic()
    wait(timeout_s)
    return time.monotonic() - start


# --- what has been told -------------------------------------------------------------------------


def test_what_is_told_between_a_take_and_the_wait_ends_that_at_once() -> None:
    events = Events(LocalMemory())
    events.heard("a", b"1")
    assert len(events.take().notifications) == 1
    events.heard("a", b"2")
    assert seconds_of(events.wait) < SHORT_S
    assert [payload for _, payload in events.take().notifications] == [b"2"]
    assert not events.wait(0.01)


def test_what_is_told_while_it_is_taken_is_news_still() -> None:
    events = Events(LocalMemory())
    clear = events._news.clear

    def clear_and_hear() -> None:
        clear()
        events.heard("a", b"in between")

    events._news.clear = clear_and_hear  # type: ignore[method-assign]
    assert len(events.take().notifications) == 1
    assert events.wait(0), "a wait too many does no harm, and one that is slept over does"


def test_a_wait_is_ended_from_another_thread() -> None:
    events = Events(LocalMemory())
    threading.Timer(0.05, events.heard, ("a", b"")).start()
    assert seconds_of(events.wait) < SHORT_S


# --- what has to be looked for ------------------------------------------------------------------


def test_a_wait_looks_as_often_as_the_agent_says_and_ends_with_what_it_finds() -> None:
    transport = opened(0.001)
    transport.agent.comes_at = 5
    assert seconds_of(transport.wait) < SHORT_S
    assert transport.agent.looks == 5
    assert len(transport.poll().notifications) == 1


def test_a_wait_in_which_nothing_is_found_ends_in_time() -> None:
    transport = opened(0.001)
    assert 0.05 <= seconds_of(transport.wait, 0.05) < SHORT_S
    assert 1 < transport.agent.looks <= 51


def test_an_agent_that_tells_by_itself_is_asked_once() -> None:
    transport = opened(0.0)
    transport.wait(0.05)
    assert transport.agent.looks == 1
    threading.Timer(0.05, transport.agent.events.heard, ("a", b"")).start()
    assert seconds_of(transport.wait) < SHORT_S


def test_a_wait_raises_as_poll_does() -> None:
    with pytest.raises(TransportError, match="is not open"):
        Looking(0.0).wait(1)
    transport = opened(0.001)
    for bad in (-1, math.inf, math.nan, None):
        with pytest.raises(ConfigError, match=r"timeout_s of wait\(\)"):
            transport.wait(bad)  # type: ignore[arg-type]
    threading.Timer(0.05, setattr, (transport.agent, "why", "it broke")).start()
    with pytest.raises(TransportError, match="it broke"):
        transport.wait(LONG_S)
    transport.agent.events.heard("a", b"the last word")
    transport.close()
    assert seconds_of(transport.wait) < SHORT_S
    assert len(transport.poll().notifications) == 1
    transport.wait(0)
