"""Pairing the components of one layer, where one side may keep K and V in one cell."""

from dataclasses import replace

from kvbridge.errors import PlanError
from kvbridge.model import CacheComponent, LayerCache


def component_of(
    name: str, local: LayerCache, remote: LayerCache
) -> tuple[CacheComponent, CacheComponent]:
    """Return a component of a layer as both sides hold it, ``kv`` cut in two where needed.

    Args:
        name: A component that at least one side has by this name.
        local: The layer here.
        remote: The same layer there.

    Raises:
        PlanError: One side has neither the component nor one that contains it.
    """
    ours, theirs = _find(local, name), _find(remote, name)
    if ours is None and theirs is None:
        # Some other rank splits K from V; cells of both these sides are joint. Cut them alike.
        joint = _find(local, "kv")
        half = joint.cell_bytes // 2 if joint else 0
        return _part(local, name, half), _part(remote, name, half)
    if ours is None and theirs is not None:
        return _part(local, name, _k_bytes(remote, theirs)), theirs
    if theirs is None and ours is not None:
        return ours, _part(remote, name, _k_bytes(local, ours))
    if ours is None or theirs is None:
        raise PlanError(f"layer {local.key}: no component {name!r}")
    return ours, theirs


def _find(layer: LayerCache, name: str) -> CacheComponent | None:
    return next((c for c in layer.components if c.name == name), None)


def _k_bytes(layer: LayerCache, found: CacheComponent) -> int:
    k = _find(layer, "k")
    return k.cell_bytes if k else found.cell_bytes


def _part(layer: LayerCache, name: str, k_bytes: int) -> CacheComponent:
    """Return the K or the V part of a joint cell: K first, then V."""
    joint = _find(layer, "kv")
    if joint is None or name not in ("k", "v") or not 0 < k_bytes < joint.cell_bytes:
        raise PlanError(
            f"layer {layer.key}: component {name!r} is neither among "
            f"{[c.name for c in layer.components]} nor a part of one of them"
        )
    if name == "k":
        return replace(joint, name="k", cell_bytes=k_bytes)
    return replace(
        joint, name="v", offset=joint.offset + k_bytes, cell_bytes=joint.cell_bytes - k_bytes
    )
