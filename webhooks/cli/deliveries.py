"""`webhooks deliveries`."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from typing import Any, cast

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import app_option, console, examples, printable
from webhooks.cli.asking import Id, ask, read_since, status_option
from webhooks.cli.naming import doubt
from webhooks.db import Transaction
from webhooks.deliveries import MOST, Disposition, Filter, as_json, listed, one, readable
from webhooks.delivery import Headers
from webhooks.selection import Names
from webhooks.settings import Settings

MOST_LINES = 200
COLOURS = {"dead": "red", "ignored": "yellow", "parked": "cyan", "applying": "blue"}


@click.command(
    epilog=examples(
        "webhooks deliveries --status dead --since 2h",
        "webhooks deliveries 12",
        "webhooks deliveries 12 --body > body.json",
    )
)
@click.argument("id", type=Id("deliveries"), required=False)
@app_option
@click.option("--source", help="Of this source; letter case does not matter.")
@click.option("--event", help="With this in the event's name; letter case does not matter.")
@status_option
@click.option("--since", "received", callback=read_since, help="Received since: 30m, 2h, 3d, or a date or time.")
@click.option("--limit", type=click.IntRange(1, MOST), default=20, show_default=True, help="How many at most.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
@click.option("--body", "body_only", is_flag=True, help="With an ID: only the body, byte for byte.")
def deliveries(
    id: int | None,
    app: str,
    source: str | None,
    event: str | None,
    disposition: str | None,
    received: datetime | timedelta | None,
    limit: int,
    as_text: bool,
    body_only: bool,
) -> None:
    """List deliveries, newest first, or show one whole."""
    settings = Settings.load()
    if id is None and body_only:
        raise click.UsageError("--body goes with the ID of a delivery")
    if id is not None and (source or event or disposition or received):
        raise click.UsageError("filters go without an ID")
    if id is None:
        wanted = Filter(
            source=source,
            event=event,
            disposition=cast("Disposition | None", disposition),
            since=received,
            limit=limit,
        )

        async def question(tx: Transaction) -> list[dict[str, Any]]:
            rows = await listed(tx, wanted)
            if not rows:
                await doubt(tx, Names(source=source, event=event))
            return rows

        rows = ask(settings, question)
        if as_text:
            click.echo(json.dumps([as_json(row) for row in rows], indent=2))
        else:
            _print_list(rows)
            if len(rows) == limit:
                click.echo(f"the newest {limit}; --limit shows more", err=True)
        return
    row = ask(settings, lambda tx: one(tx, id))
    if row is None:
        raise click.ClickException(f"there is no delivery {id}")
    if body_only and row["body"] is None:
        raise click.ClickException(f"the body of delivery {id} was pruned on {_time(row['pruned_at'])}")
    if body_only:
        sys.stdout.buffer.write(row["body"])
    elif as_text:
        click.echo(json.dumps(as_json(row), indent=2))
    else:
        _print_one(row)


def _print_list(rows: list[dict[str, Any]]) -> None:
    if not rows:
        click.echo("no deliveries")
        return
    table = Table("id", "received", "source", "event", "status", "tries", "reason", box=None, pad_edge=False)
    table.columns[0].justify = "right"
    for row in rows:
        table.add_row(
            str(row["id"]),
            _time(row["received_at"]),
            row["source"],
            printable(row["event"] or ""),
            Text(row["disposition"], COLOURS.get(row["disposition"], "")),
            str(row["attempt_count"]),
            printable(row["reason"] or ""),
        )
    console().print(table)


def _print_one(row: dict[str, Any]) -> None:
    headers: Headers = tuple((name, value) for name, value in row["headers"])
    facts = {
        "delivery": str(row["id"]),
        "source": row["source"],
        "event": row["event"],
        "status": row["disposition"],
        "reason": row["reason"],
        "last error": row["last_error"] if row["last_error"] != row["reason"] else None,
        "received": _time(row["received_at"]),
        "origin": row["origin"],
        "dedup key": row["dedup_key"],
        "attempts": f"{row['attempt_count']} of {row['max_attempts']}",
        "due": _time(row["not_before"]) if row["disposition"] in ("received", "parked") else None,
        "waits for": row["parked_on"],
        "waits since": _time(row["parked_since"]) if row["disposition"] == "parked" else None,
        "claimed by": row["claimed_by"] if row["disposition"] == "applying" else None,
        "lease until": _time(row["lease_until"]) if row["lease_until"] else None,
        "event number": f"{row['position']} of delivery {row['parent']}" if row["parent"] else None,
        "split into": ", ".join(map(str, row["events"])) or None,
        "replay of": row["replay_of"],
    }
    for name, fact in facts.items():
        if fact is not None:
            click.echo(f"{name:>12}  {printable(str(fact))}")
    for attempt in row["attempts"]:
        ended = "still running" if attempt["outcome"] is None else attempt["outcome"]
        error = f": {attempt['error']}" if attempt["error"] else ""
        by = f"{_time(attempt['claimed_at'])} by {attempt['claimed_by']}"
        click.echo(printable(f"{'attempt':>12}  {attempt['attempt']}, {by}: {ended}{error}"))
    when = row["headers_pruned_at"]
    click.echo("\nheaders" if when is None else f"\nheaders were pruned on {_time(when)}")
    for name, value in headers:
        click.echo(f"  {printable(name)}: {printable(value)}")
    if row["body"] is None:
        click.echo(f"\nthe body was pruned on {_time(row['pruned_at'])}")
        return
    click.echo(f"\nbody, {len(row['body'])} bytes")
    lines = printable(readable(headers, row["body"])).splitlines()
    for line in lines[:MOST_LINES]:
        click.echo(f"  {line}")
    if len(lines) > MOST_LINES:
        click.echo(f"  … {len(lines) - MOST_LINES} more lines: webhooks deliveries {row['id']} --body")


def _time(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")
