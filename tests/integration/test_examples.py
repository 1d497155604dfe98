"""Every example runs, and the README quotes them to the letter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.multi_process
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_runs(example: Path, transport_name: str) -> None:
    subprocess.run([sys.executable, example, transport_name], check=True, timeout=30)


def test_readme_quotes_an_example() -> None:
    _, block = (ROOT / "README.md").read_text().split("```python\n")
    quoted = block.split("```")[0]
    assert any(quoted in example.read_text() for example in EXAMPLES)
