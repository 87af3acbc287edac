"""`webhooks prune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from webhooks.cli.app import app_option, console, examples, printable, run
from webhooks.consumer import Consumer
from webhooks.db import transaction
from webhooks.loading import load_consumer
from webhooks.migrate import require_current
from webhooks.retention import KINDS, Ages, Kind, Report, as_json
from webhooks.retention import prune as prune_
from webhooks.retention.ages import told
from webhooks.serve.database import connected
from webhooks.settings import Settings

NAMES: dict[Kind, str] = {
    "keys": "keys (whole deliveries)",
    "notifications": "notifications that were sent",
    "runs": "heartbeat runs",
}
AGE_WITH_ATTEMPTS: tuple[Kind, ...] = ("notifications", "runs")
CHOICES = [kind for kind in KINDS if kind not in AGE_WITH_ATTEMPTS]


@click.command(
    epilog=examples(
        "webhooks prune",
        "webhooks prune --yes",
        "WEBHOOKS_KEEP_BODIES=7d webhooks prune --only bodies --yes",
    )
)
@app_option
@click.option("--yes", is_flag=True, help="Do it; without this nothing is removed.")
@click.option(
    "--only", "kinds", multiple=True, type=click.Choice(CHOICES), help="Only this kind; may be given several times."
)
@click.option("--json", "as_text", is_flag=True, help="As JSON, for programs.")
def prune(app: str, yes: bool, kinds: tuple[Kind, ...], as_text: bool) -> None:
    """Remove what has ended and is old, or say what would be removed.

    How long each kind is kept is set by WEBHOOKS_KEEP_BODIES, _HEADERS, _KEYS, _ATTEMPTS and _EFFECTS. Unfinished and
    escalated work is never touched, and a key stays for as long as its provider may send the delivery again. It works
    in small batches beside everything else, may be stopped at any time, and goes on where it is started again.
    """
    settings, consumer = Settings.load(), load_consumer(app)
    ages = Ages.of(settings, consumer.sources)
    if kinds:
        ages = replace(ages.only(kinds), notes=ages.notes if "keys" in kinds else ())
    with _progress(dry=not yes) as progress:
        report = run(_pruned(settings, consumer, ages, yes=yes, progress=progress))
    if kinds:
        asked = {*kinds, *(AGE_WITH_ATTEMPTS if "attempts" in kinds else ())}
        report.lines = {kind: line for kind, line in report.lines.items() if kind in asked}
    if as_text:
        told_of = as_json(report)
        if kinds and "keys" not in kinds:
            del told_of["keep_keys"]
        click.echo(json.dumps(told_of, indent=2))
    else:
        _print(report)


async def _pruned(
    settings: Settings, consumer: Consumer, ages: Ages, *, yes: bool, progress: Callable[[Report], None]
) -> Report:
    async with connected(settings) as connection:
        await require_current(connection, schema=settings.schema_name)
        return await prune_(lambda: transaction(connection), consumer, ages, dry=not yes, progress=progress)


@contextmanager
def _progress(*, dry: bool) -> Generator[Callable[[Report], None]]:
    """Show on a terminal's standard error how far it is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    shown = Console(stderr=True, highlight=False)
    with Progress(*columns, console=shown, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("counting" if dry else "removing", total=None)

        def update(report: Report) -> None:
            counts = ", ".join(f"{kind} {line.count:,}" for kind, line in report.lines.items() if line.count)
            bar.update(task, description=f"{'counting' if dry else 'removing'}  {counts or 'nothing yet'}")

        yield update


def _print(report: Report) -> None:
    table = Table("kind", "kept", "would go" if report.dry else "removed", "bytes", "oldest", box=None, pad_edge=False)
    for column in table.columns[2:4]:
        column.justify = "right"
    for kind, line in report.lines.items():
        kept = dict.fromkeys(told(age) for age in report.ages.of_kind(kind))
        oldest = "" if line.oldest is None else _time(line.oldest)
        table.add_row(NAMES.get(kind, kind), ", ".join(kept), f"{line.count:,}", _size(line.bytes), oldest)
    console().print(table)
    for reason, count in report.left.items():
        click.echo(printable(f"left alone: {count:,} {reason}"))
    for note in report.ages.notes:
        click.echo(f"note: {note}")
    if report.dry:
        some = any(line.count for line in report.lines.values())
        click.echo("nothing was removed" + ("; do it with --yes" if some else ", and nothing is old enough"))
    else:
        click.echo(f"{report.transactions} transactions, the longest {report.longest_s:.3f} s")


def _size(bytes: int) -> str:
    size = float(bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _time(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")
