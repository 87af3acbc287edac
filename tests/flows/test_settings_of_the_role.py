"""Whatever the role's, the database's or the server's settings are, a delivery is stored, applied and worked on, and
values are read as they were written; what cannot be had is refused in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from consumers import from_shortcut, quick, stack, stories
from gates import elsewhere, until
from psycopg.sql import SQL, Identifier, Literal

from webhooks import Claim, Consumer, Done, Event, Gate, Shortcut, Transaction
from webhooks.db.connect import Connections
from webhooks.errors import ConfigurationError
from webhooks.migrate import migrate, require_current
from webhooks.serve.database import Database, prepared
from webhooks.settings import Settings

SETTINGS = [
    ("DateStyle", "German, DMY"),
    ("DateStyle", "Postgres"),
    ("IntervalStyle", "iso_8601"),
    ("IntervalStyle", "sql_standard"),
    ("TimeZone", "America/St_Johns"),
    ("client_encoding", "LATIN1"),
    ("client_encoding", "SQL_ASCII"),
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_deferrable", "on"),
    ("statement_timeout", "120ms"),
    ("lock_timeout", "1ms"),
    ("idle_in_transaction_session_timeout", "120ms"),
    ("transaction_timeout", "120ms"),
    ("idle_session_timeout", "300ms"),
    ("extra_float_digits", "0"),
    ("bytea_output", "escape"),
    ("array_nulls", "off"),
    ("quote_all_identifiers", "on"),
    ("standard_conforming_strings", "off"),
    ("search_path", "pg_catalog, public"),
]
VALUES = """
SELECT interval '1 day 02:03:04.5' AS span, 0.1::float8 + 0.2::float8 AS number, 'žluť'::text AS text,
    decode('00ff5c', 'hex') AS bytes, timestamptz '2026-02-03 04:05:06+00' AS moment
"""


def sleepy(seen: list[Any]) -> Consumer:
    """A handler and a phase that take longer than the limits set above, and look at values."""
    shortcut, sessions = Shortcut(), Gate("patch_sessions", key="sc_id")

    @shortcut.on("story.update")
    async def open_session(event: Event, tx: Transaction) -> None:
        await tx.execute("SELECT pg_sleep(0.2)")
        await asyncio.sleep(0.2)
        await sessions.open(tx, sc_id=event.data["story_id"], title=event.data["name"])

    async def call() -> str:
        return "žluť ☂"

    @sessions.phase("received", claimed="clarifying", done="clarified")
    async def clarify(session: dict[str, Any], claim: Claim) -> Done:
        seen.append(await claim.once("call", call))
        async with claim.transaction() as tx:
            await tx.execute("SELECT pg_sleep(0.2)")
            seen.append(await (await tx.execute(VALUES)).fetchone())
            return await tx.done(patch=session["title"])

    return Consumer(gates=[sessions], sources=[shortcut])


@asynccontextmanager
async def with_setting(url: str, name: str, value: str) -> AsyncIterator[None]:
    async with await elsewhere(url) as admin:
        if not (await admin.execute("SELECT FROM pg_settings WHERE lower(name) = lower(%s)", (name,))).rowcount:
            pytest.skip(f"this server has no {name}")
        database = Identifier(admin.info.dbname)
        values = SQL(", ").join(map(Literal, value.split(", "))) if name == "search_path" else Literal(value)
        await admin.execute(SQL("ALTER DATABASE {} SET {} = {}").format(database, Identifier(name), values))
    yield


async def fresh(url: str) -> psycopg.AsyncConnection[Any]:
    return await Connections(url).connect()


@pytest.mark.parametrize(("name", "value"), SETTINGS)
async def test_a_delivery_becomes_work_whatever_a_setting_is(database_url: str, name: str, value: str) -> None:
    seen: list[Any] = []
    consumer = sleepy(seen)
    async with with_setting(database_url, name, value):
        async with await fresh(database_url) as connection:
            assert await migrate(connection) == []
        await prepared(Database(database_url), Settings(), consumer)
        async with stack(database_url, consumer, settings=quick()) as running:
            title = "Grüße ☂ žluť"
            request = from_shortcut(stories(1, id="one", name=title))
            assert (await running.send(request)).status_code == 202

            async def done() -> bool:
                return bool(await running.sql("SELECT sc_id FROM patch_sessions WHERE status = 'clarified'"))

            await until(done)
            [attempt] = await running.sql("SELECT attempt, outcome, error FROM attempts WHERE phase = 'applying'")
            assert attempt == {"attempt": 1, "outcome": "done", "error": None}
            [row] = await running.sql("SELECT patch FROM patch_sessions")
    assert row == {"patch": title}
    assert seen[0] == "žluť ☂"
    values = seen[1]
    assert values["span"] == timedelta(days=1, hours=2, minutes=3, seconds=4.5)
    assert values["number"] == 0.1 + 0.2
    assert values["bytes"] == b"\x00\xff\x5c"
    assert values["text"] == "žluť"
    assert values["moment"].isoformat() == "2026-02-03T04:05:06+00:00"


async def test_tables_that_the_search_path_does_not_lead_to_are_named_and_not_made_a_second_time(
    database_url: str,
) -> None:
    async with await elsewhere(database_url) as admin:
        await admin.execute("CREATE SCHEMA app")
    async with with_setting(database_url, "search_path", "app"), await fresh(database_url) as connection:
        for refuse in (migrate, require_current):
            with pytest.raises(ConfigurationError, match=r"in the schema public, .*\(app\) .* WEBHOOKS_SCHEMA=public"):
                await refuse(connection)
        assert await migrate(connection, schema="app")  # unless that is what is asked for


async def test_what_is_new_in_the_schema_goes_to_where_the_rest_is(database_url: str) -> None:
    async with await elsewhere(database_url) as admin:
        await admin.execute("CREATE SCHEMA app")
        await admin.execute("UPDATE webhooks_schema SET section = section - 1000 WHERE section > 1")
    sql = "-- section 1: one\n-- section 2: two\nCREATE TABLE something_new ();"
    async with with_setting(database_url, "search_path", "app, public"), await fresh(database_url) as connection:
        assert await migrate(connection, sql=sql) == [2]
        found = await connection.execute("SELECT to_regclass('public.something_new') AS it")
        assert await found.fetchone() == {"it": "something_new"}


async def test_a_gated_table_that_the_search_path_does_not_lead_to_is_named(database_url: str) -> None:
    async with await elsewhere(database_url) as admin:
        await admin.execute("CREATE SCHEMA app")
        await admin.execute("ALTER TABLE patch_sessions SET SCHEMA app")
    with pytest.raises(ConfigurationError, match=r"patch_sessions is not found.* in the schema app: .*search_path"):
        await prepared(Database(database_url), Settings(), sleepy([]))
    async with with_setting(database_url, "search_path", "public, app"):
        await prepared(Database(database_url), Settings(), sleepy([]))
