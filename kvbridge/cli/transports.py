"""``kvbridge transports``: what is there, what runs here, and what is missing."""

import dataclasses
import json
from typing import Any

import click

from kvbridge.cli.probe import probe, words
from kvbridge.transport import Availability, available_transports, get_transport


@click.command("transports")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--probe",
    "probes",
    is_flag=True,
    help="Move some bytes between two processes too, and say what carried them and how fast.",
)
def command(as_json: bool, probes: bool) -> None:
    """List every transport, whether it can run here, and what would change that.

    A transport that needs an option to be opened is not probed; `kvbridge bench` takes options.
    """
    found = available_transports()
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


def _entry(name: str, availability: Availability) -> dict[str, Any]:
    return {
        "name": name,
        "ok": availability.ok,
        "reason": availability.reason,
        "hint": availability.hint,
        "capabilities": _capabilities(name, availability),
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
