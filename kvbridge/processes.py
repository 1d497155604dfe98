"""Processes that leave Ctrl-C to the one that started them."""

import signal
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start_uninterrupted(process: BaseProcess) -> None:
    """Start a process that Ctrl-C never reaches.

    A terminal sends it to all of its processes; what it means is decided by the first one alone,
    to which it also comes if it was sent meanwhile.
    """
    # Started with the first process, it would take back that interrupts are kept from that.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
