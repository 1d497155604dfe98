"""A plan as a picture: who holds what on both sides, and ribbons for the bytes between."""

import colorsys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from kvbridge.cli.picture_scene import LEFT_MAP, RIGHT_MAP, SMALL_LINE, Flow, Node, Scene, place
from kvbridge.cli.plan_values import PlanReport, Share
from kvbridge.cli.plan_words import (
    bands,
    words_of_bytes,
    words_of_copies,
    words_of_rank,
    words_of_share,
)
from kvbridge.cli.svg import FRAME, INK, PALE, QUIET, Canvas
from kvbridge.errors import ConfigError
from kvbridge.model import Rank

RANKS_MAX = 64

_WIDTH, _MARGIN, _BOTTOM = 1120, 28, 104
_LEFT_WIDTH, _RIGHT_WIDTH = 276, 452
_LEFT_EDGE, _RIGHT_EDGE = _MARGIN + _LEFT_WIDTH, _WIDTH - _MARGIN - _RIGHT_WIDTH


def draw(report: PlanReport) -> str:
    """Return the picture as SVG 1.1; equal reports give equal text.

    Raises:
        ConfigError: There are more ranks than a picture can show.
    """
    scene = place(report)
    if max(len(scene.left), len(scene.right)) > RANKS_MAX:
        raise ConfigError(
            f"a picture shows up to {RANKS_MAX} ranks of an engine, here are {len(scene.left)} "
            f"and {len(scene.right)}; choose one with --rank"
        )
    return _Drawing(scene).document()


