"""``kvbridge bench``: how fast transports move bytes between two processes of this machine."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbridge.bench import Case, Measurement, measure
from kvbridge.bench.cases import LAYOUTS
from kvbridge.cli.options import size, size_words, transport_options
from kvbridge.errors import ConfigError, KVBridgeError
from kvbridge.transport import Op, available_transports, check_transport

OPS: tuple[Op, ...] = ("read", "write")


@click.command("bench")
@click.argument("transports", nargs=-1, metavar="[TRANSPORT]...")
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of the transport."
)
@click.option("--op", "ops", multiple=True, type=click.Choice(OPS), help="Only this direction.")
@click.option(
    "--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), help="Only this layout."
)
@click.option(
    "--block",
    "blocks",
    multiple=True,
    metavar="SIZE",
    help="Length of a piece, as in 4KiB; may be given again.  [default: 4KiB to 4MiB]",
)
@click.option("--total", default="64MiB", show_default=True, help="Bytes of one transfer.")
@click.option(
    "--runs", default=7, show_default=True, type=click.IntRange(1, 1000), help="Runs that count."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture (.png) too."
)
def command(**given: Any) -> int:
    """Measure how fast transports move bytes between two processes of this machine.

    Without a name, every transport that runs here is measured. Neighbouring pieces are not merged.
    GB are 10^9 bytes; figures are medians, with quartiles in --json, and a share of what numpy
    takes to copy as many bytes in the same run. Exits with 2 if one of the named transports
    cannot be measured.
    """
    cases = _cases(given)
    plot = _plotter(given["plot"])
    names, skipped = _names(given["transports"], given["options"])
    found: list[Measurement] = []
    with _progress(len(names) * len(cases) * given["runs"]) as progress:
        task = next(iter(progress.task_ids))
        for name in names:
            progress.update(task, description=name)
            choice = {"transport": name, "options": transport_options(given["options"])}
            try:
                found += measure(
                    choice, cases, runs=given["runs"], on_step=lambda _: progress.advance(task)
                )
            except KVBridgeError as error:
                if given["transports"]:
                    raise
                skipped[name] = str(error)
    if as_json := given["as_json"]:
        click.echo(json.dumps({"measured": [_entry(m) for m in found], "skipped": skipped}))
    else:
        _show(found, skipped)
    if plot is not None and found:
        plot(found, given["plot"])
        click.echo(f"wrote {given['plot']}", err=as_json)
    return 0


def _cases(given: dict[str, Any]) -> list[Case]:
    blocks = [size(text) for text in given["blocks"]] or [4 << 10, 64 << 10, 1 << 20, 4 << 20]
    return [
        Case(op, block, layout, max(size(given["total"]), block))
        for op, layout, block in product(
            given["ops"] or OPS, given["layouts"] or LAYOUTS, dict.fromkeys(blocks)
        )
    ]


def _names(chosen: Sequence[str], options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return which transports to measure, and why others are not."""
    if chosen:
        names = list(dict.fromkeys(chosen))
        if options and len(names) > 1:
            raise ConfigError(
                f"--option is for one transport, {len(names)} are named: {', '.join(names)}; "
                "measure them one after the other"
            )
        for name in names:
            check_transport({"transport": name, "options": transport_options(options)})
        return names, {}
    if options:
        raise ConfigError("--option is for one transport; name it")
    found = available_transports()
    skipped = {name: f"{a.reason}. {a.hint}" for name, a in found.items() if not a.ok}
    return [name for name in found if name not in skipped], skipped


def _progress(total: int) -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task("", total=total)
    return progress


def _entry(measured: Measurement) -> dict[str, Any]:
    case = measured.case
    return {
        "transport": measured.transport,
        "path": measured.path,
        "op": case.op,
        "layout": case.layout,
        "block_nbytes": case.block_nbytes,
        "nbytes": case.nbytes,
        "gbps": measured.gbps._asdict(),
        "of_memcpy": measured.of_memcpy._asdict(),
        "seconds": measured.seconds,
    }


def _show(found: Sequence[Measurement], skipped: dict[str, str]) -> None:
    console = Console()
    table = Table("transport", "path", "op", "layout", "block", "GB/s", "of memcpy", box=None)
    for name in ("GB/s", "of memcpy", "block"):
        next(c for c in table.columns if c.header == name).justify = "right"
    for m in found:
        table.add_row(
            m.transport,
            m.path,
            m.case.op,
            m.case.layout,
            size_words(m.case.block_nbytes),
            f"{m.gbps.median:.3g}",
            f"{m.of_memcpy.median:.2f}",
        )
    if found:
        console.print(table)
    for name, reason in skipped.items():
        console.print(f"{name} was not measured: {reason}", highlight=False, markup=False)


def _plotter(path: Path | None) -> Any:
    """Return what draws the picture; whether it can is found out before minutes are spent."""
    if path is None:
        return None
    from kvbridge.cli import bench_plot

    bench_plot.check(path)
    return bench_plot.draw
