"""The options with which `replay` and `export` select deliveries, and what both of them open."""

from __future__ import annotations

import asyncio
import getpass
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from webhooks.cli.asking import Id, read_since, status_option
from webhooks.db import ended
from webhooks.errors import ConfigurationError
from webhooks.migrate import require_current
from webhooks.pool import Pool
from webhooks.selection import JsonFilter, Names, Selection
from webhooks.serve.database import connected
from webhooks.serve.signals import signals
from webhooks.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def _read_filters(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[JsonFilter, ...]:
    try:
        return tuple(JsonFilter.read(text) for text in value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _read_row(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not all(value.partition(":")):
        raise click.BadParameter(f"{value!r} names no row: write TABLE:KEY, such as patch_sessions:123", ctx, param)
    return value


def select_options(function: F) -> F:
    """Add IDs and filters to a command; `selection` makes of them what they select."""
    for add in reversed(
        (
            click.argument("ids", metavar="[ID]...", type=Id("deliveries"), nargs=-1),
            click.option("--source", help="Of this source; letter case does not matter."),
            click.option("--event", help="With this in the event's name; letter case does not matter."),
            status_option,
            click.option("--since", callback=read_since, help="Received since: 30m, 2h, 3d, or a date or time."),
            click.option("--until", callback=read_since, help="Received before that time, or longer ago than that."),
            click.option("--row", metavar="TABLE:KEY", callback=_read_row, help="That moved this row, or wait for it."),
            click.option(
                "--where-json",
                multiple=True,
                metavar="PATH=VALUE",
                callback=_read_filters,
                help="With this value in the body: $.repository.full_name=acme/app. Read one by one, so slower.",
            ),
            click.option("--limit", type=click.IntRange(1), help="The oldest so many at most."),
            click.option("--after", type=click.IntRange(0), default=0, help="Only those after this id, to go on."),
            click.option("--up-to", "upto", type=Id("deliveries"), help="Only those up to this id."),
        )
    ):
        function = add(function)
    return function


def selection(given: Mapping[str, Any]) -> Selection:
    """Return what the options of `select_options` select."""
    since: datetime | timedelta | None = given["since"]
    until: datetime | timedelta | None = given["until"]
    return Selection(
        ids=tuple(given["ids"]),
        source=given["source"],
        event=given["event"],
        disposition=given["disposition"],
        since=since,
        until=until,
        where_json=given["where_json"],
        row=given["row"],
        limit=given["limit"],
        after=given["after"],
        upto=given["upto"],
    )


def names(wanted: Selection) -> Names:
    """Return the names that a selection filters by."""
    return Names(source=wanted.source, event=wanted.event, row=wanted.row)


def is_everything(given: Mapping[str, Any]) -> bool:
    """Say whether the options leave nothing out but by number."""
    filters = ("ids", "source", "event", "disposition", "since", "until", "row", "where_json")
    return not any(given[name] for name in filters)


def somebody() -> str:
    """Return who runs this."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run under a number without a name
        return "somebody"


@asynccontextmanager
async def pooled(settings: Settings) -> AsyncGenerator[Pool]:
    """Open the connections of a command that does many things, on a database that has our tables.

    Raises:
        ConfigurationError: there is no database, or it lacks sections of the schema.
        psycopg.Error: it does not answer.
    """
    # The connection is not needed for long, but it keeps an embedded server running.
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        async with Pool.open(settings=settings) as pool:
            yield pool


@asynccontextmanager
async def stopped_by_signals() -> AsyncGenerator[asyncio.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; the second one cuts the block short.

    Raises:
        click.Abort: it was cut short.
    """
    if threading.current_thread() is not threading.main_thread():  # a signal reaches the main thread only
        yield asyncio.Event()
        return
    async with signals() as heard:
        heard.ready()
        task = asyncio.current_task()

        async def watch() -> None:
            await heard.stop.wait()
            click.echo("\nstopping when what is under way has ended; once more cuts it short", err=True)
            await heard.hurry.wait()
            if task is not None:
                task.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield heard.stop
        except asyncio.CancelledError:
            if not heard.hurry.is_set():
                raise
            if task is not None:
                task.uncancel()
            raise click.Abort from None
        finally:
            await ended([watching])
