"""The commands together, and the one place where errors become a line and an exit status."""

import importlib
import json
import sys
from collections.abc import Sequence

import click

from kvbridge import __version__
from kvbridge.errors import KVBridgeError

EXIT_DIFFERENT = 1
"""Something that should be equal is not, or a rule failed."""
EXIT_MISTAKE = 2
"""What was asked for cannot be done."""
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "demo": "Prefill on one engine, decode on another of any shape, and compare.",
    "transports": "List every transport, whether it can run here, and what would change that.",
}


class _Commands(click.Group):
    """Loads a command's module when it is asked for, so that the others cost nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kvbridge.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvbridge")
def _kvbridge() -> None:
    """Move KV caches between LLM inference engines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake becomes one line, never a traceback.

    Args:
        arguments: Words after ``kvbridge``; those of the process if None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _kvbridge.main(words, prog_name="kvbridge", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return EXIT_MISTAKE
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _mistake(words, "UsageError", error.format_message())
    except KVBridgeError as error:
        return _mistake(words, getattr(error, "kind", type(error).__name__), str(error))
    except KeyboardInterrupt:
        click.echo("kvbridge: interrupted", err=True)
        return EXIT_INTERRUPTED
    return status if isinstance(status, int) else 0


def _mistake(words: Sequence[str], kind: str, message: str) -> int:
    line = " ".join(message.split())
    if "--json" in words:
        click.echo(json.dumps({"error": kind, "message": line}))
    else:
        click.echo(f"kvbridge: error: {line}", err=True)
    return EXIT_MISTAKE
