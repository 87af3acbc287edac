"""`webhooks status`."""

from __future__ import annotations

import json

import click
from rich.table import Table

from webhooks.cli.app import app_option, console, examples, run
from webhooks.consumer import Consumer
from webhooks.db import transaction
from webhooks.loading import load_consumer
from webhooks.migrate import require_current
from webhooks.serve.database import connected
from webhooks.settings import Settings
from webhooks.status import PhaseStatus, as_json
from webhooks.status import status as count


@click.command(epilog=examples("webhooks status", "webhooks status --json"))
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def status(app: str, as_text: bool) -> None:
    """Show what waits, runs, and needs a person."""
    lines = run(_counted(Settings.load(), load_consumer(app)))
    if as_text:
        click.echo(json.dumps({"phases": as_json(lines)}, indent=2))
        return
    table = Table("table", "phase", "waits in", box=None, pad_edge=False, header_style="bold")
    for heading in ("backlog", "oldest", "in progress", "escalated"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(
            line.table,
            line.phase or "(no phase)",
            line.ready or "",
            str(line.backlog),
            "" if line.oldest_s is None else age(line.oldest_s),
            str(line.in_progress),
            str(line.escalated),
        )
    console().print(table)
    parked = sum(line.parked for line in lines)
    if parked:
        click.echo(f"\nparked deliveries: {parked} (webhooks deliveries --status parked)")


async def _counted(settings: Settings, consumer: Consumer) -> list[PhaseStatus]:
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        async with transaction(connection) as tx:
            return await count(tx, consumer)


def age(seconds: float) -> str:
    """Return a span of time with two units at most: `3h 20m`."""
    units = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    left, parts = int(seconds), list[str]()
    for name, size in units:
        if left >= size:
            parts.append(f"{left // size}{name}")
            left %= size
    return " ".join(parts[:2]) or "0s"
