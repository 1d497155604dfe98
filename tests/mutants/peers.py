"""Peers that are taken for others, kept too long, or cost something for ever."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import (
    Descriptors,
    Handle,
    Op,
    Peer,
    Region,
    TransportConfig,
    seal_agent_info,
)
from kvbridge.transport.local.worker import LocalPeer
from tests.mutants.base import Mutant, leak


class UsesTheLatestPeer(Mutant):
    """Every operation goes to the peer that was added last."""

    killed_by = "CONC-02"
    says = "one of three"
    _latest: LocalPeer | None = None

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        self._latest = super()._mine(peer)
        return peer

    def _mine(self, peer: Peer) -> LocalPeer:
        sound: LocalPeer = super()._mine(peer)
        return replace(sound, pid=self._latest.pid) if self._latest else sound


class OneNameForAll(Mutant):
    """Every peer has the same name."""

    killed_by = "PEER-02"
    says = "two agents have one name"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        object.__setattr__(peer, "agent", "peer")
        return peer


class DropsItsTwin(Mutant):
    """Dropping a peer drops all that have the same name."""

    killed_by = "PEER-06"
    says = "was dropped"

    def drop_peer(self, peer: Peer) -> None:
        for one in [known for known in self._peers if known.agent == peer.agent]:
            super().drop_peer(one)


class PromisesMoreForAPeer(Mutant):
    """A peer has a capability that the transport does not declare."""

    killed_by = "PEER-01"
    says = "failure_is_clean"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        better = replace(peer.capabilities, failure_is_clean=True)
        object.__setattr__(peer, "capabilities", better)
        return peer


class LeaksADescriptorPerPeer(Mutant):
    """What belongs to a peer outlives it."""

    killed_by = "PEER-09"
    says = "descriptors"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        leak()
        return super().add_peer(agent_info, regions, timeout_s=timeout_s)


class LeaksAThreadPerPeer(Mutant):
    """A thread of each peer outlives it."""

    killed_by = "PEER-09"
    says = "threads"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().add_peer(agent_info, regions, timeout_s=timeout_s)


class UsesDroppedPeers(Mutant):
    """A dropped peer can be used as before."""

    killed_by = "PEER-07"
    says = "raised nothing"

    def drop_peer(self, peer: Peer) -> None:
        self._opened()


class UsesForeignPeers(Mutant):
    """A peer that it has not made crashes it."""

    killed_by = "REFUSE-10"
    says = "AttributeError"

    def _mine(self, peer: Peer) -> LocalPeer:
        peer.channel.check()  # type: ignore[attr-defined]
        return peer  # type: ignore[return-value]


class ReadsAnyAgentInfo(Mutant):
    """The digest of agent info is not looked at."""

    killed_by = "PEER-03"
    says = "raised nothing"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        try:
            *_, payload = msgspec.msgpack.decode(agent_info)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise TransportError("the agent info is garbled") from error
        return super().add_peer(seal_agent_info(self.name, payload), regions, timeout_s=timeout_s)


class NamesPeersByRank(Mutant):
    """A peer is named after its place among the living: one that starts again has it again."""

    killed_by = "RESTART-01"
    says = "both have the name"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        rank = sum(not known.channel.lost for known in self._peers.values())
        peer = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        object.__setattr__(peer, "agent", f"rank {rank}")
        return peer


class ConnectsLater(Mutant):
    """A peer that cannot be reached is added all the same, and all that is asked of it is done."""

    killed_by = "RESTART-03"
    says = "with a peer that has ended: is"

    def __init__(self) -> None:
        super().__init__()
        self._unreachable: set[Peer] = set()

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        try:
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)
        except PeerLostError:
            peer = super().add_peer(self.agent_info(), regions, timeout_s=timeout_s)
            self._unreachable.add(peer)
            return peer

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        if peer in self._unreachable:
            local = remote = Descriptors(local.address[:0], local.nbytes[:0])
        return super().submit(op, peer, local, remote, notification)


class AddsInOneThreadOnly(Mutant):
    """Nothing can be submitted while a peer is being added."""

    killed_by = "CONC-04"
    says = "RuntimeError"
    _adding = False

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        self._adding = True
        try:
            time.sleep(0.02)
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)
        finally:
            self._adding = False

    def _mine(self, peer: Peer) -> LocalPeer:
        if self._adding:
            raise RuntimeError("the library is busy in another thread")
        sound: LocalPeer = super()._mine(peer)
        return sound


class UsesThePeersOfOnce(Mutant):
    """What is known of a peer is what was known when it was added first."""

    killed_by = "REG-07"
    says = "OutOfBoundsError"

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Peer] = {}

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        if agent_info not in self._known:
            self._known[agent_info] = super().add_peer(agent_info, regions, timeout_s=timeout_s)
        return self._known[agent_info]


class UsesDeadPeers(Mutant):
    """A peer that is dead is used as if each failure were the first."""

    killed_by = "FAIL-03"
    says = "takes a peer that is dead"

    def _mine(self, peer: Peer) -> LocalPeer:
        assert isinstance(peer, LocalPeer)
        return peer


class DiesWithItsReaders(Mutant):
    """A peer that goes away takes the owner's process with it."""

    killed_by = "FAIL-05"
    says = "died, by SIGABRT"

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        super().open(config)
        hub = self._opened().hub
        hub._hang_up = lambda sock: os.abort()  # type: ignore[method-assign]


class WaitsLongerForPeers(Mutant):
    """The time-out of add_peer is taken for a hint."""

    killed_by = "PEER-05"
    says = "seconds of an add_peer"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        try:
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)
        except PeerLostError:
            time.sleep(8)
            raise


class LetsTheSystemsErrorOut(Mutant):
    """What the system says of a peer that is gone comes out as it is."""

    killed_by = "PEER-04"
    says = "ConnectionRefusedError"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        try:
            return super().add_peer(agent_info, regions, timeout_s=timeout_s)
        except PeerLostError as error:
            raise ConnectionRefusedError(str(error)) from error


class LimitsEachTry(Mutant):
    """The time-out of add_peer is for one try, of which there are five."""

    killed_by = "PEER-04"
    says = "seconds of an add_peer"

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        for _ in range(4):
            with suppress(PeerLostError):
                return super().add_peer(agent_info, regions, timeout_s=timeout_s)
            time.sleep(timeout_s)
        return super().add_peer(agent_info, regions, timeout_s=timeout_s)
