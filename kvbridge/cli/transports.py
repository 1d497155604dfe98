"""``kvbridge transports``: what is there, what runs here, and what is missing."""

import dataclasses
import json
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import click

from kvbridge.cli.option_words import Option, options_of
from kvbridge.cli.probe import probe, words
from kvbridge.errors import KVBridgeError
from kvbridge.transport import Availability, available_transports, get_transport


@click.command("transports")
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--probe",
    "probes",
    is_flag=True,
    help="Move some bytes between two processes too, and say what carried them and how fast.",
)
def command(names: tuple[str, ...], as_json: bool, probes: bool) -> None:
    """List every transport, whether it can run here, and what would change that.

    Of those that are named, all options too.
    A transport that needs an option to be opened is not probed; `kvbridge bench` takes options.
    """
    for name in names:
        get_transport(name)  # which says what is wrong with it
    found = {n: a for n, a in available_transports().items() if not names or n in names}
    if as_json:
        entries = [_entry(*item) for item in found.items()]
        if probes:
            entries = [{**e, "probe": probe(e["name"]) if e["ok"] else None} for e in entries]
        click.echo(json.dumps(entries, indent=2))
        return
    width = max(map(len, found), default=0)
    for name, availability in found.items():
        if availability.ok:
            can = _words(_capabilities(name, availability))
            # A wrapper can what the transport inside can, which is not known here.
            click.echo(f"{name:<{width}}  runs here" + (f"; it can {can}" if can else ""))
            for line in words(probe(name)) if probes else ():
                click.echo(f"{'':<{width}}  {line}")
        else:
            click.echo(f"{name:<{width}}  does not run here: {availability.reason}")
            click.echo(f"{'':<{width}}  {availability.hint}")
        for line in _option_lines(name) if names else ():
            click.echo(line)


def _options(name: str) -> list[Option]:
    """Return the options of a transport; none of one whose driver cannot be imported."""
    try:
        return options_of(get_transport(name).config_type)
    except KVBridgeError:
        return []


def _option_lines(name: str) -> Iterator[str]:
    options = _options(name)
    if not options:
        yield "  it takes no options"
    for option in options:
        default = f"; {option.default} if not given" if option.default else "; must be given"
        yield f"  {option.name}: {option.kind}{default}"
        text = option.text.replace("``", "")
        yield from wrap(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _entry(name: str, availability: Availability) -> dict[str, Any]:
    return {
        "name": name,
        "ok": availability.ok,
        "reason": availability.reason,
        "hint": availability.hint,
        "capabilities": _capabilities(name, availability),
        "options": [option._asdict() for option in _options(name)],
    }


def _capabilities(name: str, availability: Availability) -> dict[str, Any] | None:
    """Return what a transport can do as plain data, or None if it cannot run here."""
    if not availability.ok:
        return None
    values = dataclasses.asdict(get_transport(name)().capabilities)
    return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in values.items()}


def _words(capabilities: dict[str, Any] | None) -> str:
    if capabilities is None:
        return ""
    return ", ".join(key for key in ("read", "write", "notify") if capabilities[key])
