"""Lines for a person that hold what others wrote: senders, receivers, the other end, a tunnel's program."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import click

from webhooks.cli.app import printable
from webhooks.errors import WebhooksError


def in_line(text: str) -> str:
    """Return a text as one line: whatever is in it begins no other line, and a terminal obeys none of it."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def say(text: str) -> None:
    """Print one line."""
    click.echo(in_line(text))


@contextmanager
def failing_in_lines() -> Generator[None]:
    """Have a failure of the block told in lines: its message is the first, and each of its notes another one.

    Raises:
        click.ClickException: in place of a `WebhooksError`.
    """
    try:
        yield
    except WebhooksError as error:
        lines = (str(error), *getattr(error, "__notes__", ()))
        raise click.ClickException("\n  ".join(in_line(line) for line in lines)) from error
