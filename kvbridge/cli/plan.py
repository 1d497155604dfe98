"""``kvbridge plan``: who would read what from whom, without any engine."""

from io import StringIO
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from kvbridge.cli import picture
from kvbridge.cli.model_files import known_models, load_model
from kvbridge.cli.paper_engines import PaperEngine
from kvbridge.cli.plan_report import make_report
from kvbridge.cli.plan_table import show
from kvbridge.cli.plan_values import PlanReport
from kvbridge.cli.shapes import PaperShape
from kvbridge.errors import ConfigError
from kvbridge.model import Rank

TOKENS_MAX = 1_000_000

_FILE_COLUMNS = 100
_SHAPE_HELP = (
    "as in tp=8,pp=2,page=16,layout=nhd,kv=together,pages_per_block=1,dcp=1,interleave=1; what "
    "is left out keeps its default"
)


def _once(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> str:
    """Refuse an option that is given twice, or without anything."""
    if len(given) != 1:
        raise click.BadParameter(f"given {len(given)} times; give it once", param=option)
    if not given[0]:
        raise click.BadParameter("is empty; give it a value", param=option)
    return given[0]


@click.command("plan")
@click.option(
    "--prefill", required=True, multiple=True, callback=_once, metavar="SHAPE",
    help=f"The producer, {_SHAPE_HELP}.",
)  # fmt: skip
@click.option(
    "--decode", required=True, multiple=True, callback=_once, metavar="SHAPE",
    help="The consumer, in the same words.",
)  # fmt: skip
@click.option(
    "--model", required=True, multiple=True, callback=_once,
    help=f"{', '.join(known_models())}, or a path to FILE.json.",
)  # fmt: skip
@click.option(
    "--direction", default="read", show_default=True, type=click.Choice(["read", "write"]),
    help="Whether decode ranks read or prefill ranks write; the bytes are the same.",
)  # fmt: skip
@click.option(
    "--rank", metavar="PP,TP",
    help="Plan for one rank only, of decode or, with --direction write, of prefill.",
)  # fmt: skip
@click.option(
    "--tokens", default=1000, show_default=True, type=click.IntRange(1, TOKENS_MAX),
    help="Tokens of the request.",
)  # fmt: skip
@click.option(
    "--format", "form", default="table", show_default=True,
    type=click.Choice(["table", "json", "svg"]), help="A text, data or a picture.",
)  # fmt: skip
@click.option("--output", metavar="FILE", help="A file instead of the screen.")
def command(**given: Any) -> None:
    """Show who reads what from whom, and in how many copies.

    Two engines are imagined, planned for as if they had shaken hands, and the plans are lowered
    for one request. Nothing runs and no memory is needed.
    """
    if given["output"] == "":
        raise ConfigError("--output is empty; name the file to write")
    model = load_model(given["model"])
    prefill, decode = (
        PaperEngine(name, model, _shape(name, given[name]), given["tokens"])
        for name in ("prefill", "decode")
    )
    report = make_report(prefill, decode, given["direction"], _rank(given["rank"]))
    if given["output"] is None:
        _write(report, given["form"], Console())
        return
    text = StringIO()
    _write(report, given["form"], Console(file=text, width=_FILE_COLUMNS))
    try:
        Path(given["output"]).write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {given['output']}: {error.strerror}") from error


def _write(report: PlanReport, form: str, console: Console) -> None:
    if form == "table":
        show(report, console)
    elif form == "svg":
        console.file.write(picture.draw(report))
    else:
        console.file.write(msgspec.json.encode(report).decode() + "\n")


def _shape(name: str, text: str) -> PaperShape:
    try:
        return PaperShape.parse(text)
    except ValueError as error:
        raise ConfigError(f"--{name}: {error}") from error


def _rank(text: str | None) -> Rank | None:
    if text is None:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--rank {text!r} must be PP,TP, two whole numbers such as 0,3")
    return int(parts[0]), int(parts[1])
