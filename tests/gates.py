"""What the tests of the gate layer share: a gate over `patch_sessions`, rows in it, and a look at what was written."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from pydantic import BaseModel

from webhooks.gate import Gate
from webhooks.pool import Pool

Rows = list[dict[str, Any]]

ROOT = Path(__file__).parent.parent
# For processes of our own: they find the library and these helpers wherever they are started.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}


class Session(BaseModel):
    sc_id: int
    title: str
    patch: str | None = None


def a_gate(*, lease: timedelta | None = None, timeout: timedelta = timedelta(minutes=15)) -> Gate[Session]:
    """A gate with two phases in a row, the second with three attempts."""
    gate = Gate("patch_sessions", key="sc_id", row=Session)
    gate.phase("received", claimed="clarifying", done=("clarified", "asked"))
    gate.phase("clarified", claimed="drafting", done="drafted", lease=lease, timeout=timeout, max_attempts=3)
    return gate


TICKETS = """
CREATE TABLE tickets (
    company text, number bigint, agent text, PRIMARY KEY (company, number), LIKE gated INCLUDING ALL
) WITH (fillfactor = 80);
CREATE INDEX tickets_open ON tickets (not_before, company, number) WHERE status = 'open';
CREATE INDEX tickets_claimed ON tickets (company, number) WHERE status = 'claimed';
"""


def tickets_gate(*, lease: timedelta | None = None) -> Gate[dict[str, Any]]:
    """A gate over a table with two key columns, one of them text."""
    gate = Gate("tickets", key="company, number")
    gate.phase("open", claimed="claimed", done="resolved", lease=lease, max_attempts=2)
    return gate


async def make_tickets(pool: Pool) -> None:
    for statement in TICKETS.split(";"):
        await sql(pool, statement)


async def opened(pool: Pool, gate: Gate[Any], *keys: int, to: str = "clarified") -> None:
    """Rows that wait to be drafted."""
    async with pool.transaction() as tx:
        for key in keys:
            assert await gate.open(tx, to=to, sc_id=key, title=f"story {key}")


async def sql(pool: Pool, text: Any, **params: object) -> Rows:
    """Run one statement in a transaction of its own and return its rows."""
    async with pool.transaction() as tx:
        cursor = await tx.execute(text, params)
        return await cursor.fetchall() if cursor.description else []


async def row_of(pool: Pool, key: int) -> dict[str, Any]:
    [row] = await sql(pool, "SELECT * FROM patch_sessions WHERE sc_id = %(key)s", key=key)
    return row


async def status_of(pool: Pool, key: int) -> str:
    return str((await row_of(pool, key))["status"])


async def attempts_of(pool: Pool, key: object) -> Rows:
    return await sql(pool, "SELECT * FROM attempts WHERE key = %(key)s ORDER BY claimed_at, claim_seq", key=str(key))


async def outcomes_of(pool: Pool, key: object) -> list[str | None]:
    return [attempt["outcome"] for attempt in await attempts_of(pool, key)]


async def expire(pool: Pool, key: int) -> None:
    """The lease is over, without anybody having to wait for it."""
    await sql(
        pool, "UPDATE patch_sessions SET lease_until = now() - interval '1 second' WHERE sc_id = %(key)s", key=key
    )


async def due(pool: Pool, key: int) -> None:
    """The back-off is over."""
    await sql(pool, "UPDATE patch_sessions SET not_before = now() WHERE sc_id = %(key)s", key=key)


async def until(condition: Callable[[], Awaitable[Any]] | Callable[[], Any], within_s: float = 30) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


async def until_blocked(pool: Pool, count: int = 1) -> None:
    """Wait until some statements of this database wait for a lock."""

    async def blocked() -> bool:
        rows = await sql(
            pool,
            "SELECT count(*) AS waiting FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        return int(rows[0]["waiting"]) >= count

    await until(blocked)


async def elsewhere(url: str) -> AsyncConnection[dict[str, Any]]:
    """A connection that no pool knows of; the test closes it."""
    return await AsyncConnection[dict[str, Any]].connect(url, autocommit=True, row_factory=dict_row)


def backends(url: str, application: str = "webhooks") -> list[int]:
    """The pids of this database's connections that carry a name."""
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
            " AND pid <> pg_backend_pid()",
            (application,),
        ).fetchall()
    return [row[0] for row in rows]
