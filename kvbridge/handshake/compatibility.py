"""Comparing two engines field by field, before anything of theirs is believed."""

from typing import Any

from kvbridge.errors import IncompatibleError
from kvbridge.handshake.messages import Factors
from kvbridge.model import RankCache

_KV_FAMILY = frozenset({"kv", "k", "v"})


def factors_of(cache: RankCache, *, model: str, transport: str) -> dict[str, Any]:
    """Return the facts that must be equal on both sides, whatever the sharding.

    Args:
        cache: What a rank holds.
        model: Name and revision of the model, as the engines agree to call it.
        transport: Name of the transport.
    """
    dtypes: dict[str, str] = {}
    unit_totals: dict[str, int] = {}
    unit_nbytes: dict[str, int] = {}
    for layer in cache.layers[:1]:
        for component in layer.components:
            family = "kv" if component.name in _KV_FAMILY else component.name
            dtypes[family] = component.dtype
            unit_totals[family] = component.unit_total
            unit_nbytes[family] = unit_nbytes.get(family, 0) + component.cell_bytes
    return {
        "model": model,
        "transport": transport,
        "dtype": dtypes,
        "units": unit_totals,
        "bytes of a unit and token": unit_nbytes,
        "cache groups": [[group.kind, group.window_tokens] for group in cache.groups],
    }


def check_compatible(local: Factors, remote: Factors, *, peer: str) -> None:
    """Refuse a peer whose factors differ from ours.

    Raises:
        IncompatibleError: They do; every differing field is listed with both values.
    """
    differences = {
        name: (local.get(name), remote.get(name))
        for name in sorted({*local, *remote})
        if local.get(name) != remote.get(name)
    }
    if differences:
        listed = "; ".join(
            f"{name} is {mine!r} here and {theirs!r} there"
            for name, (mine, theirs) in differences.items()
        )
        raise IncompatibleError(
            f"{peer} is incompatible: {listed}; start both engines with the same model, cache "
            "type and transport",
            differences,
        )
