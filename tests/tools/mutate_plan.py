"""Change the planner in small ways, one at a time, and list the changes that no test notices.

``python -m tests.tools.mutate_plan`` works on copies of the repository in a temporary folder. The
sample is drawn with a seed, and the tests draw their examples without luck, so a run can be
repeated. Every survivor is either an equivalent of the code or a test that is missing.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
PACKAGE = Path("kvbridge/plan")
TESTS = (
    "tests/unit/test_golden_plans.py",
    "tests/unit/test_plan_reports.py",
    "tests/unit/test_plan_errors.py",
    "tests/unit/test_plan_kinds.py",
    "tests/unit/test_topology.py",
    "tests/unit/test_rearrange.py",
    "tests/property/test_plan_oracle.py",
    "tests/property/test_staged_oracle.py",
)
PATIENCE_S = 120

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "here": "there", "there": "here"}


@dataclass(frozen=True)
class Mutant:
    """One small change: of the ``index``-th place in a file, the ``choice``-th."""

    path: Path
    index: int
    choice: int

    def make(self, text: str) -> tuple[str, str]:
        """Return what it makes of a source, and what it is in words."""
        tree = ast.parse(text)
        parent, field, at, node = list(places(tree))[self.index]
        new = changes(node)[self.choice]
        before, after = (ast.unparse(each).partition("\n")[0] for each in (node, new))
        if at is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[at] = new
        line = getattr(node, "lineno", getattr(parent, "lineno", 0))
        source = ast.unparse(ast.fix_missing_locations(tree))
        return source, f"{self.path}:{line}: {before}  ->  {after}"


# --- small changes -------------------------------------------------------------------------------


def changes(node: ast.AST) -> list[ast.AST]:
    """Return what could stand in the place of a node."""
    return [*other_operators(node), *other_values(node), *other_ways(node)]


def other_operators(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield ast.AugAssign(node.target, OPERATORS[type(op)](), node.value)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            yield values[0]
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield operand


def other_values(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Call(func=ast.Name(id="sorted"), args=[first, *_]):
            yield first


def other_ways(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(ifs=[_, *_]):
            yield ast.comprehension(node.target, node.iter, [], node.is_async)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue():
            yield ast.Pass()


def mutants(folder: Path, path: Path) -> Iterator[Mutant]:
    for index, (*_, node) in enumerate(places(ast.parse((folder / path).read_text()))):
        yield from (Mutant(path, index, choice) for choice in range(len(changes(node))))


Place = tuple[ast.AST, str, int | None, ast.AST]


def places(tree: ast.AST) -> Iterator[Place]:
    """Return every node that decides what happens: no annotation, message or import."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        nodes = enumerate(value) if isinstance(value, list) else [(None, value)]
        for at, node in nodes:
            if not isinstance(node, ast.AST) or is_type_checking(node):
                continue
            if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            yield tree, field, at, node
            if not isinstance(node, ast.Raise):
                yield from places(node)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


# --- running the tests ---------------------------------------------------------------------------


def copy_repository(folder: Path) -> Path:
    """Copy what the tests need, with fewer examples and without the search for small ones."""
    for name in ("kvbridge", "tests", "backends"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    oracle = folder / "tests/property/test_plan_oracle.py"
    oracle.write_text(
        re.sub(
            r"settings\(max_examples=(\d+)\)",
            lambda m: f"settings(max_examples={int(m[1]) // 4}, phases=[Phase.generate])",
            oracle.read_text().replace("import given, settings", "import Phase, given, settings"),
        )
    )
    return folder


def passes(folder: Path) -> bool:
    """Run the tests until one fails; what takes forever has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not full and not soak", *TESTS]
    environment = {**os.environ, "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def try_out(mutant: Mutant, folders: SimpleQueue[Path]) -> bool:
    folder = folders.get()
    target = folder / mutant.path
    original = target.read_text()
    source, words = mutant.make(original)
    try:
        target.write_text(source)
        survives = passes(folder)
    finally:
        target.write_text(original)
        folders.put(folder)
    if survives:
        say(words)
    return survives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip", nargs="*", default=[], help="names of files to leave alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        copies = [copy_repository(Path(temporary, str(i))) for i in range(arguments.jobs)]
        first = copies[0]
        if not passes(first):
            raise SystemExit("the tests fail without any change")
        paths = [path.relative_to(first) for path in sorted((first / PACKAGE).glob("*.py"))]
        paths = [path for path in paths if path.name not in arguments.skip]
        every = [mutant for path in paths for mutant in mutants(first, path)]
        sample = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
        folders: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            folders.put(copy)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            survived = list(pool.map(lambda mutant: try_out(mutant, folders), sample))
    tried = Counter(mutant.path.name for mutant in sample)
    alive = Counter(m.path.name for m, lives in zip(sample, survived, strict=True) if lives)
    for name, count in sorted(tried.items()):
        say(f"{name}: {alive[name]} of {count} survive")
    say(f"{sum(alive.values())} of {len(sample)} changes, of {len(every)} possible, survive")


if __name__ == "__main__":
    main()
