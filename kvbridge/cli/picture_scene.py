"""Where everything in the picture of a plan goes: boxes for ranks, ribbons for what moves."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvbridge.cli.plan_values import Move, PlanReport, RankHolding
from kvbridge.model import Rank

TOP, LINE, SMALL_LINE = 106, 17, 13
LEFT_MAP, RIGHT_MAP = (60, 36), (108, 60)
"""Width and height of the small maps."""
_PADDING, _GAP, _STAGE_GAP = 12, 10, 26
_RIBBON_MAX, _RIBBONS_MAX = 26, 80


@dataclass
class Flow:
    """Bytes of one cache group that go from a producer rank to a consumer rank."""

    source: Rank
    target: Rank
    move: Move
    width: float = 0.0
    leaves: float = 0.0
    lands: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the request."""
        return self.move.contiguous.nbytes


@dataclass
class Node:
    """One rank, as a box.

    Attributes:
        told: Ranks of the other side that it tells, or is told by, without bytes.
    """

    holding: RankHolding
    flows: list[Flow]
    told: list[Rank]
    height: float = 0.0
    y: float = 0.0

    @property
    def rank(self) -> Rank:
        """Coordinate of the rank."""
        return self.holding.rank

    @property
    def header(self) -> float:
        """Height of the lines that say what the rank is and holds."""
        return 27 + SMALL_LINE * len(self.holding.shares)


@dataclass
class Scene:
    """Everything in its place."""

    report: PlanReport
    flows: list[Flow]
    dashes: list[tuple[Rank, Rank]]
    left: list[Node] = field(default_factory=list)
    right: list[Node] = field(default_factory=list)
    end: float = 0.0


def place(report: PlanReport) -> Scene:
    """Find a place for everything; what a single rank's plan does not touch is left out."""
    scene = Scene(report, [], [])
    for plan in report.ranks:
        for link in plan.links:
            pair = (link.rank, plan.rank) if report.direction == "read" else (plan.rank, link.rank)
            scene.flows += (Flow(*pair, move) for move in link.moves if move.contiguous.nbytes)
        for told in plan.notify_only:
            pair = (told, plan.rank) if report.direction == "read" else (plan.rank, told)
            scene.dashes.append(pair)
    _set_widths(scene.flows)
    scene.left = _nodes(scene, report.prefill.ranks, is_source=True)
    scene.right = _nodes(scene, report.decode.ranks, is_source=False)
    scene.end = TOP + max(map(_extent, (scene.left, scene.right)))
    for nodes in (scene.left, scene.right):
        _place(nodes, scene.end - TOP)
    for node in scene.left:
        y = node.y + (node.height - sum(flow.width for flow in node.flows)) / 2
        for flow in node.flows:
            flow.leaves, y = y, y + flow.width
    for node in scene.right:
        y = node.y + node.header
        for flow in node.flows:
            slot = _slot(flow)
            flow.lands, y = y + (slot - flow.width) / 2, y + slot
    return scene


def _set_widths(flows: Sequence[Flow]) -> None:
    """Give each flow a width by its bytes, so that neither it nor a box becomes too large."""
    totals: dict[tuple[str, Rank], int] = defaultdict(int)
    for flow in flows:
        totals["out", flow.source] += flow.nbytes
        totals["in", flow.target] += flow.nbytes
    if flows:
        largest = max(flow.nbytes for flow in flows)
        scale = min(_RIBBON_MAX / largest, _RIBBONS_MAX / max(totals.values()))
        for flow in flows:
            flow.width = max(1.5, flow.nbytes * scale)


def _nodes(scene: Scene, holdings: Sequence[RankHolding], *, is_source: bool) -> list[Node]:
    """Make a box for each rank that has a part in the plans shown."""
    nodes = []
    for holding in holdings:
        flows = [f for f in scene.flows if holding.rank == (f.source if is_source else f.target)]
        ends = ((b, a)[::-1] if is_source else (b, a) for a, b in scene.dashes)
        told = [other for own, other in ends if own == holding.rank]
        if not flows and not told:
            continue
        node = Node(holding, flows, told)
        if is_source:
            words = SMALL_LINE * (len(holding.shares) + 1)
            needed = max(LEFT_MAP[1], words, sum(flow.width for flow in flows))
        else:
            rows = sum(map(_slot, flows)) + (LINE if told else 0)
            needed = max(RIGHT_MAP[1], node.header + rows - _PADDING / 2)
        node.height = needed + _PADDING
        nodes.append(node)
    return nodes


def _slot(flow: Flow) -> float:
    return max(LINE, flow.width + 3)


def _gaps(nodes: Sequence[Node]) -> Iterator[float]:
    """Yield the space above each box; a pipeline stage stands apart from the one before."""
    stage = nodes[0].rank[0] if nodes else 0
    for i, node in enumerate(nodes):
        yield 0 if i == 0 else _GAP if node.rank[0] == stage else _STAGE_GAP
        stage = node.rank[0]


def _extent(nodes: Sequence[Node]) -> float:
    return sum(node.height for node in nodes) + sum(_gaps(nodes))


def _place(nodes: Sequence[Node], extent: float) -> None:
    """Put the boxes below each other, the space that is left evenly around them."""
    spare = (extent - _extent(nodes)) / max(1, len(nodes))
    y = TOP - spare / 2
    for node, gap in zip(nodes, _gaps(nodes), strict=True):
        node.y = y + gap + spare
        y = node.y + node.height
