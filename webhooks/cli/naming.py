"""Names in a filter that nothing has, told on standard error where a command found nothing."""

from __future__ import annotations

import click

from webhooks.cli.app import app_of_context, printable
from webhooks.consumer import Consumer
from webhooks.db import Transaction
from webhooks.errors import ConfigurationError
from webhooks.loading import load_consumer
from webhooks.selection import Names, unknown


async def doubt(tx: Transaction, names: Names, consumer: Consumer | None = None) -> None:
    """Say which of the names neither the consumer nor anything stored has.

    Args:
        tx: to look in.
        names: what was filtered by.
        consumer: None: the one that would be run here, if it can be loaded.

    Raises:
        UnknownName: one of them can only be a mistake.
    """
    if names == Names():
        return
    for note in await unknown(tx, consumer or _consumer(), names):
        click.echo(printable(note), err=True)


def _consumer() -> Consumer | None:
    try:
        return load_consumer(app_of_context())
    except ConfigurationError:  # what is stored can be listed without it
        return None
