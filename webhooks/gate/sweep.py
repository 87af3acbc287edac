"""The sweep: rows that nobody works on any more become claimable again, or are escalated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg
import structlog
from psycopg.errors import LockNotAvailable

from webhooks.db.sqlstate import is_about_the_row
from webhooks.owned import Owned
from webhooks.pool import Pool
from webhooks.statements import KEY_TEXT, Sweep
from webhooks.stuck import MOST
from webhooks.taking import refuses, well

log = structlog.get_logger(__name__)

AT_ONCE = 100


async def sweep(pool: Pool, owned: Owned) -> int:
    """Free rows whose lease is over, give a lease to by-hand claims, escalate exhausted rows; return how many.

    A row that refuses holds up no other: a batch that fails because of a row is tried row by row, and the next batch
    leaves out what refused.

    Raises:
        psycopg.Error: the database refused the statement whatever the row, or went away.
    """
    backoff = pool.backoff
    params = {
        "first": backoff.first,
        "longest": backoff.longest,
        "factor": backoff.factor(random.random()),
        "lease": owned.lease,
    }
    moved: list[str] = []
    for each in owned.sweeps:
        moved += await _swept(pool, owned, each, params)
    await well(pool, owned, pool.stuck.went(owned.table, owned.phase.claimed, "freed", moved))
    return len(moved)


async def _swept(pool: Pool, owned: Owned, each: Sweep, params: Mapping[str, object]) -> list[str]:
    """Do one thing to all rows that need it, and return the keys of those that moved."""
    moved: list[str] = []
    while True:
        refusing = pool.stuck.left_out(owned.table, owned.phase.claimed, "freed")
        try:
            swept = await _run(pool, owned, each.batch, {**params, "refusing": refusing})
            page = len(swept)
        except psycopg.Error as error:
            if not is_about_the_row(error):
                raise
            swept, page = await _one_by_one(pool, owned, each, params, refusing)
        moved += swept
        if page < AT_ONCE or len(refusing) >= MOST:
            return moved


async def _one_by_one(
    pool: Pool, owned: Owned, each: Sweep, params: Mapping[str, object], refusing: list[str]
) -> tuple[list[str], int]:
    """Do it to each row of the next batch by itself; return the keys of those that moved, and how many rows there
    were, none where all of them are somebody else's just now."""
    async with pool.transaction() as tx:
        rows = await (await tx.execute(each.listed, {"refusing": refusing})).fetchall()
    moved: list[str] = []
    refused = 0
    for row in rows:
        try:
            moved += await _run(pool, owned, each.alone, {**params, **owned.key.params(owned.key.value(row))})
        except psycopg.Error as error:
            if not is_about_the_row(error):
                raise
            refused += 1
            await refuses(pool, owned, "freed", row[KEY_TEXT], error)
    return moved, len(rows) if moved or refused else 0


async def _run(pool: Pool, owned: Owned, statement: bytes, params: Mapping[str, object]) -> list[str]:
    swept: list[dict[str, Any]] = []
    with suppress(LockNotAvailable):
        async with pool.transaction() as tx:
            swept = await (await tx.execute(statement, params)).fetchall()
    moved = [row[KEY_TEXT] for row in swept]
    for key, row in zip(moved, swept, strict=True):
        log.warning("swept", row=f"{owned.table}:{key}", phase=owned.phase.claimed, status=row["status"])
    return moved
