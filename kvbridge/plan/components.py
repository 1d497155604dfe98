"""Pairing the components of one layer, and how each side steps through it."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from kvbridge.errors import PlanError, UnsupportedLayoutError
from kvbridge.model import CacheComponent, LayerCache, LayerKey, RankCache
from kvbridge.plan.ownership import token_share
from kvbridge.plan.values import Grid, Moves, Need

ComponentPair = tuple[CacheComponent, CacheComponent]


def component_of(
    name: str, local: LayerCache, remote: LayerCache, *, is_state: bool = False
) -> ComponentPair:
    """Return a component of a layer as both sides hold it, cut alike.

    Where one side keeps K and V in one cell, that cell is cut in two. Where one side keeps all
    rows of a state channel in one cell, that cell is cut into the other side's rows.

    Args:
        name: A component that at least one side has by this name.
        local: The layer here.
        remote: The same layer there.
        is_state: Whether the layer is state, whose cells may be cut into rows.

    Raises:
        PlanError: One side has neither the component nor one that contains it.
    """
    ours, theirs = _find(local, name), _find(remote, name)
    if ours is None and theirs is None:
        # Some other rank splits K from V; cells of both these sides are joint. Cut them alike.
        joint = _find(local, "kv")
        half = joint.cell_bytes // 2 if joint else 0
        return _part(local, name, half), _part(remote, name, half)
    if ours is None:
        return _part(local, name, _k_bytes(remote)), _held(remote, name)
    if theirs is None:
        return ours, _part(remote, name, _k_bytes(local))
    if is_state:
        return _in_rows(ours, theirs), _in_rows(theirs, ours)
    return ours, theirs


def part_of(
    layer: LayerCache, name: str, cell_bytes: int, *, is_state: bool = False
) -> CacheComponent:
    """Return a component of a layer, cut into cells of a size that both sides of a plan have.

    Args:
        layer: The layer.
        name: The component; ``k`` or ``v`` also where the layer keeps both in one cell.
        cell_bytes: Bytes of a cell, as in the plan's regions.
        is_state: Whether the layer is state, whose cells may be cut into rows.

    Raises:
        PlanError: The layer has no such component, or its cells do not come in that size.
    """
    joint = _find(layer, "kv")
    apart = joint is not None and _find(layer, name) is None
    k_bytes = joint.cell_bytes - cell_bytes if joint and name == "v" else cell_bytes
    part = _part(layer, name, k_bytes) if apart else _held(layer, name)
    rows, rest = divmod(part.cell_bytes, cell_bytes)
    if is_state and part.token_count == 1 and rows > 1 and not rest:
        part = replace(part, cell_bytes=cell_bytes, token_count=rows, token_stride=cell_bytes)
    if part.cell_bytes != cell_bytes:
        raise PlanError(
            f"layer {layer.key}, component {name!r}: cells have {part.cell_bytes} bytes here and "
            f"{cell_bytes} in what is asked for; ask in the terms of a plan for this cache"
        )
    return part


def _find(layer: LayerCache, name: str) -> CacheComponent | None:
    return next((c for c in layer.components if c.name == name), None)


def _held(layer: LayerCache, name: str) -> CacheComponent:
    found = _find(layer, name)
    if found is None:
        raise PlanError(
            f"layer {layer.key}: component {name!r} is neither among "
            f"{[c.name for c in layer.components]} nor a part of one of them"
        )
    return found


def _k_bytes(layer: LayerCache) -> int:
    return _held(layer, "k").cell_bytes


def _part(layer: LayerCache, name: str, k_bytes: int) -> CacheComponent:
    """Return the K or the V part of a joint cell: K first, then V."""
    joint = _find(layer, "kv")
    if joint is None or name not in ("k", "v") or not 0 < k_bytes < joint.cell_bytes:
        return _held(layer, name)
    if name == "k":
        return replace(joint, name="k", cell_bytes=k_bytes)
    return replace(
        joint, name="v", offset=joint.offset + k_bytes, cell_bytes=joint.cell_bytes - k_bytes
    )


def _in_rows(component: CacheComponent, like: CacheComponent) -> CacheComponent:
    """Cut a cell that holds all rows of a channel into the rows that the other side has."""
    rows = like.token_count
    if component.token_count > 1 or rows == 1 or component.cell_bytes != like.cell_bytes * rows:
        return component
    return replace(
        component, cell_bytes=like.cell_bytes, token_count=rows, token_stride=like.cell_bytes
    )


def needs_of(cache: RankCache, parts: Mapping[LayerKey, Collection[str]]) -> list[Need]:
    """Return what a consumer needs of some layers, which is all that it announces.

    Args:
        cache: The consumer.
        parts: The layers, and the components that move of each; where K and V move apart, a joint
            cell is two needs.
    """
    needs = []
    for layer in cache.layers:
        if layer.key not in parts:
            continue
        for c in layer.components:
            apart = c.name == "kv" and "kv" not in parts[layer.key]
            needs += [
                Need(cache.rank, *layer.key, name, c.unit_start, c.unit_end)
                for name in (("k", "v") if apart else (c.name,))
            ]
    return needs


def grid_of(cache: RankCache, layer: LayerCache, component: CacheComponent) -> Grid:
    """Return how a rank steps through a component of one of its layers."""
    group = cache.groups[layer.group]
    page_tokens = group.block_tokens // group.pages_per_block
    moves: Moves = "tokens"
    if group.kind == "state":
        moves, page_tokens = "state", 0
    elif component.token_count != page_tokens:
        moves = "pages"
    return Grid(
        group=layer.group,
        moves=moves,
        page_stride=layer.page_stride,
        page_tokens=page_tokens,
        pages_per_block=group.pages_per_block,
        unit_stride=component.unit_stride,
        token_stride=component.token_stride,
        cells=component.token_count,
        share=token_share(cache, layer.group),
    )


def check_pair(layer: LayerCache, pair: ComponentPair, here: Grid, there: Grid) -> None:
    """Refuse to exchange a component that both sides do not hold in the same cells.

    Raises:
        PlanError: The cells differ in type, size or number.
        UnsupportedLayoutError: Pages that are only moved whole are cut differently.
    """
    ours, theirs = pair
    what = f"layer {layer.key}, component {ours.name!r}"
    for field in ("dtype", "cell_bytes", "unit_total"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise PlanError(
                f"{what}: {field} is {mine} here and {other} there; both engines must cache the "
                "same cells, nothing is converted"
            )
    if here.moves != there.moves:
        raise UnsupportedLayoutError(
            f"{what}: {here.moves} are moved here and {there.moves} there; describe the layer in "
            "the same way on both sides"
        )
    if here.moves == "state":
        mine, other = (here.cells, here.pages_per_block), (there.cells, there.pages_per_block)
        if mine != other:
            raise PlanError(
                f"{what}: a block has (rows, pages) {mine} here and {other} there; both engines "
                "must keep the same state"
            )
    if here.moves == "pages":
        mine, other = (here.page_tokens, here.share), (there.page_tokens, there.share)
        if mine != other:
            raise UnsupportedLayoutError(
                f"{what}: a page has (tokens, token share) {mine} here and {other} there; its "
                "inside is unknown, so both engines must cut the sequence into pages alike"
            )
