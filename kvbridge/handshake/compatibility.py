"""Comparing two engines fact by fact, before anything of theirs is believed.

Each rank publishes *factors*: what must agree whatever the sharding. Those of an engine are the
union over its ranks. A comparison is a list of differences, each with both values, how severe it
is and what to do; never a hash, which could not say any of that.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbridge.errors import HandshakeError, IncompatibleError
from kvbridge.handshake.metadata import Factors
from kvbridge.model import LayerCache, RankCache

Severity = Literal["error", "warning"]

# Whatever a stranger sent, writing it takes no longer than reading what is written.
_SHOWN = 120
_LISTED_MAX = 16
_LOOKED_AT_MAX = 4096
_short = reprlib.Repr()
_short.maxlist = _short.maxdict = _short.maxstring = _short.maxother = _SHOWN

_KV_FAMILY = frozenset({"kv", "k", "v"})

LAYERED = ("layers", "dtype", "heads", "cell_bytes")
"""Factors that a pipeline stage knows only its own part of."""

ADVICE: dict[str, str] = {
    "model": "serve the same model on both engines, or give it the same name",
    "revision": "pin the same revision of the model on both engines",
    "transport": "configure a transport that both engines have",
    "layers": "cache the same layers on both engines: check draft models and pipeline stages",
    "draft_layers": "use the same draft model on both engines, or none",
    "dtype": "set the same cache dtype on both engines",
    "heads": "serve the same model on both engines: its KV heads are what is shared out",
    "cell_bytes": "use the same head size and cache dtype on both engines; of opaque blocks, "
    "the same block size",
    "cache_groups": "use the same cache groups: hybrid caches, windows and draft models count",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that two engines do not share.

    Attributes:
        field: Name of the factor.
        local: Its value here; None if this side does not know it.
        remote: Its value there.
        severity: Whether the engines can work together all the same.
        advice: What to do.
    """

    field: str
    local: Any
    remote: Any
    severity: Severity
    advice: str

    def __str__(self) -> str:
        """Say it in one line."""
        here, there = _apart(self.local, self.remote)
        return f"{self.field:.{_SHOWN}} is {here} here and {there} there ({self.advice})"


def factors_of(
    cache: RankCache,
    *,
    model: str,
    transport: str,
    revision: str | None = None,
    draft_layers: Iterable[int] = (),
) -> dict[str, Any]:
    """Return the facts of a rank that must agree on both sides, whatever the sharding.

    A drafter without a cache of its own is no factor (report B49).

    Args:
        cache: What the rank holds.
        model: Name of the model, as the engines agree to call it.
        transport: Name of the transport.
        revision: Revision of the model, if it is pinned.
        draft_layers: Layers that belong to a draft model, by global index.
    """
    drafted = set(draft_layers)
    values: dict[str, dict[str, set[Any]]] = {"dtype": {}, "heads": {}, "cell_bytes": {}}
    for layer in cache.layers:
        for family, facts in _families(layer).items():
            for factor, value in zip(("dtype", "heads", "cell_bytes"), facts, strict=True):
                values[factor].setdefault(family, set()).add(value)
    return {
        "model": model,
        "revision": revision,
        "transport": [transport],
        "layers": sorted([layer.layer, layer.name] for layer in cache.layers),
        "draft_layers": sorted(drafted & {layer.layer for layer in cache.layers}),
        "cache_groups": [[group.kind, group.window_tokens] for group in cache.groups],
        **{
            factor: {family: sorted(found) for family, found in sorted(families.items())}
            for factor, families in values.items()
        },
    }


def _families(layer: LayerCache) -> dict[str, tuple[str, int, int]]:
    """Return dtype, units in all, and bytes of a unit and token, of each kind of component."""
    families: dict[str, tuple[str, int, int]] = {}
    for component in layer.components:
        family = "kv" if component.name in _KV_FAMILY else component.name
        before = families.get(family, ("", 0, 0))[2]
        nbytes = before + component.cell_bytes
        families[family] = (component.dtype, component.unit_total, nbytes)
    return families


def engine_factors(ranks: Iterable[Factors]) -> dict[str, Any]:
    """Return the factors of an engine from those of its ranks.

    Raises:
        HandshakeError: Two ranks contradict each other, or their factors are of no known form.
    """
    found: dict[str, list[Any]] = {}
    for factors in ranks:
        for field, value in factors.items():
            values = found.setdefault(field, [])
            if not values or values[-1] != value:
                values.append(value)
    return {
        field: values[0] if len(values) == 1 else _union(field, values)
        for field, values in found.items()
    }


