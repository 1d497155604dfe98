"""The commands together, and the one place where errors become a line and an exit status."""

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise

import click

from kvbridge import __version__
from kvbridge.errors import KVBridgeError
from kvbridge.processes import interrupted_later

EXIT_DIFFERENT = 1
"""Something that should be equal is not, or a rule failed."""
EXIT_MISTAKE = 2
"""What was asked for cannot be done."""
EXIT_UNREAD = 128 + signal.SIGPIPE
"""Whoever read the output went away."""

_COMMANDS = {
    "bench": "Measure how fast transports move bytes between two processes of this machine.",
    "conformance": "Try a transport against the numbered rules that KVBridge relies on.",
    "demo": "Prefill on one engine, decode on another of any shape, and compare.",
    "new-transport": "Write a project for a transport of your own; its tests say what is missing.",
    "plan": "Show who would read what from whom, and in how many copies, without any engine.",
    "transports": "List every transport, whether it can run here, and what would change that.",
}


class _Commands(click.Group):
    """Loads a command's module when it is asked for, so that the others cost nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with interrupted_later():  # an import that is interrupted may go on as if nothing were
            module = importlib.import_module(f"kvbridge.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvbridge")
def _kvbridge() -> None:
    """Move KV caches between LLM inference engines."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake becomes one line, never a traceback.

    Args:
        arguments: Words after ``kvbridge``; those of the process if None, which is then the
            command's own: a command may change what the process is for good.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:
        click.echo("kvbridge: error: standard output is closed; open it, say to a file", err=True)
        return EXIT_MISTAKE
    try:
        return _run(words, own_process=arguments is None)
    except BrokenPipeError:
        _forget_output()
        return EXIT_UNREAD
    except SystemExit as error:
        # What rich makes of a reader that went away, after it has forgotten the output itself.
        if isinstance(error.__context__, BrokenPipeError):
            return EXIT_UNREAD
        raise
    except OSError as error:
        # The machine's fault, not the program's: a full disk, too many open files.
        _forget_output()
        click.echo(f"kvbridge: error: {error.strerror or error}", err=True)
    except click.ClickException as error:
        _complain(words, "UsageError", error.format_message())
    except KVBridgeError as error:
        _complain(words, getattr(error, "kind", type(error).__name__), str(error))
    return EXIT_MISTAKE


def _run(words: list[str], *, own_process: bool) -> int:
    try:
        with _kvbridge.make_context("kvbridge", list(words), obj=own_process) as context:
            status = _kvbridge.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return EXIT_MISTAKE
    except click.exceptions.Exit as error:
        status = error.exit_code
    sys.stdout.flush()
    return status if isinstance(status, int) else 0


def _forget_output() -> None:
    """Let nothing be written to an output that takes nothing any more, at exit least of all."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(words: Sequence[str], kind: str, message: str) -> None:
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    if "--json" in words or _asks_for_json(words):
        click.echo(json.dumps({"error": kind, "message": line}))
    else:
        click.echo(f"kvbridge: error: {line}", err=True)


def _asks_for_json(words: Sequence[str]) -> bool:
    return "--format=json" in words or ("--format", "json") in pairwise(words)
