"""Mooncake over TCP."""

from typing import Any

from benchmarks.libraries.library import Library
from kvbridge.transport import Descriptors, Op, Region
from kvbridge_mooncake import library


class Mooncake(Library):
    """Its synchronous batches."""

    def __init__(self, region: Region, options: dict[str, Any]) -> None:
        engine = library.load().make_engine("127.0.0.1")
        if engine is None or engine.register_memory(region.address, region.nbytes):
            raise OSError("Mooncake does not start")
        self._engine: Any = engine
        self._peer = ""

    def card(self) -> str:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def meet(self, card: str) -> None:
        self._peer = card

    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        call = getattr(self._engine, f"batch_transfer_sync_{op}")
        lists = (local.address.tolist(), remote.address.tolist(), local.nbytes.tolist())
        if call(self._peer, *lists):
            raise OSError(f"Mooncake's {op} failed")
