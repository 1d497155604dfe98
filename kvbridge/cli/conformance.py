"""``kvbridge conformance``: does a transport keep the promises that KVBridge relies on?"""

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbridge.cli.options import transport_options
from kvbridge.config import check_writable
from kvbridge.errors import ConfigError
from kvbridge.transport import check_transport

if TYPE_CHECKING:
    from kvbridge.testing import Outcome, Report, Rule

EXIT_BROKEN = 1


@click.command("conformance")
@click.argument("name", required=False)
@click.option(
    "--option", "options", multiple=True, metavar="KEY=VALUE", help="An option of the transport."
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="KEY=VALUE",
    help="An environment variable of the agents' processes.",
)
@click.option("--full", is_flag=True, help="Try all rules, and harder; takes many minutes.")
@click.option("--rule", "rules", multiple=True, metavar="ID", help="Only this rule, and others so.")
@click.option("--isolate-network", is_flag=True, help="Run in a network namespace of its own.")
@click.option(
    "--report",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("conformance.json"),
    show_default=True,
    help="Where to write what was found.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report, or the list, as JSON.")
@click.option("--list", "lists", is_flag=True, help="List the rules instead.")
def command(name: str | None, lists: bool, as_json: bool, path: Path, **given: Any) -> int:
    """Try a transport against the numbered rules of the conformance suite.

    NAME is an installed transport. A transport that is not installed is tried from a test file;
    the documentation shows how. Ends with status 1 where a rule is broken.
    """
    testing = _testing()
    if lists:
        rules = list(testing.all_rules().values())
        if as_json:
            click.echo(json.dumps([_entry(rule) for rule in rules], indent=2))
        for rule in () if as_json else rules:
            click.echo(f"{rule.id:<11} {rule.sentence}")
        return 0
    if not name:
        raise ConfigError("which transport? give its name; 'kvbridge transports' lists them")
    options = transport_options(given["options"])
    check_transport({"transport": name, "options": options})
    variables = _variables(given["variables"])
    check_writable(path, "--report")
    harness = testing.TransportHarness(
        name,
        options=options,
        environment=variables,
        isolate_network=given["isolate_network"],
    )
    report: Report = testing.run_suite(
        harness,
        rules=given["rules"] or None,
        tier="full" if given["full"] else "quick",
        progress=None if as_json else _show,
    )
    document = testing.to_json([report])
    path.write_text(document + "\n")
    if as_json:
        click.echo(document)
    else:
        click.echo(report.table())
        click.echo(f"written to {path}")
    return 0 if report.ok else EXIT_BROKEN


def _entry(rule: "Rule") -> dict[str, Any]:
    """Return all that is known of a rule but its proof, as plain data."""
    values = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.repr}
    return {**values, "group": rule.group}


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if pair.partition("=")[0] in ("", pair):
            raise ConfigError(f"--env {pair!r} must be KEY=VALUE")
    return dict(pair.partition("=")[::2] for pair in pairs)


def _testing() -> Any:
    testing = importlib.import_module("kvbridge.testing")
    try:
        testing.run_suite  # noqa: B018  (loads it)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    return testing


def _show(outcome: "Outcome") -> None:
    placement = "" if outcome.placement == "processes" else f" ({outcome.placement})"
    click.echo(
        f"{outcome.rule.id:<11}{outcome.status}{placement}, {outcome.seconds:.1f} s", err=True
    )
