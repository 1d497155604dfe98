"""``kvbridge demo``: two engines, one prompt, and the proof that nothing was lost on the way."""

import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbridge.cli.options import transport_options
from kvbridge.demo import (
    PROMPT_MAX_BYTES,
    STEPS,
    DemoConfig,
    DemoReport,
    EngineShape,
    ModelConfig,
    run_demo,
)
from kvbridge.errors import ConfigError

EXIT_TERMINATED = 128 + signal.SIGTERM

_SHAPE_HELP = "as in tp=2,pp=1,page=16,layout=nhd,kv=together; what is left out keeps its default"

_STEP_NAMES = {
    "start": "starting the ranks",
    "prefill": "computing the prompt",
    "pull": "meeting, moving the cache",
    "compare": "comparing every byte",
    "decode": "continuing",
    "reference": "running one unsplit engine",
    "stop": "stopping the ranks",
}


@click.command("demo")
@click.option(
    "--transport",
    default="local",
    show_default=True,
    help="What moves the bytes; of several, as in nixl,mooncake, the next is tried if one fails.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the transport; NAME.KEY=VALUE where there are several.",
)
@click.option("--break", "broken", metavar="NAMES", help="Transports whose reads shall fail.")
@click.option("--prefill", default="tp=2,page=16,layout=nhd", show_default=True, help=_SHAPE_HELP)
@click.option("--decode", default="tp=4,page=32,layout=hnd", show_default=True, help=_SHAPE_HELP)
@click.option("--heads", default=4, show_default=True, help="KV heads of the model.")
@click.option("--layers", default=4, show_default=True, help="Layers of the model.")
@click.option("--seed", default=0, show_default=True, help="Where the model's weights come from.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A text instead of ours.")
@click.option("--tokens", default=32, show_default=True, help="How many tokens to write.")
@click.option("--port", default=0, help="Handshake port of the prefill engine.  [default: free]")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds, per step.")
@click.option("--explain", is_flag=True, help="Show the plan of every decode rank too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(**arguments: Any) -> int:
    """Prefill on one engine, decode on another of any shape, and compare.

    Every rank is a process with its shard of heads and layers. The decode engine pulls the cache
    over the chosen transport and continues; one unsplit engine does the same, and every token
    and every moved byte must be equal. Exits with 1 if anything differs.
    """
    config = _config(**arguments)
    signal.signal(signal.SIGTERM, _terminated)
    if arguments["as_json"]:
        report = run_demo(config)
        click.echo(json.dumps(report.to_builtins()))
    else:
        report = _run_with_progress(config)
        _show(report, config, explain=arguments["explain"])
    return 0 if report.equal else 1


def _terminated(_signal: int, _frame: object) -> None:
    """End as after Ctrl-C: the ranks are stopped on the way out."""
    raise SystemExit(EXIT_TERMINATED)


def _config(**given: Any) -> DemoConfig:
    try:
        more = {}
        if given["prompt_file"] is not None:
            with given["prompt_file"].open("rb") as file:
                more["prompt"] = file.read(PROMPT_MAX_BYTES + 1)
        transports = _names(given["transport"])
        return DemoConfig(
            model=ModelConfig(layers=given["layers"], kv_heads=given["heads"], seed=given["seed"]),
            prefill=EngineShape.parse(given["prefill"]),
            decode=EngineShape.parse(given["decode"]),
            tokens=given["tokens"],
            transports=transports,
            options=_options(given["options"], transports),
            broken=_names(given["broken"] or ""),
            port=given["port"],
            timeout_s=given["timeout_s"],
            **more,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot read {given['prompt_file']}: {error.strerror}") from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _options(texts: tuple[str, ...], transports: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Sort options by the transport that they are of, which need not be named if there is one."""
    if len(transports) == 1:
        return {transports[0]: transport_options(texts)}
    options: dict[str, dict[str, Any]] = {}
    for key, value in transport_options(texts).items():
        name, dot, own = key.partition(".")
        if not dot:
            raise ConfigError(
                f"--option {key}: there are several transports; write {transports[0]}.{key}=..."
            )
        options.setdefault(name, {})[own] = value
    return options


def _run_with_progress(config: DemoConfig) -> DemoReport:
    columns = (TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(STEPS))

        def on_step(step: str) -> None:
            progress.update(task, description=_STEP_NAMES[step], completed=STEPS.index(step))

        return run_demo(config, on_step=on_step)


def _show(report: DemoReport, config: DemoConfig, *, explain: bool) -> None:
    console = Console()
    console.print(
        f"prefill {config.prefill}  ->  decode {config.decode}  over {report.transport}, "
        f"{len(config.prompt)} byte prompt",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(report))
    for failed, next_one in sorted({each for p in report.pulls.values() for each in p.failovers}):
        ranks = sum((failed, next_one) in p.failovers for p in report.pulls.values())
        why = " (as asked: it was broken on purpose)" if failed in config.broken else ""
        console.print(f"[yellow]{failed} failed[/] on {ranks} ranks{why}; {next_one} went on")
    if explain:
        for pulled in report.pulls.values():
            click.echo(pulled.plan)
    click.echo(f"decode engine wrote   {bytes(report.tokens)!r}")
    click.echo(f"one engine writes     {bytes(report.reference)!r}")
    if report.equal:
        console.print("[green]equal[/]: every token, and every byte that moved")
        return
    tokens = "equal" if report.tokens == report.reference else "different"
    console.print(
        f"[red]different[/]: tokens are {tokens}, {report.differing_bytes} moved bytes differ, "
        f"bytes outside the request changed on ranks {report.touched_ranks}"
    )


def _table(report: DemoReport) -> Table:
    table = Table("decode rank", "via", "read from", box=None)
    for header in ("bytes", "copies", "merged", "ms", "GB/s"):
        table.add_column(header, justify="right")
    for rank, pulled in sorted(report.pulls.items()):
        nbytes = sum(source.nbytes for source in pulled.sources)
        for i, source in enumerate(pulled.sources):
            row = [f"{source.nbytes:,}", f"{source.copies:,}", f"{source.merged:,}"]
            if i == 0:
                row += [f"{pulled.seconds * 1e3:.2f}", f"{nbytes / pulled.seconds / 1e9:.3g}"]
            first = (_rank(rank), pulled.via) if i == 0 else ("", "")
            table.add_row(*first, _rank(source.rank), *row)
        if not pulled.sources:
            table.add_row(_rank(rank), pulled.via, "nobody: nothing to move", "0", "0", "0")
    return table


def _rank(rank: tuple[int, int]) -> str:
    return f"pp {rank[0]} tp {rank[1]}"
