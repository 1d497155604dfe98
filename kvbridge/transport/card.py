"""What a driver publishes of its agent, as typed fields."""

from typing import Self

import msgspec

from kvbridge.errors import TransportError
from kvbridge.transport.frame import open_agent_info, seal_agent_info


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what a driver puts into its agent info: a subclass only names fields."""

    def encode(self) -> bytes:
        """Return what :meth:`decode` reads."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read what a peer encoded.

        Raises:
            TransportError: Its fields are not those of this version.
        """
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise TransportError(
                f"agent info of {len(payload)} bytes has unknown fields ({error}); "
                "run the same KVBridge version on both sides"
            ) from error

    def seal(self, transport: str) -> bytes:
        """Return the whole agent info of a transport."""
        return seal_agent_info(transport, self.encode())

    @classmethod
    def unseal(cls, transport: str, agent_info: bytes) -> Self:
        """Read what a peer sealed.

        Raises:
            TransportError: It is garbled, of another transport or of another version.
        """
        return cls.decode(open_agent_info(transport, agent_info))
