"""`webhooks heartbeat`: one run, or one every so often."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import click
import psycopg
import structlog
from rich.console import Console
from rich.table import Table

from handlers.commands import run as run_command
from handlers.heartbeat import Unknown, Unusable, begin
from handlers.heartbeat_run import Run, Wanted
from handlers.tally import Tally, total
from webhooks import Pool

log = structlog.get_logger(__name__)

UNITS_S = {"s": 1, "m": 60, "h": 3600}
LONGEST_INTERVAL_S = 7 * 86_400


def _read_interval(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", value)
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds <= LONGEST_INTERVAL_S:
        raise click.BadParameter(f"{value!r}: write it as 30s, 5m or 1h", ctx, param)
    return timedelta(seconds=seconds)


@click.command(
    epilog="\b\nExamples:\n  webhooks heartbeat acme\n  webhooks heartbeat acme --agent coder --limit 5\n"
    "  webhooks heartbeat acme --every 30s"
)
@click.argument("company")
@click.option("--agent", metavar="ID", help="Only this agent's queue.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), help="How many issues to claim at most.")
@click.option(
    "--every", callback=_read_interval, metavar="INTERVAL", help="Run again so often, until stopped: 30s, 5m, 1h."
)
def heartbeat(company: str, agent: str | None, limit: int | None, every: timedelta | None) -> None:
    """Let each agent of COMPANY work its queue of open issues until it is empty.

    Any number of runs may overlap, here and elsewhere: no two of them work on one issue. Stopped, a run gives back what
    it was working on, and that is not counted as an attempt.
    """
    wanted = Wanted(company, agent, limit)
    try:
        run_command(_once(wanted) if every is None else _repeatedly(wanted, every))
    except (Unknown, Unusable) as error:
        raise click.ClickException(str(error)) from None
    except click.exceptions.Exit:
        if every is None:  # a schedule has no other end than to be stopped
            raise


async def _once(wanted: Wanted) -> None:
    async with Pool.open() as pool:
        await _begin_and_work(pool, wanted)


async def _repeatedly(wanted: Wanted, every: timedelta) -> None:
    """Start a run every so often, whether or not the one before has ended."""
    running: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        running.add(task)
        task.add_done_callback(running.discard)

    async with Pool.open() as pool:
        first = await begin(pool, wanted)  # a name that does not exist ends the command here
        try:
            start(_unattended(_work(first)))
            while True:
                await asyncio.sleep(every.total_seconds())
                start(_unattended(_begin_and_work(pool, wanted)))
        finally:
            stopped = list(running)
            for task in stopped:
                task.cancel()
            await asyncio.gather(*stopped, return_exceptions=True)


async def _begin_and_work(pool: Pool, wanted: Wanted) -> None:
    await _work(await begin(pool, wanted))


async def _unattended(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except (psycopg.Error, Unknown, Unusable) as error:
        log.error("a heartbeat failed, the next one comes", error=str(error).strip())


async def _work(run: Run) -> None:
    try:
        await run.work()
    finally:  # what was done is shown, too, of a run that was stopped
        for problem in run.problems:
            click.echo(f"note: {problem}", err=True)
        _print(run)


def _print(run: Run) -> None:
    table = Table("agent", box=None, pad_edge=False, header_style="bold", title=f"run {run.id}", title_justify="left")
    for heading in Tally().counts():
        table.add_column(heading, justify="right")
    for name, tally in [*run.tallies.items(), ("total", total(run.tallies.values()))]:
        table.add_row(name, *map(str, tally.counts().values()))
    Console(highlight=False, markup=False, emoji=False).print(table)
