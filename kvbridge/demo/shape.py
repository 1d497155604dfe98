"""How an engine is split and how it lays out its cache: the shape, and who holds what in it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "layout": ("nhd", "hnd"),
    "kv": ("together", "apart"),
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The split and the cache layout of one engine.

    Attributes:
        tp: Tensor-parallel ranks per stage; they share out the heads.
        pp: Pipeline stages; they share out the layers.
        page: Tokens per cache page.
        layout: Order inside a page: ``"nhd"`` token, head, content; ``"hnd"`` head first.
        kv: K and V of a page ``"together"`` in one array, or ``"apart"`` in two.
    """

    tp: int = 1
    pp: int = 1
    page: int = 16
    layout: str = "nhd"
    kv: str = "together"

    def __post_init__(self) -> None:
        """Refuse values that make no engine.

        Raises:
            ValueError: If a number is below 1, or a word is not among those allowed.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            words = _CHOICES.get(field.name)
            if (value < 1) if words is None else (value not in words):
                raise _refused(field.name, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"tp=2,pp=1,page=16,layout=nhd"``; what is left out keeps its default.

        Raises:
            ValueError: If a key is unknown, given twice or without a value, or a value is not
                allowed. One line that names the key, the value and what is allowed.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in known:
                raise ValueError(
                    f"engine shape: unknown key {key!r} in {item!r}; allowed: {', '.join(known)}"
                )
            if key in values:
                raise ValueError(f"engine shape: {key} is given twice in {text!r}")
            if key not in _CHOICES and not (value.isascii() and value.isdigit()):
                raise _refused(key, value)
            values[key] = value if key in _CHOICES else int(value)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def _refused(key: str, value: object) -> ValueError:
    """Build the error for a value that is not allowed for ``key``."""
    allowed = " or ".join(_CHOICES[key]) if key in _CHOICES else "a whole number >= 1"
    return ValueError(f"engine shape: {key}={value} is not possible; allowed: {allowed}")


def layer_range(layers: int, pp: int, stage: int) -> range:
    """Return the global layers of a pipeline stage; stages may differ by one layer.

    Raises:
        ValueError: If there are more stages than layers, or no such stage.
    """
    if pp > layers:
        raise ValueError(f"pp={pp} is not possible: the model has only {layers} layer(s)")
    _check_rank("stage", stage, "pp", pp)
    return _share(layers, pp, stage)


def head_range(kv_heads: int, tp: int, rank: int) -> range:
    """Return the KV heads that a rank holds.

    With more ranks than heads each rank holds one head, and neighbouring ranks hold replicas.

    Raises:
        ValueError: If there is no such rank.
    """
    _check_rank("rank", rank, "tp", tp)
    if tp <= kv_heads:
        return _share(kv_heads, tp, rank)
    head = rank * kv_heads // tp
    return range(head, head + 1)


def query_heads(kv_heads: int, query_heads_per_kv: int, tp: int, rank: int) -> range:
    """Return the query heads that a rank computes: in rank order they are all, each once.

    Replicas of a KV head share out its query heads; where these do not suffice a rank has none.

    Raises:
        ValueError: If there is no such rank.
    """
    held = head_range(kv_heads, tp, rank)
    if tp <= kv_heads:
        return range(held.start * query_heads_per_kv, held.stop * query_heads_per_kv)
    replicas = [other for other in range(tp) if head_range(kv_heads, tp, other) == held]
    mine = _share(query_heads_per_kv, len(replicas), replicas.index(rank))
    first = held.start * query_heads_per_kv
    return range(first + mine.start, first + mine.stop)


def _share(count: int, parts: int, index: int) -> range:
    """Return part ``index`` of ``range(count)`` cut into ``parts`` nearly equal ones."""
    return range(index * count // parts, (index + 1) * count // parts)


def _check_rank(name: str, index: int, size_name: str, size: int) -> None:
    if not 0 <= index < size:
        raise ValueError(f"there is no {name} {index} with {size_name}={size}")
