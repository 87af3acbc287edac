"""`webhooks export`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click

from webhooks.cli.app import app_option, examples, run
from webhooks.cli.naming import doubt
from webhooks.cli.replayed import looking
from webhooks.cli.selecting import is_everything, names, pooled, select_options, selection
from webhooks.errors import ConfigurationError
from webhooks.loading import load_consumer
from webhooks.replay import Export, Redaction
from webhooks.replay import export as exported
from webhooks.selection import Selection, chosen
from webhooks.settings import Settings
from webhooks.sources import Source

MOST_LEFT_OUT = 20


def _read_redaction(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Redaction:
    try:
        return Redaction.read(value)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command(
    epilog=examples(
        "webhooks export 12 > delivery.ndjson",
        "webhooks export --source github --since 1d --output deliveries.ndjson",
        "webhooks export 12 --redact header:user-agent --redact '$..email' --redact '$.repository.private'",
    )
)
@select_options
@app_option
@click.option("--all", "everything", is_flag=True, help="Every delivery, as without a filter.")
@click.option(
    "--redact",
    "redaction",
    multiple=True,
    metavar="WHAT",
    callback=_read_redaction,
    help="Take out header:NAME, or the values of a path such as $.sender.login; may be given several times.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Into this file, once it is whole.")
def export(app: str, everything: bool, redaction: Redaction, output: Path | None, **filters: Any) -> None:
    """Write received deliveries as lines of JSON, byte for byte, for `webhooks replay --file`.

    Those are the requests as they came in, whatever became of them; an event that was split off stands for its request,
    and a replay for what it repeats. A body with something taken out is written anew, and its signature left out. The
    exit code is 1 when a delivery had to be left out.
    """
    if everything and not is_everything(filters):
        raise click.UsageError("--all goes without a filter")
    settings, which = Settings.load(), selection(filters)
    # Without a look into bodies nothing of the consumer is needed.
    sources = load_consumer(app).sources if redaction or which.where_json else {}
    with _opened(output) as file:
        done = run(_export(settings, sources, which, redaction, file))
    for id, why in list(done.left_out.items())[:MOST_LEFT_OUT]:
        click.echo(f"delivery {id} is left out: {why}", err=True)
    if len(done.left_out) > MOST_LEFT_OUT:
        click.echo(f"… and {len(done.left_out) - MOST_LEFT_OUT} more", err=True)
    if redaction:
        click.echo(
            f"{_counted(done.values, 'value')} and {_counted(done.headers, 'header line')} taken out, "
            f"of {done.redacted:,} of {_counted(done.lines, 'delivery', 'deliveries')}",
            err=True,
        )
    if output is not None:
        click.echo(f"{_counted(done.lines, 'delivery', 'deliveries')} in {output}", err=True)
    elif not done.lines:
        click.echo("no deliveries", err=True)
    if done.left_out:
        raise click.exceptions.Exit(1)


async def _export(
    settings: Settings, sources: dict[str, Source], which: Selection, redaction: Redaction, file: BinaryIO
) -> Export:
    async with pooled(settings) as pool:
        async with pool.transaction() as tx:
            scope = await chosen(tx, which, "original")

        async def write(line: bytes) -> None:
            # A reader that is slow must not hold up the connection's keep-alive.
            await asyncio.to_thread(file.write, line)

        with looking("exporting") as seen:
            done = await exported(pool, sources, scope, redaction, write, seen)
        if not done.lines and not done.left_out:
            async with pool.transaction() as tx:
                await doubt(tx, names(which))
        return done


def _counted(count: int, one: str, several: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else several or one + 's'}"


@contextmanager
def _opened(output: Path | None) -> Generator[BinaryIO]:
    """Open where the lines go; a file is there only once it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
