"""The memory that UCX knows, and what is published of it."""

from collections.abc import Sequence

from kvbridge.transport import Region
from kvbridge_ucx.context import Context, Mapped
from kvbridge_ucx.peering import NAME, AgentCard
from kvbridge_ucx.translate import UcxError


class MappedMemory:
    """Registered with UCX. All of it is used by the worker's thread, but for the attributes.

    Attributes:
        card: What this agent publishes, but for its memory.
        info: The whole of it.
        agent_info: The same, sealed.
    """

    def __init__(self, context: Context, card: AgentCard) -> None:
        """Start with none."""
        self.card = card
        self.info, self.agent_info = card.encode(), card.seal(NAME)
        self._context = context
        self._mapped: dict[Region, Mapped] = {}
        self._retired: list[Mapped] = []

    @property
    def regions(self) -> tuple[Region, ...]:
        """What is published."""
        return tuple(self._mapped)

    def add(self, regions: Sequence[Region]) -> None:
        """Register memory.

        Raises:
            UcxError: UCX refuses a region; nothing was registered.
        """
        done: dict[Region, Mapped] = {}
        try:
            for region in regions:
                done[region] = self._context.map(region.address, region.nbytes)
        except UcxError:
            for mapped in done.values():
                self._context.unmap(mapped)
            raise
        self._mapped.update(done)
        self._publish()

    def retire(self, regions: Sequence[Region]) -> None:
        """Publish memory no more. UCX keeps it: a peer may still know its address."""
        self._retired.extend(self._mapped.pop(region) for region in dict.fromkeys(regions))
        self._publish()

    def unmap_retired(self) -> None:
        """Take out of UCX what was retired, once there are no peers."""
        while self._retired:
            self._context.unmap(self._retired.pop())

    def unmap_all(self) -> None:
        """Take all out of UCX."""
        self._retired.extend(self._mapped.values())
        self._mapped.clear()
        self.unmap_retired()

    def _publish(self) -> None:
        rkeys = ((region, mapped.rkey) for region, mapped in self._mapped.items())
        card = self.card.with_memory(rkeys)
        self.info, self.agent_info = card.encode(), card.seal(NAME)
