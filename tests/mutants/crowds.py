"""Wrong where several agents act at once, and where one of them stops, goes, or comes back."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import psutil

from kvbridge.errors import PeerLostError
from kvbridge.transport import (
    Descriptors,
    Finished,
    Handle,
    Op,
    Peer,
    Poll,
    Region,
    State,
    TransportConfig,
)
from kvbridge.transport.local.worker import Job, LocalPeer
from tests.mutants.base import CapabilityMutant, Copy, Mutant, SharedWordMutant
from tests.mutants.ends import WaitsForTheOwner

TRAVEL_S = 0.02  # what a request takes to the owner


def process_of(peer: Peer) -> Path:
    """Return where the kernel tells of a peer's process."""
    assert isinstance(peer, LocalPeer)
    return Path(f"/proc/{peer.pid}")


class AnswersNobodyWhileItActs(SharedWordMutant):
    """An agent whose own operation is under way lets others wait until that has ended."""

    killed_by = "CONC-01"
    says = "is pending after"

    def copy(self, job: Job, sound: Copy) -> str:
        self.word.write_text("busy")
        time.sleep(TRAVEL_S)
        while self.words[job.peer].read_text():
            time.sleep(0.001)
        try:
            return sound(job)
        finally:
            self.word.write_text("")


class KeepsOneRequest(SharedWordMutant):
    """An owner keeps one request: another one replaces it, and both are taken for done."""

    killed_by = "CONC-03"
    says = "of three agents"

    def copy(self, job: Job, sound: Copy) -> str:
        request = self.words[job.peer]
        request.write_text(str(self.word))
        time.sleep(TRAVEL_S)
        return sound(job) if request.read_text() == str(self.word) else ""


class DiesHoldingTheLock(SharedWordMutant):
    """A writer locks the owner's memory, and nobody unlocks it for one that was killed."""

    killed_by = "FAIL-06"
    says = "is pending after"

    def copy(self, job: Job, sound: Copy) -> str:
        if job.handle.op == "read":
            return sound(job)
        lock = self.words[job.peer]
        while lock.read_text():
            time.sleep(0.001)
        lock.write_text("locked")
        try:
            return sound(job)
        finally:
            lock.write_text("")


class HoldsUpOthers(CapabilityMutant, WaitsForTheOwner):
    """While one owner is stopped, the operations with all others wait behind those with it."""

    killed_by = "FAIL-08"
    says = "is pending after"
    changes = {"owner_passive": False}


class AsksTheStoppedOnce(CapabilityMutant):
    """What was asked of an owner that did not answer at once is never asked again."""

    killed_by = "FAIL-08"
    says = "is pending after"
    changes = {"owner_passive": False}

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if "T (stopped)" in (process_of(peer) / "status").read_text():
            return Handle(op, peer, local.total_nbytes)
        return super().submit(op, peer, local, remote, notification)


class AddsOneAfterTheOther(Mutant):
    """A lock is held while a peer is waited for, so a silent one holds up all others."""

    killed_by = "CONC-06"
    says = "'add_peer' did not return within"

    def __init__(self) -> None:
        super().__init__()
        self._adding = threading.Lock()

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        with self._adding:
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)


class DropsWhenAllAreAdded(Mutant):
    """A peer is not dropped before all that are being added have answered."""

    killed_by = "CONC-06"
    says = "'drop_peer' did not return within"

    def __init__(self) -> None:
        super().__init__()
        self._adding: set[threading.Thread] = set()

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        self._adding.add(threading.current_thread())
        try:
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)
        finally:
            self._adding.discard(threading.current_thread())

    def drop_peer(self, peer: Peer) -> None:
        while self._adding:
            time.sleep(0.001)
        super().drop_peer(peer)


class LooksForItsLaneInTheCrowd(Mutant):
    """What carries the bytes is told from what happens meanwhile, whoever it is that does it."""

    killed_by = "CONC-06"
    says = "path of a peer"

    def __init__(self) -> None:
        super().__init__()
        self._adding = 0

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        self._adding += 1
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        if self._adding > 1:
            object.__setattr__(peer, "path", "tcp")
        self._adding -= 1
        return peer


class ForgetsWhatAGoodbyeEnds(Mutant):
    """Operations with an owner that closes, and does not die, are never reported."""

    killed_by = "FAIL-12"
    says = "is pending after"

    def poll(self) -> Poll:
        polled = super().poll()
        kept = [
            end
            for end in polled.finished
            if end.state is State.DONE or not process_of(end.handle.peer).exists()
        ]
        return Poll(tuple(kept), polled.notifications)


class NoticesARestartTooLate(Mutant):
    """A lost peer is asked for at its old door; that somebody else answered is seen afterwards."""

    killed_by = "RESTART-02"
    says = "new agent"

    def __init__(self) -> None:
        super().__init__()
        self._doors: dict[Peer, int] = {}
        self._with_others: set[Handle] = set()

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        self._door, listener = _first_free_door()
        threading.Thread(target=self._answer, args=[listener], daemon=True).start()

    def _answer(self, listener: Listener) -> None:
        while True:
            with listener.accept() as caller:
                caller.send((super().agent_info(), self.memory.regions))

    def agent_info(self) -> bytes:
        return msgspec.msgpack.encode((self._door, super().agent_info()))

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        door, info = msgspec.msgpack.decode(agent_info, type=tuple[int, bytes])
        peer = super().add_peer(info, regions, timeout_s=timeout_s)
        self._doors[peer] = door
        return peer

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        try:
            return super().submit(op, peer, local, remote, notification)
        except PeerLostError:
            with Client(_address_of(self._doors[peer])) as door:
                info, regions = door.recv()
        other = super().add_peer(info, regions, timeout_s=1.0)
        offset = remote.address - np.uint64(peer.table.regions[0].address)
        remote = replace(remote, address=offset + np.uint64(regions[0].address))
        handle = super().submit(op, other, local, remote, notification)
        self._with_others.add(handle)
        return handle

    def poll(self) -> Poll:
        polled = super().poll()
        ended = [
            Finished(end.handle, State.FAILED, "the peer is another one since")
            if end.handle in self._with_others
            else end
            for end in polled.finished
        ]
        return Poll(tuple(ended), polled.notifications)


def _address_of(door: int) -> str:
    # Abstract, so it is free again when its process has ended; each run of the suite has its own.
    suite = psutil.Process(os.getppid()).ppid()  # the parent forks agents for the suite
    return f"\0kvbridge-mutant-{suite}-{door}"


def _first_free_door() -> tuple[int, Listener]:
    door = 0
    while True:
        try:
            return door, Listener(_address_of(door))
        except OSError:  # it is taken
            door += 1


class KeepsConnectionsOfItsProcess(Mutant):
    """All agents of a process share their connections, which end with who made them."""

    killed_by = "RESTART-04"
    says = "made by another transport"
    _known: ClassVar[dict[bytes, Peer]] = {}

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        if agent_info not in self._known:
            self._known[agent_info] = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        return self._known[agent_info]
