"""The shape of an engine that is only planned for, with all that a planner can be told."""

from dataclasses import dataclass, fields

from kvbridge.demo.shape import EngineShape

NUMBER_MAX = 1_000_000
"""Far above any engine; keeps a slip of the keyboard from running for hours."""


@dataclass(frozen=True, slots=True)
class PaperShape(EngineShape):
    """The split and the cache layout of an engine that is only planned for.

    Attributes:
        pages_per_block: Kernel pages that share the ``page`` tokens of a block.
        dcp: Decode-context-parallel ranks; they share out the tokens of a sequence.
        interleave: Tokens that stay together in that round-robin.
    """

    pages_per_block: int = 1
    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        """Refuse values that make no engine.

        Raises:
            ValueError: If a number is below 1 or above all reason, or a word is not among those
                allowed.
        """
        EngineShape.__post_init__(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value > NUMBER_MAX:
                raise ValueError(
                    f"engine shape: {field.name}={value} is not possible; allowed: a whole number "
                    f"from 1 to {NUMBER_MAX:,}"
                )

    def __str__(self) -> str:
        """Return the text that ``parse`` reads, without rare keys that keep their default."""
        rare = PaperShape.__dataclass_fields__.keys() - EngineShape.__dataclass_fields__.keys()
        items = (
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in rare or getattr(self, field.name) != field.default
        )
        return ",".join(items)
