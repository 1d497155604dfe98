"""``kvbridge transports``: what is there, what runs here, and what is missing."""

import dataclasses
import json
from typing import Any

import click

from kvbridge.transport import Availability, available_transports, get_transport


@click.command("transports")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(as_json: bool) -> None:
    """List every transport, whether it can run here, and what would change that."""
    found = available_transports()
    if as_json:
        click.echo(json.dumps([_entry(*item) for item in found.items()], indent=2))
        return
    width = max(map(len, found), default=0)
    for name, availability in found.items():
        if availability.ok:
            can = _words(_capabilities(name, availability))
            click.echo(f"{name:<{width}}  runs here; it can {can}")
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
