"""Work beside the steps of a small engine that is done only when a test says so."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from kvbridge.connector.bridge import BridgeConnector
from kvbridge.connector.config import ConnectorConfig
from kvbridge.connector.worker import BridgeWorker
from kvbridge.model import Rank, TransferTopology


class Held(Executor):
    """Works only when it is told to."""

    def __init__(self, *, begins: bool = False) -> None:
        self.begins = begins  # so that nothing can be taken back
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.begins:
            future.set_running_or_notify_cancel()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def go(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future, work in waiting:
            if not future.cancelled():
                future.set_result(work())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for future, _ in self.waiting:
            future.cancel()


def working_in(threads: Executor, **config: Any) -> Callable[[Rank, TransferTopology], Any]:
    """Return what makes worker halves that work beside their steps somewhere else."""

    def make(rank: Rank, topology: TransferTopology) -> BridgeConnector:
        half = BridgeWorker.open(
            ConnectorConfig(**config), "local", topology, model="m", digesting=threads
        )
        return BridgeConnector("local", worker_half=half)

    return make
