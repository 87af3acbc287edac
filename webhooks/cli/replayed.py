"""How `replay` and `export` show what they would do, what they are doing, and what they did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from webhooks.cli.app import console, printable
from webhooks.cli.asking import time_of
from webhooks.replay import Plan, Report, Result, Weighed
from webhooks.selection import Group

MOST_GROUPS = 30
MOST_CAUSES = 20
SAID: Mapping[Result, str] = {
    "again": "run again",
    "due": "unfinished, made due now",
    "new": "received as new",
    "accepted": "accepted",
    "rearmed": "here already, armed again",
    "duplicate": "duplicate",
    "answered": "a test of the URL, not stored",
    "refused": "refused",
    "failed": "failed",
    "left_alone": "being applied, or run again by somebody else, at this moment: left alone",
    "pruned": "pruned, cannot be replayed",
}
BAD = frozenset({"refused", "failed", "left_alone", "pruned"})


def would(group: Group, *, how: str, to: str | None) -> str:
    """Say what would become of some deliveries of the inbox."""
    if group.pruned:
        return SAID["pruned"]
    if to is not None:
        return f"sent to {to}"
    if how == "new":
        return "a new delivery"
    if group.disposition == "applying":
        return "being applied now, left alone"
    return "made due now" if group.disposition in ("received", "parked") else "runs again"


def print_plan(plan: Plan, fate: Callable[[Group], str]) -> None:
    """Print a selection of the inbox, counted, with what would become of it."""
    table = Table("source", "event", "status", "count", "what would happen", box=None, pad_edge=False)
    table.columns[3].justify = "right"
    for group in plan.groups[:MOST_GROUPS]:
        unknown = "(not known yet)" if group.disposition in ("received", "applying", "parked") else "(not known)"
        event = printable(group.event or unknown)
        table.add_row(group.source, _short(event), group.disposition, f"{group.count:,}", fate(group))
    if plan.groups:
        console().print(table)
    _rest(len(plan.groups) - MOST_GROUPS)
    if plan.total > len(plan.groups):
        click.echo("\nthe first of them")
        for found in plan.sample:
            when = time_of(found.received_at)
            click.echo(printable(f"  {found.id}  {when}  {found.source}  {_short(found.event or '')}"))
    if plan.unreadable:
        click.echo(f"\n{plan.unreadable:,} bodies could not be read, so that --where-json leaves them out")
    if plan.left_out:
        click.echo(
            f"\n{plan.left_out:,} events that were split off fit as well: --as same runs them, --as new repeats whole "
            "requests only"
        )


def print_weighed(weighed: Weighed, to: str | None) -> None:
    """Print the deliveries of a file, counted, with what would become of them."""
    table = Table("source", "event", "count", "what would happen", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    fates = [fate for fate in weighed.fates if fate.result != "failed"]
    for fate in fates[:MOST_GROUPS]:
        said = f"sent to {to}" if to is not None and fate.result == "accepted" else SAID[fate.result]
        cause = f": {fate.cause}" if fate.cause else ""
        colour = "red" if fate.result in BAD else ""
        told = Text(printable(f"{said}{cause}"), colour)
        table.add_row(printable(fate.source), _short(printable(fate.event or "")), f"{fate.count:,}", told)
    if fates:
        console().print(table)
    _rest(len(fates) - MOST_GROUPS)
    if weighed.broken:
        click.echo(f"\n{len(weighed.broken):,} cannot be read, and a replay ends at the first")
        for why in weighed.broken[:MOST_CAUSES]:
            click.echo(printable(f"  {why}"))
        _rest(len(weighed.broken) - MOST_CAUSES)
    if weighed.total > len(weighed.fates):
        click.echo("\nthe first of them")
        for place, sender, says in weighed.sample:
            click.echo(printable(f"  {place}  {sender}  {_short(says or '')}"))


def print_report(report: Report) -> None:
    """Print what a replay did."""
    table = Table("deliveries", "what became of them", box=None, pad_edge=False, show_header=False)
    table.columns[0].justify = "right"
    for result, said in SAID.items():
        if count := report.counts.get(result):
            table.add_row(f"{count:,}", Text(said, "red" if result in BAD else ""))
    if report.counts:
        console().print(table)
    for cause, count in list(report.causes.items())[:MOST_CAUSES]:
        click.echo(printable(f"  {count:,} x {cause}"))
    if len(report.causes) > MOST_CAUSES:
        click.echo(f"  … {len(report.causes) - MOST_CAUSES} more causes: --json")
    if report.signed:
        click.echo(f"{report.signed:,} signed with the secret here")
    if not report.total and report.stopped is None:
        click.echo("nothing to do")


@contextmanager
def reporting(total: int | None) -> Generator[Callable[[Report], None]]:
    """Show on a terminal's standard error how far a replay is."""
    with _bar(total) as bar:
        task = bar.add_task("replaying", total=total)

        def update(report: Report) -> None:
            bad = sum(number for result, number in report.counts.items() if result in BAD)
            bar.update(task, completed=report.total, description=f"replaying{f', {bad:,} not done' if bad else ''}")

        yield update


@contextmanager
def looking(what: str, total: int | None = None) -> Generator[Callable[[int], None]]:
    """Show on a terminal's standard error how many deliveries were looked at."""
    with _bar(total) as bar:
        task = bar.add_task(what, total=total)
        yield lambda seen: bar.update(task, completed=seen)


def _bar(total: int | None) -> Progress:
    shown = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    drawn = columns if total is None else (*columns[:2], BarColumn(), *columns[2:])
    return Progress(*drawn, console=shown, transient=True, disable=not sys.stderr.isatty())


def _rest(count: int) -> None:
    if count > 0:
        click.echo(f"… {count} more lines: --json")


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
