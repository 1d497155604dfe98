"""Writes down the hooks of vLLM's base class for connectors, of its source.

Usage: python -m tests.tools.vllm_interface base.py > tests/vllm/interfaces/VERSION.json
"""

import ast
import json
import sys
from pathlib import Path

BASE = "KVConnectorBase_V1"


def interface_of(source: str) -> dict[str, list[str]]:
    """Return the names of the arguments of each public method and property of the base class."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == BASE:
            return {
                each.name: _arguments(each)
                for each in node.body
                if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
            }
    raise ValueError(f"there is no class {BASE}")


def _arguments(function: ast.FunctionDef) -> list[str]:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    last = [each for each in (function.args.vararg, function.args.kwarg) if each is not None]
    return [each.arg for each in (*named, *last) if each.arg not in {"self", "cls"}]


if __name__ == "__main__":
    json.dump(interface_of(Path(sys.argv[1]).read_text()), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
