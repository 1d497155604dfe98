"""The tables of a page, to compare them with what they speak of."""

import re
from pathlib import Path

_REFERENCE = Path(__file__).parents[2] / "docs/reference"


def page(name: str) -> str:
    """Return a page of the reference."""
    return (_REFERENCE / name).read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables below a heading, without the first row of each."""
    depth = heading.split(maxsplit=1)[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"no heading {heading!r}"
    section = re.split(rf"\n#{{1,{len(depth)}}} ", rest)[0]
    tables = re.findall(r"^\| .*\n\|-.*\n((?:\| .*\n?)*)", section, re.MULTILINE)
    lines = [line for table in tables for line in table.splitlines()]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    return [[cell.strip() for cell in row] for row in cells]
