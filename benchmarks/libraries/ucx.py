"""libucp: a get or put for each piece, and one flush."""

import time
from typing import Any

from benchmarks.libraries.library import WAIT_S, Library
from kvbridge.transport import Descriptors, Op, Region
from kvbridge_ucx import library
from kvbridge_ucx.config import UcxConfig
from kvbridge_ucx.context import Context


class Ucx(Library):
    """The bindings of the transport without its thread, its checks and its protocol."""

    def __init__(self, region: Region, options: dict[str, Any]) -> None:
        chosen = UcxConfig(**options)
        device = chosen.chosen_device()
        self._context = Context(
            library.load(chosen.library, device),
            library.settings(device, chosen.tls),
            received=lambda *_: None,
            failed=lambda *_: None,
        )
        self._mapped = self._context.map(region.address, region.nbytes)
        self._endpoint = self._rkey = 0

    def card(self) -> tuple[bytes, bytes]:
        return self._context.address, self._mapped.rkey

    def meet(self, card: tuple[bytes, bytes]) -> None:
        self._endpoint = self._context.connect(card[0])
        self._rkey = self._context.unpack(self._endpoint, card[1])

    def move(self, op: Op, local: Descriptors, remote: Descriptors) -> None:
        ended: list[int] = []
        self._context.post(
            op,
            self._endpoint,
            local.address.tolist(),
            local.nbytes.tolist(),
            remote.address.tolist(),
            [self._rkey] * len(remote),
            short=False,
        )
        self._context.flush(self._endpoint, ended.append)
        deadline = time.monotonic() + WAIT_S
        while not ended:
            if time.monotonic() > deadline:
                raise TimeoutError(f"pending after {WAIT_S} s")
            self._context.progress()
        if ended[0]:
            raise OSError(self._context.text(ended[0]))

    def progress(self) -> int:
        return self._context.progress()
