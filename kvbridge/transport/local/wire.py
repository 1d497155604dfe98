"""How two agents find each other, and make sure that the other one is who it should be."""

import hmac
import socket
import struct
import time
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from kvbridge.errors import PeerLostError, TransportError
from kvbridge.transport import Card
from kvbridge.transport.local.library import read_bytes
from kvbridge.transport.local.translate import peer_error

PROTOCOL_VERSION = 1
NOTIFY_MAX_BYTES = 64 << 10
TOKEN_BYTES = 32
HELLO, NOTIFICATION = b"h", b"n"  # the first byte of each packet

_Name = Annotated[str, Meta(min_length=1, max_length=64)]
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class AgentInfo(Card, frozen=True):
    """What a peer needs to reach an agent, and to know it when it sees it.

    Attributes:
        version: Of this exchange.
        agent: Name of the agent; its socket is named after it.
        token: Random bytes that the agent keeps in its memory.
        token_address: Where it keeps them.
    """

    version: int
    agent: _Name
    token: _Token
    token_address: Annotated[int, Meta(gt=0)]

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        info = super().decode(payload)
        if info.version != PROTOCOL_VERSION:
            raise TransportError(
                f"peer {info.agent} speaks version {info.version} of transport 'local', "
                f"this side {PROTOCOL_VERSION}; run the same KVBridge version on both sides"
            )
        return info

    @property
    def socket_name(self) -> bytes:
        """The leading zero makes the name abstract."""
        return b"\0kvbridge-local-" + self.agent.encode()


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """First packet each way: who speaks, and that it was invited."""

    version: int
    agent: _Name
    token: _Token


def encode_hello(agent: str, token: bytes) -> bytes:
    """Return the packet that opens a connection, or answers it."""
    return HELLO + msgspec.msgpack.encode(Hello(PROTOCOL_VERSION, agent, token))


def decode_hello(packet: bytes, token: bytes) -> str:
    """Return the name of the agent that sent this packet.

    Raises:
        TransportError: It is no hello, or not meant for this connection.
    """
    if packet[:1] != HELLO:
        raise TransportError("the first packet is no hello" if packet else "it hung up")
    try:
        hello = msgspec.msgpack.decode(packet[1:], type=Hello)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the hello is garbled: {error}") from error
    if hello.version != PROTOCOL_VERSION or not hmac.compare_digest(hello.token, token):
        raise TransportError(f"the hello of {hello.agent} has another version or token")
    return hello.agent


def connect(info: AgentInfo, agent: str, deadline_s: float) -> tuple[socket.socket, int]:
    """Connect to an agent and make sure that it is the one meant.

    Returns:
        The connection, and the process of the agent as its number is *here*.

    Raises:
        PeerLostError: It has ended, does not answer in time, or is somebody else.
        TransportUnavailableError: The kernel keeps this process from its memory.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Room for a few packets of the largest size, whatever the system's default is.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * NOTIFY_MAX_BYTES)
        _connect_until(sock, info.socket_name, deadline_s)
        pid = _check_memory(sock, info)
        sock.send(encode_hello(agent, info.token))
        sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
        answer = decode_hello(sock.recv(1024), info.token)
        sock.setblocking(False)
        if answer != info.agent:
            raise PeerLostError(
                f"peer {info.agent} answers as {answer}; fetch its agent info again"
            )
    except TransportError as error:
        sock.close()
        if isinstance(error, PeerLostError):
            raise
        raise PeerLostError(f"peer {info.agent} refused this agent ({error})") from error
    except OSError as error:
        sock.close()
        raise peer_error(error, info.agent) from error
    return sock, pid


def _check_memory(sock: socket.socket, info: AgentInfo) -> int:
    # From the kernel, so it is right across pid namespaces, and nobody can pretend.
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0:
        raise PeerLostError(
            f"peer {info.agent} is in another pid namespace; share one between both containers "
            "(docker run --pid=container:NAME, or shareProcessNamespace: true)"
        )
    # Proves process, permission and address space at once, before the token is shown to it.
    if not hmac.compare_digest(read_bytes(pid, info.token_address, TOKEN_BYTES), info.token):
        raise PeerLostError(f"process {pid} is not peer {info.agent}; fetch its agent info again")
    return int(pid)


def _connect_until(sock: socket.socket, name: bytes, deadline_s: float) -> None:
    sock.setblocking(False)
    while True:
        try:
            sock.connect(name)
        except BlockingIOError:
            # Its queue of callers is full.
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.005)
        else:
            return
