"""The command `webhooks`."""

from webhooks.cli.main import main

__all__ = ["main"]
