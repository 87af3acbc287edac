"""`webhooks why`."""

from __future__ import annotations

import json

import click

from webhooks.cli.app import app_option, examples, printable
from webhooks.cli.asking import ask, time_of
from webhooks.db import Transaction
from webhooks.loading import load_consumer
from webhooks.settings import Settings
from webhooks.why import MOST, Why, as_json
from webhooks.why import why as answer


@click.command(epilog=examples("webhooks why patch_sessions:123", "webhooks why 12", "webhooks why 12 --json"))
@click.argument("row", metavar="TABLE:KEY|DELIVERY")
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def why(row: str, app: str, as_text: bool) -> None:
    """Tell what happened to a row or a delivery, and whether it could be claimed now."""
    settings, consumer = Settings.load(), load_consumer(app)

    async def question(tx: Transaction) -> Why:
        return await answer(tx, consumer, row, settings)

    found = ask(settings, question)
    if as_text:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        _print(found)
    if found.row is None and not found.timeline:
        raise click.exceptions.Exit(1)


def _print(found: Why) -> None:
    click.echo(printable(found.label))
    if found.row is not None:
        row = found.row
        facts = {
            "status": row["status"] if row["claimed_from"] is None else f"{row['status']} (from {row['claimed_from']})",
            "attempts": f"{row['attempt_count']} of {row['max_attempts']}",
            "moved": ", ".join(row.get("moved_rows") or ()),
            "reason": row.get("reason"),
            "last error": row["last_error"],
        }
        for name, fact in facts.items():
            if fact:
                _line(name, str(fact))
    _line("claim now?", found.standing.told)
    _line("do", found.standing.do)
    click.echo()
    if found.cut:
        click.echo(f"  … only the last {MOST} lines")
    for moment in found.timeline:
        _line(time_of(moment.at), moment.told, wide=23)
    if not found.timeline:
        click.echo("  nothing is recorded")


def _line(name: str, text: str, wide: int = 12) -> None:
    click.echo(f"{name:>{wide}}  " + printable(text).replace("\n", "\n" + " " * (wide + 2)))
