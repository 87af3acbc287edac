"""`webhooks verify`."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import click
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import app_option, console, examples, printable
from webhooks.cli.asking import ask, read_since
from webhooks.db import Transaction
from webhooks.loading import load_consumer
from webhooks.settings import Settings
from webhooks.verify import Check, as_json, tries
from webhooks.verify import verify as checked

MOST_SHOWN = 20


@click.command(epilog=examples("webhooks verify", "webhooks verify --since 2h --json"))
@app_option
@click.option("--since", "ended", callback=read_since, help="Claims that ended since: 30m, 2h, 3d, or a date or time.")
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs; with every offence.")
def verify(app: str, ended: datetime | timedelta | None, as_text: bool) -> None:
    """Check in the tables that nothing ran twice and nothing was left behind; exit with 1 if something did.

    It reads all of attempts and effects, so it may take a while on a large database.
    """
    settings, consumer = Settings.load(), load_consumer(app)

    async def question(tx: Transaction) -> tuple[list[Check], dict[str, dict[int, int]]]:
        return await checked(tx, consumer, settings, ended), await tries(tx, consumer)

    checks, rows = ask(settings, question)
    if as_text:
        click.echo(json.dumps(as_json(checks, rows), indent=2))
    else:
        _print(checks, rows)
    if not all(check.holds for check in checks):
        raise click.exceptions.Exit(1)


def _print(checks: list[Check], rows: dict[str, dict[int, int]]) -> None:
    table = Table("check", "looked at", "", box=None, pad_edge=False, header_style="bold")
    for check in checks:
        found = Text("holds", "green") if check.holds else Text(f"{len(check.offences)} offences", "red")
        table.add_row(check.name, f"{check.looked_at} {check.of}", found)
    console().print(table)
    for name, of in rows.items():
        told = [f"{count} with {attempts} attempts" for attempts, count in of.items() if attempts > 1]
        if told:
            click.echo(f"{name}: rows tried again: {', '.join(told)}")
    for check in checks:
        if check.holds:
            continue
        click.echo(f"\n{check.name}: it does not hold")
        for offence in check.offences[:MOST_SHOWN]:
            claims = f" (claim_seq {', '.join(map(str, offence.claim_seqs))})" if offence.claim_seqs else ""
            click.echo(printable(f"  {offence.row}: {offence.told}{claims}"))
        if len(check.offences) > MOST_SHOWN:
            click.echo(f"  … {len(check.offences) - MOST_SHOWN} more: webhooks verify --json")
