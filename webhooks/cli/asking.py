"""A question of a command to the database: one connection, one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from webhooks.cli.app import run
from webhooks.db import Transaction, transaction
from webhooks.deliveries import DISPOSITIONS, since
from webhooks.migrate import require_current
from webhooks.serve.database import connected
from webhooks.settings import Settings

T = TypeVar("T")


def ask(settings: Settings, question: Callable[[Transaction], Awaitable[T]]) -> T:
    """Run a question in a transaction of its own.

    Raises:
        ConfigurationError: there is no database, or it lacks sections of the schema.
        psycopg.Error: it does not answer, or refused.
    """

    async def asked() -> T:
        async with connected(settings) as connection:
            await require_current(connection, schema=settings.schema_name)
            async with transaction(connection) as tx:
                return await question(tx)

    return run(asked())


class Id(click.IntRange):
    """The number of a delivery, or of a rejection.

    Args:
        listed: the command that lists them.
    """

    name = "id"

    def __init__(self, listed: str) -> None:
        super().__init__(1, 2**63 - 1)
        self.listed = listed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except ValueError:
            row = "; a row, as TABLE:KEY, goes with --row, or to webhooks why" if ":" in value else ""
            self.fail(f"{value!r} is no id: write a number, as webhooks {self.listed} shows them{row}", param, ctx)
        return super().convert(value, param, ctx)

    def _describe_range(self) -> str:
        return ""


status_option = click.option(
    "--status",
    "--disposition",
    "disposition",
    type=click.Choice(DISPOSITIONS, case_sensitive=False),
    help="What became of it; in JSON it is called disposition.",
)


def read_since(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | timedelta | None:
    """Read the value of `--since`."""
    try:
        return None if value is None else since(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def time_of(moment: datetime) -> str:
    """Return a time as this machine's clock shows it, to the millisecond."""
    local = moment.astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S}.{local.microsecond // 1000:03d}"
