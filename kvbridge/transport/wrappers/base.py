"""What wrappers have in common: every call goes to the transport inside."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbridge.errors import TransportError
from kvbridge.model.memory import Region
from kvbridge.transport.base import (
    Availability,
    Handle,
    Op,
    Peer,
    Poll,
    Transport,
    TransportConfig,
)
from kvbridge.transport.capabilities import Capabilities
from kvbridge.transport.descriptors import Descriptors
from kvbridge.transport.registry import TransportChoice, open_transport


class WrapperConfig(TransportConfig, frozen=True):
    """Options of every wrapper.

    Attributes:
        inner: The transport inside, with its own options. Where the wrapper was made around a
            transport that exists already, only the options count.
    """

    inner: TransportChoice = TransportChoice()


class TransportWrapper(Transport):
    """Hands every call to the transport inside; subclasses change what they are about.

    Peers and handles are those of the transport inside, and so are its memory and, once it is
    open, its name: engines that compare the names of their transports do not notice a wrapper,
    and one side may be wrapped alone.
    """

    def __init__(self, inner: Transport | None = None) -> None:
        """Wrap a transport that is not open yet; without one, ``open`` makes what it is told."""
        super().__init__()
        self._inner = inner
        self._closed = False

    @property
    def inner(self) -> Transport:
        """The transport inside.

        Raises:
            TransportError: Nothing was opened.
        """
        if self._inner is None:
            is_so = "closed; make a new one" if self._closed else "not open; call open() first"
            raise TransportError(f"transport {self.name!r} is {is_so}")
        return self._inner

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True)  # whether the one inside can run is found out by opening it

    def open(self, config: Mapping[str, Any] | TransportConfig | None = None) -> None:
        raise NotImplementedError

    def open_inner(self, choice: TransportChoice) -> None:
        """Open the transport inside, and take over what belongs to it.

        Raises:
            TransportError: It was opened or closed before.
        """
        if self._inner is None:
            if self._closed:
                raise TransportError(f"transport {self.name!r} is closed; make a new one")
            self._inner = open_transport(choice)
        else:
            self._inner.open(choice.options)
        self.name = self._inner.name  # type: ignore[misc]  # a wrapper's depends on what it wraps
        self.memory = self._inner.memory

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities if self._inner else Capabilities()

    def register(self, regions: Sequence[Region]) -> None:
        self.inner.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self.inner.unregister(regions)

    def agent_info(self) -> bytes:
        return self.inner.agent_info()

    def add_peer(self, agent_info: bytes, regions: Sequence[Region], *, timeout_s: float) -> Peer:
        return self.inner.add_peer(agent_info, regions, timeout_s=timeout_s)

    def drop_peer(self, peer: Peer) -> None:
        self.inner.drop_peer(peer)

    def submit(
        self,
        op: Op,
        peer: Peer,
        local: Descriptors,
        remote: Descriptors,
        notification: bytes = b"",
    ) -> Handle:
        return self.inner.submit(op, peer, local, remote, notification)

    def notify(self, peer: Peer, payload: bytes) -> None:
        self.inner.notify(peer, payload)

    def poll(self) -> Poll:
        return self.inner.poll()

    def wait(self, timeout_s: float) -> None:
        self.inner.wait(timeout_s)

    def abandon(self, handle: Handle) -> None:
        self.inner.abandon(handle)

    def close(self, *, timeout_s: float = 5.0) -> tuple[Region, ...]:
        self.check_process()
        self._closed = True
        return self._inner.close(timeout_s=timeout_s) if self._inner else ()
