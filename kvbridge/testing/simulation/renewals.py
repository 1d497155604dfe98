"""What engines have said of blocks that they were asked to keep for longer."""

from collections.abc import Callable, Iterable, Sequence

from kvbridge.handshake import EngineAddress, RenewalReply, RenewalRequest
from kvbridge.testing.simulation.rules import ASKED
from kvbridge.testing.simulation.world import World


class Renewals:
    """Follows what is asked and answered.

    Attributes:
        kept: Is told of each promise: at which address, of which engine, for which request, and
            until when.
    """

    kept: Callable[[EngineAddress, str, str, float], None]

    def __init__(self, world: World) -> None:
        """Start with nothing said."""
        self._world = world
        self._refused: set[tuple[str, EngineAddress, str]] = set()
        self._since_s: dict[tuple[str, str], float] = {}

    def begins(self, asker: str, transfer_ids: Iterable[str]) -> None:
        """Take note that an engine gets a request: it may ask, whatever was said before."""
        for name in transfer_ids:
            self._since_s[asker, name] = self._world.now_s
            self._refused = {each for each in self._refused if (each[0], each[2]) != (asker, name)}

    def asks(self, address: EngineAddress, request: RenewalRequest) -> None:
        """Check that what is asked has not been refused."""
        for name in request.requests:
            if (request.asker, address, name) in self._refused:
                self._world.violate(ASKED, f"it asks for {name!r}", 0, request.asker)

    def promised(
        self,
        address: EngineAddress,
        request: RenewalRequest,
        kept: Sequence[bool],
        lease_s: float,
    ) -> None:
        """Take note of an answer as it is given."""
        until_s = self._world.now_s + lease_s
        for name, is_kept in zip(request.requests, kept, strict=True):
            if is_kept:
                self.kept(address, request.engine_id, name, until_s)

    def hears(
        self, address: EngineAddress, request: RenewalRequest, reply: RenewalReply, asked_s: float
    ) -> None:
        """Take note of an answer as it arrives."""
        if not request.incarnation:
            return  # it is still being computed: not kept may mean not yet
        for name, is_kept in zip(request.requests, reply.kept, strict=True):
            if not is_kept and asked_s >= self._since_s.get((request.asker, name), 0.0):
                self._refused.add((request.asker, address, name))
