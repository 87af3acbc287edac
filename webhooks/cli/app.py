"""What the commands have in common: `--app`, output for people, and errors on one line."""

from __future__ import annotations

import asyncio
import os
import sys
import unicodedata
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click
import psycopg
from rich.console import Console
from rich.table import Table

from webhooks.loading import DEFAULT_APP

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

PIPED_WIDTH = 240


def app_option(function: F) -> F:
    """Add `--app`; after a command's name it wins over the same option before it, and that over `WEBHOOKS_APP`."""
    return click.option(
        "--app",
        metavar="MODULE:NAME",
        is_eager=True,
        default=app_of_context,
        show_default=DEFAULT_APP,
        help="The consumer; the working directory is looked through first.",
    )(function)


def app_of_context() -> str:
    """Return the consumer's name as it was given before the command's, or else by the environment."""
    context = click.get_current_context(silent=True)
    while context is not None:
        if given := context.params.get("app"):
            return str(given)
        context = context.parent
    return os.environ.get("WEBHOOKS_APP") or DEFAULT_APP


def examples(*lines: str) -> str:
    """Return the end of a command's help: one example a line."""
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the asynchronous part of a command."""
    # psycopg does not work on Windows' own event loop.
    factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


class _Console(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        for table in objects:
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"  # on a narrow terminal a long word goes on below, and is never cut
        super().print(*objects, **how)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as from anything else that writes, instead of an exit of its own


def console() -> Console:
    """Return where tables go; into a pipe they go unfolded."""
    return _Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def printable(text: str) -> str:
    """Return a sender's text so that a terminal shows it, and does not obey it."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def told(error: BaseException) -> str:
    """Return an error as one line, or as the lines its message has on purpose."""
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
        return f"the database does not answer: {' '.join(str(error).split())}"
    if isinstance(error, psycopg.Error):
        return f"the database refused: {' '.join(str(error).split())}"
    return str(error)
