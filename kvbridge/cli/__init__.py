"""The command ``kvbridge``."""

import sys
from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; neither a user's mistake nor Ctrl-C becomes a traceback.

    Args:
        arguments: Words after ``kvbridge``; those of the process if None.

    Returns:
        The exit status.
    """
    try:
        from kvbridge.cli.commands import run  # takes long enough to be interrupted

        return run(arguments)
    except KeyboardInterrupt:
        print("kvbridge: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
