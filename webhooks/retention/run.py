"""One pruning: every kind in turn, batch by batch, each in a short transaction with a pause behind it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

import structlog
from psycopg.errors import DeadlockDetected, LockNotAvailable

from webhooks.consumer import Consumer
from webhooks.db import Transaction, database_time
from webhooks.pool import Pool
from webhooks.retention import deliveries, ended, records
from webhooks.retention.ages import KINDS, Ages, Before, Kind, told
from webhooks.retention.step import Line, Step, Walk
from webhooks.rows import gates_of
from webhooks.settings import Settings

log = structlog.get_logger(__name__)

Transact: TypeAlias = Callable[[], AbstractAsyncContextManager[Transaction]]
"""Opens one of our transactions: a pool's, or `transaction(connection)`."""

TRIES = 30
TRY_AGAIN_S = 1.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


@dataclass(slots=True)
class Report:
    """What was removed, or in a dry run what would be.

    Attributes:
        dry: whether nothing was touched.
        ages: by which it was decided.
        now: the database's time when it began.
        lines: by kind.
        left: old lines that were left alone, by the reason why.
        transactions: how many there were.
        longest_s: how long the longest of them took.
    """

    dry: bool
    ages: Ages
    now: datetime
    lines: dict[Kind, Line] = field(default_factory=lambda: dict.fromkeys(KINDS, Line()))
    left: Counter[str] = field(default_factory=Counter[str])
    transactions: int = 0
    longest_s: float = 0.0

    def add(self, step: Step, took_s: float) -> None:
        for kind, line in step.removed.items():
            self.lines[kind] = self.lines[kind].plus(line)
        self.left.update(step.left)
        self.transactions += 1
        self.longest_s = max(self.longest_s, took_s)


async def prune(
    transact: Transact,
    consumer: Consumer,
    ages: Ages,
    *,
    dry: bool = True,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Remove what is old enough, in batches that lock only what nobody else has locked.

    Nothing is waited for but a table that somebody has locked whole; that is tried again for half a minute, and then
    left for the next time. Two prunings at once do no harm. A dry run looks at the same lines and removes none.

    Args:
        transact: opens a transaction.
        consumer: whose gates say which rows are unfinished.
        ages: how long each kind is kept.
        dry: only count.
        progress: called after every batch with the report so far.

    Raises:
        psycopg.Error: the database refused something else, or went away; what was removed so far is removed.
    """
    async with transact() as tx:
        now = await database_time(tx)
    report = Report(dry, ages, now)
    for walk in _walks(consumer, Before.at(ages, now), dry=dry):
        await _walked(transact, walk, report, progress)
    return report


def _walks(consumer: Consumer, before: Before, *, dry: bool) -> Iterator[Walk]:
    gates = gates_of(consumer)
    yield deliveries.keys(before, dry=dry)
    yield deliveries.contents(before, dry=dry)
    yield ended.notifications(before, dry=dry)
    yield ended.runs(before, dry=dry)
    yield records.effects(gates, before, dry=dry)
    yield records.attempts(gates, before, dry=dry)


async def _walked(transact: Transact, walk: Walk, report: Report, progress: Callable[[Report], None]) -> None:
    loop = asyncio.get_running_loop()
    cursor, tries = None, 0
    while True:
        began = loop.time()
        try:
            async with transact() as tx:
                step = await walk(tx, cursor)
        except (LockNotAvailable, DeadlockDetected) as error:
            tries += 1
            if tries == TRIES:
                report.left[f"what could not be locked ({str(error).strip()}): prune again later"] += 1
                return
            await asyncio.sleep(TRY_AGAIN_S)
            continue
        took_s, tries = loop.time() - began, 0
        report.add(step, took_s)
        progress(report)
        if not step.more:
            return
        cursor = step.cursor
        if any(line.count for line in step.removed.values()) and not report.dry:
            # As long as the work took, so that at most half the time is spent on it.
            await asyncio.sleep(min(max(took_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))


async def scheduled(pool: Pool, consumer: Consumer, settings: Settings) -> None:
    """Prune once, as `serve` does on its schedule, and log what was removed."""
    report = await prune(pool.transaction, consumer, Ages.of(settings, consumer.sources), dry=False)
    counts = {str(kind): line.count for kind, line in report.lines.items() if line.count}
    if counts:
        log.info("pruned", **counts, transactions=report.transactions, longest_s=round(report.longest_s, 3))
    for reason, count in report.left.items():
        log.debug("left alone", what=reason, lines=count)


def as_json(report: Report) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "dry": report.dry,
        "now": report.now.isoformat(),
        "kinds": [
            {
                "kind": kind,
                "keep": [told(age) for age in report.ages.of_kind(kind)],
                "count": line.count,
                "bytes": line.bytes,
                "oldest": None if line.oldest is None else line.oldest.isoformat(),
            }
            for kind, line in report.lines.items()
        ],
        "keep_keys": {name: told(age) for name, age in sorted(report.ages.keys_of.items())},
        "left": dict(report.left),
        "notes": list(report.ages.notes),
        "transactions": report.transactions,
        "longest_s": round(report.longest_s, 4),
    }
