"""`webhooks rejections`: what was refused, why, and what becomes of it once the secret is mended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click
from rich.table import Table

from webhooks import rejections as kept
from webhooks import reverify as again
from webhooks.cli.app import app_option, console, examples, printable, run
from webhooks.cli.asking import Id, ask, read_since, time_of
from webhooks.cli.naming import doubt
from webhooks.cli.refused import plain, print_rejection, print_verdicts
from webhooks.consumer import Consumer
from webhooks.db import Transaction, transaction
from webhooks.deliveries import as_json
from webhooks.explanation import explained, known
from webhooks.loading import load_consumer
from webhooks.migrate import require_current
from webhooks.rejections import Filter
from webhooks.reverify import Verdict
from webhooks.selection import Names
from webhooks.serve.database import connected
from webhooks.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
Since = datetime | timedelta | None

ID = Id("rejections list")


def _filters(function: F) -> F:
    for option in (
        click.option("--json", "as_text", is_flag=True, help="As JSON, for programs."),
        click.option("--since", callback=read_since, help="Last seen since: 30m, 2h, 3d, or a date or time."),
        click.option("--cause", help="Refused for this cause, such as bad_signature."),
        click.option("--source", help="Of this source; letter case does not matter."),
    ):
        function = option(function)
    return function


_limit = click.option(
    "--limit", type=click.IntRange(1, kept.MOST), default=20, show_default=True, help="How many at most."
)


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "webhooks rejections --since 2h",
        "webhooks rejections show 7",
        "webhooks rejections reverify --source github --yes",
    ),
)
@app_option
@_filters
@_limit
@click.pass_context
def rejections(
    context: click.Context,
    app: str,
    source: str | None,
    cause: str | None,
    since: Since,
    limit: int,
    as_text: bool,
) -> None:
    """Show which requests were refused, by source and cause, each kind with a hint at why.

    The hint is worked out from one of its kind, the newest that was kept whole and not accepted since.
    """
    if context.invoked_subcommand is not None:
        if source or cause or since or as_text:
            raise click.UsageError(f"write the options after {context.invoked_subcommand}")
        return
    settings, consumer = Settings.load(), load_consumer(app)
    secrets = known(consumer.sources, settings.home)
    wanted = Filter(source=source, cause=cause, since=since, limit=limit)

    async def question(tx: Transaction) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        kinds = await kept.kinds(tx, wanted)
        if not kinds:
            await _doubt(tx, wanted, consumer)
        return [(kind, await kept.one(tx, kind["example"])) for kind in kinds]

    found = ask(settings, question)
    hinted = [(kind, [] if row is None else explained(row, consumer.sources, secrets)) for kind, row in found]
    if as_text:
        click.echo(json.dumps([{**as_json(kind), "hints": told} for kind, told in hinted], indent=2))
    elif not hinted:
        click.echo("nothing was refused")
    else:
        table = Table("source", "cause", "times", "last", "example", "hint", box=None, pad_edge=False)
        for kind, told in hinted:
            table.add_row(
                kind["source"],
                printable(kind["cause"]),
                str(kind["times"]),
                time_of(kind["last_at"]).partition(".")[0],
                str(kind["example"]),
                printable(_state(kind, told)),
            )
        console().print(table)
        click.echo("one of them: webhooks rejections show ID; all of a source: webhooks rejections list --source …")


def _state(kind: dict[str, Any], told: list[str]) -> str:
    if kind["accepted"] == kind["kept"]:
        return "all accepted since"
    return "; ".join(told)


async def _doubt(tx: Transaction, wanted: Filter, consumer: Consumer | None = None) -> None:
    await doubt(tx, Names(source=wanted.source, cause=wanted.cause), consumer)


@rejections.command("list", epilog=examples("webhooks rejections list --source github --since 2h"))
@app_option
@_filters
@_limit
def list_(app: str, source: str | None, cause: str | None, since: Since, limit: int, as_text: bool) -> None:
    """List refused requests one by one, the newest first."""
    wanted = Filter(source=source, cause=cause, since=since, limit=limit)

    async def question(tx: Transaction) -> list[dict[str, Any]]:
        rows = await kept.listed(tx, wanted)
        if not rows:
            await _doubt(tx, wanted)
        return rows

    rows = ask(Settings.load(), question)
    if as_text:
        click.echo(json.dumps([as_json(row) for row in rows], indent=2))
        return
    if not rows:
        click.echo("nothing was refused")
        return
    table = Table("id", "received", "source", "cause", "bytes", "times", "accepted as", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            str(row["id"]),
            time_of(row["received_at"]),
            row["source"],
            printable(row["cause"]),
            str(row["body_bytes"]),
            str(row["times"]),
            "" if row["delivery"] is None else f"delivery {row['delivery']}",
        )
    console().print(table)


@rejections.command("show", epilog=examples("webhooks rejections show 7", "webhooks rejections show 7 --body > body"))
@click.argument("id", type=ID)
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
@click.option("--body", "body_only", is_flag=True, help="Only the body, byte for byte.")
def show(id: int, app: str, as_text: bool, body_only: bool) -> None:
    """Show one refused request whole, with what can be said about why."""
    settings, consumer = Settings.load(), load_consumer(app)

    async def question(tx: Transaction) -> dict[str, Any] | None:
        return await kept.one(tx, id)

    row = ask(settings, question)
    if row is None:
        raise click.ClickException(f"there is no rejection {id}; the oldest ones are forgotten")
    if body_only:
        if row["body"] is None:
            raise click.ClickException(f"the body of rejection {id} was not kept: {row['body_bytes']} bytes came")
        sys.stdout.buffer.write(row["body"])
        return
    told = explained(row, consumer.sources, known(consumer.sources, settings.home))
    if as_text:
        click.echo(json.dumps({**as_json(row), "hints": told}, indent=2))
    else:
        print_rejection(row, told)


@rejections.command(
    "reverify",
    epilog=examples(
        "webhooks rejections reverify --source github",
        "webhooks rejections reverify --source github --since 2h --yes",
        "webhooks rejections reverify --id 7 --ignore-age --yes",
    ),
)
@app_option
@_filters
@click.option("--id", "ids", type=ID, multiple=True, help="This one; may be given several times.")
@click.option("--ignore-age", is_flag=True, help="Accept also what was too old, or too far ahead, when it arrived.")
@click.option("--yes", is_flag=True, help="Do it; else it is only said what would become of them.")
def reverify(
    app: str,
    source: str | None,
    cause: str | None,
    since: Since,
    as_text: bool,
    ids: tuple[int, ...],
    ignore_age: bool,
    yes: bool,
) -> None:
    """Verify refused requests again with the secrets of today, and accept those that are right.

    A signed time is held against the time of the receipt, not against now: what was stale then stays so, unless
    --ignore-age says otherwise. What is accepted becomes a delivery like any other, or is a duplicate of one. Exits
    with 1 when some stay refused.
    """
    settings = Settings.load()
    wanted = Filter(source=source, cause=cause, since=since)
    verdicts = run(_reverified(settings, app, wanted, ids, ignore_age=ignore_age, dry=not yes))
    if as_text:
        click.echo(json.dumps({"dry": not yes, "rejections": [plain(verdict) for verdict in verdicts]}, indent=2))
    else:
        print_verdicts(verdicts, dry=not yes)
    if any(verdict.outcome == "refused" for verdict in verdicts):
        raise click.exceptions.Exit(1)


async def _reverified(
    settings: Settings, app: str, wanted: Filter, ids: tuple[int, ...], *, ignore_age: bool, dry: bool
) -> list[Verdict]:
    consumer = load_consumer(app)
    secrets = known(consumer.sources, settings.home).in_force
    verdicts: list[Verdict] = []
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        async with transaction(connection) as tx:
            found = await again.candidates(tx, wanted, ids or None)
            if not found:
                await _doubt(tx, wanted, consumer)
            for id in {*ids}.difference(found):
                row = await kept.one(tx, id)
                if row is not None and row["delivery"] is not None:
                    click.echo(f"rejection {id} was accepted already, as delivery {row['delivery']}", err=True)
        for start in range(0, len(found), again.AT_ONCE):
            async with transaction(connection) as tx:
                some = found[start : start + again.AT_ONCE]
                verdicts += await again.reverify(tx, consumer, secrets, some, ignore_age=ignore_age, dry=dry)
    return verdicts
