"""What `webhooks rejections` prints of one refused request, and of those that were verified again."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import console, printable
from webhooks.cli.asking import time_of
from webhooks.deliveries import readable
from webhooks.reverify import OUTCOMES, Verdict

MOST_LINES = 200
COLOURS = {"accepted": "green", "rearmed": "green", "refused": "red"}


def print_rejection(row: dict[str, Any], told: list[str]) -> None:
    """Show one refused request whole."""
    facts = {
        "rejection": row["id"],
        "source": row["source"],
        "cause": row["cause"],
        "received": time_of(row["received_at"]),
        "times": f"{row['times']}, last {time_of(row['last_at'])}" if row["times"] > 1 else None,
        "accepted": f"{time_of(row['accepted_at'])}, as delivery {row['delivery']}" if row["delivery"] else None,
        "sha256": row["body_sha256"],
    }
    for name, fact in facts.items():
        if fact is not None:
            click.echo(f"{name:>12}  {printable(str(fact))}")
    click.echo("\nwhy")
    for sentence in told:
        click.echo(f"  {printable(sentence)}")
    click.echo("\nheaders")
    for name, value in row["headers"]:
        click.echo(f"  {printable(name)}: {printable(value)}")
    if row["body"] is None:
        click.echo(f"\nbody, {row['body_bytes']} bytes, not kept")
        return
    click.echo(f"\nbody, {row['body_bytes']} bytes")
    lines = printable(readable(row["headers"], row["body"])).splitlines()
    for line in lines[:MOST_LINES]:
        click.echo(f"  {line}")
    if len(lines) > MOST_LINES:
        click.echo(f"  … {len(lines) - MOST_LINES} more lines: webhooks rejections show {row['id']} --body")


def print_verdicts(verdicts: list[Verdict], *, dry: bool) -> None:
    """Show what became of refused requests, or would."""
    if not verdicts:
        click.echo("there is nothing refused that was not accepted since")
        return
    table = Table("id", "source", "refused for", "now", "delivery", "", box=None, pad_edge=False)
    for verdict in verdicts:
        table.add_row(
            str(verdict.id),
            verdict.source,
            printable(verdict.cause),
            Text(verdict.outcome, COLOURS.get(verdict.outcome, "")),
            "" if verdict.delivery is None else str(verdict.delivery),
            printable(verdict.told),
        )
    console().print(table)
    counts = {outcome: sum(verdict.outcome == outcome for verdict in verdicts) for outcome in OUTCOMES}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    some = any(verdict.outcome != "refused" for verdict in verdicts)
    how = "; nothing was done yet" + (": do it with --yes" if some else ", and --yes would accept none")
    click.echo(f"{told}{how}" if dry else told)


def plain(verdict: Verdict) -> dict[str, object]:
    """Return a verdict as plain values."""
    return {
        "id": verdict.id,
        "source": verdict.source,
        "cause": verdict.cause,
        "outcome": verdict.outcome,
        "delivery": verdict.delivery,
        "told": verdict.told,
    }
