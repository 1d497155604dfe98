"""What ``kvbridge demo`` does in the network it was given: run, and say what came of it."""

import json
from collections.abc import Mapping
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

_STEP_NAMES = {
    "start": "starting the ranks",
    "prefill": "computing the prompt",
    "pull": "meeting, moving the cache",
    "compare": "comparing every byte",
    "decode": "continuing",
    "reference": "running one unsplit engine",
    "stop": "stopping the ranks",
}


def run(given: Mapping[str, Any], *, network: str) -> bool:
    """Run the demo as the command line says, and print its report.

    Args:
        given: The options of the command line.
        network: What to call the network that the ranks are in.

    Returns:
        Whether everything was equal.

    Raises:
        KVBridgeError: It cannot be run, or a rank failed.
    """
    config = _config(given)
    if given["as_json"]:
        report = run_demo(config)
        click.echo(json.dumps({**report.to_builtins(), "network": network}))
    else:
        report = _run_with_progress(config)
        _show(report, config, explain=given["explain"])
    return report.equal


def _config(given: Mapping[str, Any]) -> DemoConfig:
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
            direction=given["direction"],
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
