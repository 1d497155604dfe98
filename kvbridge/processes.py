"""Processes that leave Ctrl-C to the one that started them."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_uninterrupted(process: BaseProcess) -> None:
    """Start a process that Ctrl-C never reaches."""
    # Started with the first process, it would take back that interrupts are kept from that.
    resource_tracker.ensure_running()
    with uninterrupted():
        process.start()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C never reach a process that is started within.

    A terminal sends it to all of its processes; what it means is decided by the first one alone,
    to which it also comes if it was sent meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with interrupted_later():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Hold back an interrupt until what is within is done, as where libraries would swallow it.

    One that reaches another thread is held back, too: Python's first thread heeds it all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for number in held[:1]:
            signal.raise_signal(number)
