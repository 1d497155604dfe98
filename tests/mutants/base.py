"""What the wrong transports are made from: the sound one, and where it can be bent."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvbridge.transport import (
    Capabilities,
    Descriptors,
    Handle,
    Op,
    Peer,
    Region,
    TransportConfig,
)
from kvbridge.transport.local import LocalTransport
from kvbridge.transport.local.worker import Job

Copy = Callable[[Job], str]


class Mutant(LocalTransport):
    """A transport that is wrong in one way, which its docstring names.

    Attributes:
        killed_by: The rule that must notice.
        says: A part of what that rule then says.
        sound: What it would be without its mistake.
    """

    killed_by: ClassVar[str]
    says: ClassVar[str]
    sound: ClassVar[type[LocalTransport]] = LocalTransport


class PieceMutant(Mutant):
    """Changes the pieces before they are looked at."""

    def pieces(
        self, op: Op, local: Descriptors, remote: Descriptors
    ) -> tuple[Descriptors, Descriptors]:
        raise NotImplementedError

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        local, remote = self.pieces(op, local, remote)
        return super().submit(op, peer, local, remote, notification)


class CopyMutant(Mutant):
    """Changes a copy after all checks, in the thread that copies."""

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        copier = self._opened().copier
        sound = copier._copy
        copier._copy = lambda job: self.copy(job, sound)  # type: ignore[method-assign]

    def copy(self, job: Job, sound: Copy) -> str:
        raise NotImplementedError


class SharedWordMutant(CopyMutant):
    """Has a word that its peers see and set, too; it lives as long as the agent's process.

    Attributes:
        word: The agent's own.
        words: That of each peer.
    """

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        self.word = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('word')}")
        self.words: dict[Peer, Path] = {}

    def agent_info(self) -> bytes:
        return msgspec.msgpack.encode((str(self.word), super().agent_info()))

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        word, info = msgspec.msgpack.decode(agent_info, type=tuple[str, bytes])
        peer = super().add_peer(info, regions, timeout_s=timeout_s)
        self.words[peer] = Path(word)
        return peer


class Declares(LocalTransport):
    """Declares something else than LocalTransport, and keeps to it as far as that can."""

    changes: ClassVar[Mapping[str, Any]]

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self.changes)

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        object.__setattr__(peer, "capabilities", self.capabilities)
        return peer


class CapabilityMutant(Declares, Mutant):
    """Declares something, and does something else.

    Attributes:
        declares_a_lie: The declaration itself is what is wrong; no transport could keep to it.
    """

    declares_a_lie: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Make the sound transport that declares the same."""
        super().__init_subclass__()
        if "changes" in vars(cls) and not cls.declares_a_lie:
            place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.sound"}
            cls.sound = type("Sound", (Declares,), {**place, "changes": cls.changes})


def reason_of(job: Job, sound: Copy) -> str:
    """Copy; return why that failed, whatever way it is said."""
    try:
        return sound(job)
    except OSError as error:
        return f"the kernel says: {error}"


def later(seconds: float, do: Callable[[], object]) -> None:
    """Do something in a while."""
    timer = threading.Timer(seconds, do)
    timer.daemon = True
    timer.start()


def leak() -> None:
    """Lose a file descriptor."""
    os.open(os.devnull, os.O_RDONLY)