class _Drawing:
    """Draws a scene from back to front."""

    def __init__(self, scene: Scene) -> None:
        report = self._report = scene.report
        self._scene = scene
        self._reads = report.direction == "read"
        self._staged = any(h.rank[0] for h in (*report.prefill.ranks, *report.decode.ranks))
        self._strong, self._light = _colours([holding.rank for holding in report.prefill.ranks])
        self._canvas = Canvas(
            _WIDTH,
            scene.end + _BOTTOM,
            f"KV cache plan of {report.model}: {report.prefill.shape} to {report.decode.shape}",
        )

    def document(self) -> str:
        """Draw, and return the document."""
        self._titles()
        for flow in self._scene.flows:
            tip = f"{self._name(flow.source)} to {self._name(flow.target)}: {_label(flow)}"
            start, end = (_LEFT_EDGE, flow.leaves), (_RIGHT_EDGE, flow.lands)
            self._canvas.ribbon(start, end, flow.width, fill=self._strong[flow.source], tip=tip)
        left = {node.rank: node for node in self._scene.left}
        right = {node.rank: node for node in self._scene.right}
        for a, b in self._scene.dashes:
            y = right[b].y + right[b].height - 14
            start = (_LEFT_EDGE, left[a].y + left[a].height / 2)
            self._canvas.dashes(start, (_RIGHT_EDGE, y))
        for node in self._scene.left:
            self._source(node)
        for node in self._scene.right:
            self._target(node)
        self._legend()
        return self._canvas.document()

    def _name(self, rank: Rank) -> str:
        return words_of_rank(rank, staged=self._staged)

    def _titles(self) -> None:
        report, text = self._report, self._canvas.text
        verb = "decode ranks read" if self._reads else "prefill ranks write"
        total = words_of_bytes(report.contiguous.nbytes)
        text(_MARGIN, 38, report.model, size=20, bold=True)
        text(_MARGIN, 58, f"{verb} {total} for {report.tokens:,} tokens", fill=QUIET)
        for x, name, side in (
            (_MARGIN, "prefill", report.prefill),
            (_RIGHT_EDGE, "decode", report.decode),
        ):
            text(x, 92, name, size=15, bold=True)
            text(x + 76, 92, side.shape, size=11, fill=QUIET)

    def _source(self, node: Node) -> None:
        silent = not node.flows
        strong = FRAME if silent else self._strong[node.rank]
        self._canvas.box(
            _MARGIN, node.y, _LEFT_WIDTH, node.height, round_corners=True, dashed=silent,
            fill=PALE if silent else self._light[node.rank], stroke=FRAME,
        )  # fmt: skip
        if not silent:
            self._canvas.box(_LEFT_EDGE - 5, node.y, 5, node.height, fill=strong)
        x, y = _MARGIN + 8, node.y + (node.height - LEFT_MAP[1]) / 2
        self._map((x, y), LEFT_MAP, ((share, strong) for share in node.holding.shares))
        lines = [words_of_share(share) for share in node.holding.shares]
        if silent:
            lines = [*lines[:1], "notify only"]
        x, ink = x + LEFT_MAP[0] + 12, QUIET if silent else INK
        self._canvas.text(x, y + 9, self._name(node.rank), bold=True, fill=ink)
        for i, line in enumerate(lines):
            self._canvas.text(x, y + 23 + SMALL_LINE * i, line, size=11, fill=QUIET)

    def _target(self, node: Node) -> None:
        text = self._canvas.text
        self._canvas.box(
            _RIGHT_EDGE, node.y, _RIGHT_WIDTH, node.height, round_corners=True,
            fill="#ffffff" if node.flows else PALE, stroke=FRAME, dashed=not node.flows,
        )  # fmt: skip
        x, right = _RIGHT_EDGE + 14, _RIGHT_EDGE + _RIGHT_WIDTH - RIGHT_MAP[0] - 24
        text(x, node.y + 17, self._name(node.rank), bold=True)
        for i, share in enumerate(node.holding.shares):
            text(x, node.y + 31 + SMALL_LINE * i, words_of_share(share), size=11, fill=QUIET)
        for flow in node.flows:
            y = flow.lands + flow.width / 2 + 4
            self._canvas.box(_RIGHT_EDGE, flow.lands, 6, flow.width, fill=self._strong[flow.source])
            text(x, y, f"{self._name(flow.source)}: {words_of_share(flow.move)}", size=11)
            text(right, y, words_of_bytes(flow.nbytes), size=11, to_the_left=True)
        if node.told:
            verb = "tells" if self._reads else "is told by"
            names = f"{verb} {', '.join(map(self._name, node.told[:4]))}"
            more = f" and {len(node.told) - 4} more" if node.told[4:] else ""
            text(x, node.y + node.height - 10, f"{names}{more}: no bytes", size=11, fill=QUIET)
        y = node.y + (node.height - RIGHT_MAP[1]) / 2
        parts = ((share, self._strong[source]) for share, source in _mixed(node.flows))
        self._map((right + 16, y), RIGHT_MAP, parts)

    def _map(
        self,
        corner: tuple[float, float],
        size: tuple[float, float],
        parts: Iterable[tuple[Share, str]],
    ) -> None:
        """Draw the whole cache small, heads across and layers down, with parts filled in."""
        (x, y), (width, height) = corner, size
        self._canvas.box(x, y, width, height, fill="#ffffff")
        step = height / self._report.layers
        for share, fill in parts:
            spans = {(u.start / u.total * width, u.end / u.total * width) for u in share.units}
            for band in bands(share.layers):
                # A hair more than its height, so that no seam shows between neighbours.
                top, deep = y + band.start * step, min(len(band) * step + 0.4, height)
                for start, end in sorted(spans):
                    self._canvas.box(x + start, top, end - start, deep, fill=fill)
        self._canvas.box(x, y, width, height, stroke=QUIET)

    def _legend(self) -> None:
        y = self._scene.end + 30
        width, height = LEFT_MAP
        self._canvas.box(_MARGIN, y, width, height, stroke=QUIET)
        self._canvas.box(_MARGIN + width / 4, y, width / 4, height / 2, fill="#9ca3af")
        left = [
            "a frame is the whole cache: heads across, layers down;",
            "filled is what a rank holds, or where it comes from",
        ]
        right = words_of_copies(self._report)
        if self._scene.dashes:
            right.append("dashed: no bytes move, but the rank hears when all is done")
        left.append("a ribbon is as wide as the bytes that move")
        if any(len(alike) > 1 for node in self._scene.right for alike in _alike(node.flows)):
            left.append("stripes: several ranks hold the tokens in turn")
        for x, lines in ((_MARGIN + width + 12, left), (_RIGHT_EDGE, right)):
            for i, line in enumerate(lines):
                self._canvas.text(x, y + 9 + 15 * i, line, size=11)


def _alike(flows: Iterable[Flow]) -> list[list[Flow]]:
    """Return flows that bring the same layers and units together; their tokens differ."""
    found: dict[object, list[Flow]] = defaultdict(list)
    for flow in flows:
        found[flow.move.layers, flow.move.units].append(flow)
    return list(found.values())


def _mixed(flows: Iterable[Flow]) -> Iterator[tuple[Share, Rank]]:
    """Yield what to fill in for each source; those that share out tokens become stripes."""
    for alike in _alike(flows):
        for i, flow in enumerate(alike):
            layers = flow.move.layers[i :: len(alike)]
            yield Share(flow.move.kind, layers, flow.move.units), flow.source


def _label(flow: Flow) -> str:
    return f"{words_of_share(flow.move)}, {words_of_bytes(flow.nbytes)}"


def _colours(ranks: Sequence[Rank]) -> tuple[dict[Rank, str], dict[Rank, str]]:
    """Return a strong and a light colour for each rank: hue by tp rank, darker by stage."""
    strong, light = {}, {}
    stages = 1 + max(pp for pp, _ in ranks)
    for pp, tp in ranks:
        hue = (tp * stages + pp) / len(ranks)
        strong[pp, tp] = _hex(hue, 0.52 - 0.16 * (pp % 2), 0.62)
        light[pp, tp] = _hex(hue, 0.95, 0.55)
    return strong, light


def _hex(hue: float, lightness: float, saturation: float) -> str:
    rgb = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
