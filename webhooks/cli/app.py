"""What the commands have in common: `--app`, output for people, and errors on one line."""

from __future__ import annotations

import asyncio
import sys
import unicodedata
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click
import psycopg
from rich.console import Console

from webhooks.loading import DEFAULT_APP

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

PIPED_WIDTH = 240


def app_option(function: F) -> F:
    """Add `--app`; on a command it wins over the same option before the command's name."""
    return click.option(
        "--app",
        metavar="MODULE:NAME",
        envvar="WEBHOOKS_APP",
        is_eager=True,
        default=_inherited,
        show_default=DEFAULT_APP,
        help="The consumer; the working directory is looked through first.",
    )(function)


def _inherited() -> str:
    context = click.get_current_context(silent=True)
    parent = context.parent if context is not None else None
    return parent.params.get("app", DEFAULT_APP) if parent is not None else DEFAULT_APP


def examples(*lines: str) -> str:
    """Return the end of a command's help: one example a line."""
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run the asynchronous part of a command."""
    # psycopg does not work on Windows' own event loop.
    factory = asyncio.SelectorEventLoop if sys.platform == "win32" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def console() -> Console:
    """Return where tables go; into a pipe they go unfolded."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


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