def _union(field: str, values: list[Any]) -> Any:
    one, other = values[:2]
    try:
        if field in {"layers", "draft_layers", "transport"}:
            return sorted({repr(each): each for value in values for each in value}.values())
        if field in LAYERED:
            families: dict[str, set[Any]] = {}
            for value in values:
                for family, entries in value.items():
                    families.setdefault(family, set()).update(entries)
            return {family: sorted(families[family]) for family in sorted(families)}
    except (TypeError, AttributeError) as error:
        raise HandshakeError(f"factor {field!r:.80} is {one!r:.80} and {other!r:.80}") from error
    here, there = _apart(one, other)
    raise HandshakeError(
        f"the ranks of one engine contradict each other: {field:.{_SHOWN}} is {here} and {there}; "
        "start all ranks with the same configuration"
    )


def compare(local: Factors, remote: Factors, *, skewed: bool = False) -> list[Difference]:
    """Return every factor in which two engines differ, the severe ones first.

    Args:
        local: Ours.
        remote: Theirs.
        skewed: The sides are of different versions: a fact that one of them does not know is then
            no reason to refuse.
    """
    differences = []
    for field in sorted({*local, *remote}):
        here, there = local.get(field), remote.get(field)
        if here == there:
            continue
        severity: Severity = "error"
        known = field in local and field in remote
        if field == "transport" and known and _overlap(here, there):
            continue
        if (field == "revision" and None in {_text(here), _text(there)}) or (skewed and not known):
            severity = "warning"
        differences.append(difference(field, here, there, severity))
    return sorted(differences, key=lambda each: each.severity)


def listed(differences: Sequence[Difference]) -> str:
    """Say the first few in one line, and how many more there are."""
    more = len(differences) - _LISTED_MAX
    rest = [f"and {more} more"] if more > 0 else []
    return "; ".join([*map(str, differences[:_LISTED_MAX]), *rest])


def difference(field: str, local: Any, remote: Any, severity: Severity = "error") -> Difference:
    """Return a difference with the advice that belongs to its field."""
    advice = ADVICE.get(field, "run the same version of KVBridge on both engines")
    return Difference(field, local, remote, severity, advice)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _overlap(one: Any, other: Any) -> bool:
    both_lists = isinstance(one, list) and isinstance(other, list)
    return both_lists and len(_without(one, other)) < len(one)


def check_compatible(
    local: Factors, remote: Factors, *, peer: str, skewed: bool = False
) -> list[Difference]:
    """Refuse a peer whose factors differ from ours where they must not.

    Args:
        local: Ours.
        remote: Theirs.
        peer: Who they are, for the message.
        skewed: The sides are of different versions.

    Returns:
        The differences that the engines can live with.

    Raises:
        IncompatibleError: There are others; every one is listed with both values.
    """
    found = compare(local, remote, skewed=skewed)
    errors = [each for each in found if each.severity == "error"]
    if errors:
        raise IncompatibleError(
            f"{peer} is incompatible: {listed(errors)}",
            {each.field: (each.local, each.remote) for each in errors},
        )
    return found


def _apart(one: Any, other: Any) -> tuple[str, str]:
    """Write two values; of long lists, or tables, only what they do not share."""
    here, there = _short.repr(_bare(one)), _short.repr(_bare(other))
    if max(len(here), len(there)) <= _SHOWN:
        return here, there
    if isinstance(one, list) and isinstance(other, list):
        return _excess(one, other), _excess(other, one)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        parts = {key: (one.get(key), other.get(key)) for key in keys}
        return (
            _short.repr({key: pair[0] for key, pair in parts.items()})[:_SHOWN],
            _short.repr({key: pair[1] for key, pair in parts.items()})[:_SHOWN],
        )
    return here[:_SHOWN], there[:_SHOWN]


def _bare(value: Any) -> Any:
    """Take lists of one entry for that entry: most engines have one dtype and one transport."""
    if isinstance(value, Mapping):
        return {key: _bare(each) for key, each in value.items()}
    one = isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list)
    return value[0] if one else value


def _excess(one: list[Any], other: list[Any]) -> str:
    if len(one) + len(other) > _LOOKED_AT_MAX:
        return f"{len(one)} entries"
    more = _without(one, other)
    if not more:
        return f"{len(one)} entries, none of which the other side lacks"
    ends = " to ".join(_short.repr(each) for each in (more[:1] + more[1:][-1:]))
    return f"{len(one)} entries, of which the other side lacks {len(more)}: {ends}"[:_SHOWN]


def _without(one: list[Any], other: list[Any]) -> list[Any]:
    """Return what is in one list and not in another; entries are plain data of any kind."""
    known = set(map(repr, other))
    return [each for each in one if repr(each) not in known]
