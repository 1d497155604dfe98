"""The command ``kvbridge``."""

from kvbridge.cli.main import main

__all__ = ["main"]
