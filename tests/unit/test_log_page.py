"""The page of the log has every line that an engine may write."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "log.md"
OF_A_PROGRAM = {"testing", "demo", "bench", "cli"}
"""Packages that no engine runs."""
LOGGERS = {"_log", "log", "logger"}
LEVELS = {"info", "warning", "error", "exception", "log"}
GAP = re.compile(r"%[-.\d]*[a-z]")


def formats() -> Iterator[tuple[str, str]]:
    """Yield where something is logged that people read, and how it is written there.

    Without those lines of which all is a library's words.
    """
    for folder in ("kvbridge", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if OF_A_PROGRAM & set(path.relative_to(ROOT).parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=who), attr=level)):
                        if who in LOGGERS and level in LEVELS:
                            text = node.args[level == "log"]
                            assert isinstance(text, ast.Constant), f"{path}:{node.lineno}"
                            if not GAP.fullmatch(str(text.value)):
                                yield f"{path.relative_to(ROOT)}:{node.lineno}", str(text.value)


FOUND = dict(formats())
LINES = re.findall(r"^\| `(.*?)` \|", PAGE.read_text(), re.MULTILINE)


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, GAP.split(text))))


@pytest.mark.parametrize("where", FOUND)
def test_a_line_of_the_log_is_on_the_page(where: str) -> None:
    assert any(pattern(FOUND[where]).fullmatch(line) for line in LINES), FOUND[where]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_logged(line: str) -> None:
    assert any(pattern(text).fullmatch(line) for text in FOUND.values())
