"""Ctrl-C where it would be lost, and where it must not arrive."""

import os
import signal
import threading

import pytest

from kvbridge.processes import interrupted_later


def _interrupt_and_swallow() -> list[str]:
    """Do as the extension modules do that swallow whatever happens while they are loaded."""
    went = []
    try:
        os.kill(os.getpid(), signal.SIGINT)
        went.append("on")
    except KeyboardInterrupt:
        went.append("swallowed")
    return went


def test_an_interrupt_that_would_be_swallowed_arrives_afterwards() -> None:
    went: list[str] = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupted_later():
        went = _interrupt_and_swallow()
    assert went == ["on"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_without_an_interrupt_nothing_happens() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with interrupted_later():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_leave_the_handler_alone() -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with interrupted_later():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
