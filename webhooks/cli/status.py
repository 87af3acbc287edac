"""`webhooks status`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from webhooks.cli.app import app_option, console, examples, run
from webhooks.consumer import Consumer
from webhooks.db import transaction
from webhooks.loading import load_consumer
from webhooks.migrate import require_current
from webhooks.serve.database import connected
from webhooks.settings import Settings
from webhooks.status import PhaseStatus, as_json, processes
from webhooks.status import status as count


@click.command(epilog=examples("webhooks status", "webhooks status --json"))
@app_option
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def status(app: str, as_text: bool) -> None:
    """Show what waits, runs, and needs a person."""
    lines, living = run(_counted(Settings.load(), load_consumer(app)))
    if as_text:
        click.echo(json.dumps(as_json(lines, living), indent=2))
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
    wanting = sum(line.wanting for line in lines)
    if wanting:
        click.echo(f"\ndeliveries that wait for a process which handles them: {wanting}")
    if living:
        _show(living)


def _show(living: list[dict[str, Any]]) -> None:
    click.echo()
    table = Table("process", "app", "runs for", "at fault", box=None, pad_edge=False, header_style="bold")
    for one in living:
        since = (one["seen_at"] - one["started_at"]).total_seconds()
        table.add_row(one["id"], one["app"], age(since), ", ".join(sorted(one["degraded"])))
    console().print(table)
    for one in living:
        for name, reason in sorted(one["degraded"].items()):
            click.echo(f"\n{name} ({one['id']}): {reason}")


async def _counted(settings: Settings, consumer: Consumer) -> tuple[list[PhaseStatus], list[dict[str, Any]]]:
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        async with transaction(connection) as tx:
            return await count(tx, consumer), await processes(tx)


def age(seconds: float) -> str:
    """Return a span of time with two units at most: `3h 20m`."""
    units = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    left, parts = int(seconds), list[str]()
    for name, size in units:
        if left >= size:
            parts.append(f"{left // size}{name}")
            left %= size
    return " ".join(parts[:2]) or "0s"
