"""The few shapes that a picture needs, as SVG 1.1 with nothing from elsewhere."""

from xml.etree import ElementTree as ET

INK, QUIET, PALE, FRAME = "#1f2937", "#6b7280", "#f9fafb", "#cbd5e1"

_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


class Canvas:
    """A white sheet that grows downwards; coordinates are pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """Start a sheet with a title that readers of the screen can say."""
        self._root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "version": "1.1",
                "width": _number(width),
                "height": _number(height),
                "viewBox": f"0 0 {_number(width)} {_number(height)}",
                "font-family": _FONT,
            },
        )
        ET.SubElement(self._root, "title").text = title
        self.box(0, 0, width, height, fill="#ffffff")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "",
        dashed: bool = False,
        round_corners: bool = False,
    ) -> None:
        """Draw a rectangle."""
        attributes = {"x": x, "y": y, "width": width, "height": height}
        if round_corners:
            attributes["rx"] = 4
        self._add("rect", attributes, fill, stroke, dashed=dashed)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        fill: str = INK,
        bold: bool = False,
        to_the_left: bool = False,
    ) -> None:
        """Write a line; ``x`` is where it starts, or where it ends with ``to_the_left``."""
        element = self._add("text", {"x": x, "y": y, "font-size": size}, fill, "")
        if bold:
            element.set("font-weight", "bold")
        if to_the_left:
            element.set("text-anchor", "end")
        element.text = words

    def ribbon(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        width: float,
        *,
        fill: str,
        tip: str,
    ) -> None:
        """Draw a band from one upper corner to another, with words that show on hovering."""
        (x1, a), (x2, b) = start, end
        there = _curve(x1, a, x2, b)
        back = _curve(x2, b + width, x1, a + width)
        path = self._add("path", {}, fill, "")
        path.set("d", f"M{_number(x1)} {_number(a)}{there}V{_number(b + width)}{back}Z")
        path.set("fill-opacity", "0.55")
        ET.SubElement(path, "title").text = tip

    def dashes(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draw a thin dashed curve."""
        path = self._add("path", {}, "none", "#9ca3af", dashed=True)
        path.set("d", f"M{_number(start[0])} {_number(start[1])}{_curve(*start, *end)}")

    def document(self) -> str:
        """Return the whole as a document; the same calls give the same text."""
        ET.indent(self._root, " ")
        body = ET.tostring(self._root, "unicode")
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'

    def _add(
        self, tag: str, numbers: dict[str, float], fill: str, stroke: str, *, dashed: bool = False
    ) -> ET.Element:
        attributes = {name: _number(value) for name, value in numbers.items()}
        attributes["fill"] = fill
        if stroke:
            attributes["stroke"] = stroke
        if dashed:
            attributes["stroke-dasharray"] = "3 3"
        return ET.SubElement(self._root, tag, attributes)


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = _number((x1 + x2) / 2)
    return f"C{middle} {_number(y1)} {middle} {_number(y2)} {_number(x2)} {_number(y2)}"


def _number(value: float) -> str:
    """Return a number as short as half a hundredth of a pixel allows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
