"""Whether a process can write: its pulse finds out, drops what leads to a server of no use, and goes on by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from gates import backends, elsewhere, sql, until
from psycopg.sql import SQL, Identifier, Literal
from wire import pool_over_a_wire

from webhooks.db import pulse, transaction
from webhooks.db.connect import Connections
from webhooks.pool import Pool

REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON attempts FOR EACH ROW EXECUTE FUNCTION refuse();
"""
WRITE = "INSERT INTO attempts (table_name, key, phase, visit, attempt) VALUES ('t', 'k', 'p', 1, 1)"


@pytest.fixture(autouse=True)
def quick_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY_S", 0.1)
    monkeypatch.setattr(pulse, "SILENT_AFTER_S", 0.6)


@asynccontextmanager
async def read_only(url: str) -> AsyncIterator[None]:
    """The database takes no writes for the block, from connections made in it."""
    async with await elsewhere(url) as admin:
        name = Identifier(admin.info.dbname)
        await admin.execute(SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
        try:
            yield
        finally:
            await admin.execute("SET default_transaction_read_only = off")
            await admin.execute(SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))


async def beating(pool: Pool) -> None:
    """Wait until the pulse has a connection and an answer on it."""
    await until(lambda: pool.pulse._server)


async def answers(pool: Pool) -> bool:
    try:
        return await sql(pool, "SELECT 1 AS one") == [{"one": 1}]
    except psycopg.Error:
        return False


async def test_a_database_that_turned_read_only_is_away_until_it_takes_writes_again(
    pool: Pool, database_url: str
) -> None:
    await beating(pool)
    async with read_only(database_url):
        for pid in backends(database_url):
            await sql_elsewhere(database_url, f"SELECT pg_terminate_backend({pid})")
        await until(lambda: pool.pulse.away)
        assert "read-only" in str(pool.pulse.away)
        with pytest.raises(psycopg.Error, match="read-only"):
            await sql(pool, WRITE)
    await until(lambda: pool.pulse.away is None)
    await until(lambda: answers(pool))
    await sql(pool, WRITE)


async def test_every_connection_that_leads_to_a_server_that_only_reads_is_dropped(pool: Pool) -> None:
    await beating(pool)
    others = [await pool.database.connect() for _ in range(3)]
    connection = pool.pulse._connection
    assert connection is not None
    await connection.execute("SET default_transaction_read_only = on")  # as the server does to all sessions
    for other in others:
        with pytest.raises(psycopg.OperationalError):
            await other.execute("SELECT pg_sleep(20)")
        await other.close()
    await until(lambda: pool.pulse.away is None)
    await sql(pool, WRITE)


async def test_a_silent_database_is_away_and_whatever_waits_for_it_ends(database_url: str) -> None:
    async with pool_over_a_wire(database_url) as (pool, wire):
        await beating(pool)
        waiting = asyncio.create_task(sql(pool, "SELECT pg_sleep(60)"))
        await until(lambda: pool.connections.get_stats().get("requests_num"))
        wire.passing.clear()
        with pytest.raises(psycopg.OperationalError):
            await waiting
        assert pool.pulse.away
        wire.passing.set()
        await until(lambda: pool.pulse.away is None)
        await until(lambda: answers(pool))


async def test_a_statement_lives_as_long_as_the_server_answers_others(pool: Pool) -> None:
    await beating(pool)
    assert await sql(pool, "SELECT 1 AS one FROM pg_sleep(1.3)") == [{"one": 1}]
    assert pool.pulse.away is None


async def test_where_others_are_answered_one_unanswered_question_is_no_silence(database_url: str) -> None:
    async with pool_over_a_wire(database_url) as (pool, wire):
        await beating(pool)
        wire.at("pg_postmaster_start_time", "hold")
        async with asyncio.timeout(30):
            await wire.held.wait()
        held_until = time.monotonic() + 1.3
        while time.monotonic() < held_until:
            await sql(pool, "SELECT 1")
            await asyncio.sleep(0.05)
            assert pool.pulse.away is None
        wire.freed.set()


async def test_an_event_loop_that_was_blocked_is_no_silence_of_the_server(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await beating(pool)
    dropped = 0

    def drop(self: Connections, *, but: str | None = None) -> None:
        nonlocal dropped
        dropped += 1

    monkeypatch.setattr(Connections, "drop", drop)
    for _ in range(3):
        await asyncio.sleep(0.11)
        time.sleep(0.7)  # noqa: ASYNC251 - that is what it is about
    assert dropped == 0


async def test_after_another_start_of_the_server_what_led_to_the_one_before_is_dropped(pool: Pool) -> None:
    await beating(pool)
    old, new = [await pool.database.connect() for _ in range(2)]
    pool.database._open[old] = pool.pulse._server = "the start before"
    with pytest.raises(psycopg.OperationalError):
        await old.execute("SELECT pg_sleep(20)")
    assert (await new.execute("SELECT 1")).rowcount == 1
    assert pool.pulse.away is None
    for connection in (old, new):
        await connection.close()


async def test_the_loss_of_its_own_connection_alone_drops_no_other(pool: Pool, database_url: str) -> None:
    await beating(pool)
    connection = pool.pulse._connection
    assert connection is not None
    other = await pool.database.connect()
    await sql_elsewhere(database_url, f"SELECT pg_terminate_backend({connection.info.backend_pid})")
    await until(lambda: pool.pulse._connection not in (None, connection))
    assert (await other.execute("SELECT 1")).rowcount == 1
    await other.close()
    assert pool.pulse.away is None


async def test_a_full_disk_is_away_until_a_write_is_taken_again(pool: Pool, database_url: str) -> None:
    await beating(pool)
    await sql_elsewhere(database_url, REFUSE)
    used = await pool.database.connect()
    with pytest.raises(psycopg.errors.DiskFull):
        await sql(pool, WRITE)
    await until(lambda: pool.pulse.away)
    assert "no space left" in str(pool.pulse.away)
    assert pool.pulse.refused == pool.pulse.away
    assert await answers(pool)  # it can be read all the same
    await sql_elsewhere(database_url, "DROP TRIGGER refuse ON attempts")
    await until(lambda: pool.pulse.away is None)
    await sql(pool, WRITE)
    assert await sql(pool, "SELECT count(*) AS lines FROM attempts") == [{"lines": 1}]
    await used.close()


@pytest.mark.parametrize(
    ("code", "closed"),
    [("P0001", False), ("23505", False), ("55P03", False), ("57014", False)]
    + [(code, True) for code in ("25006", "53100", "53200", "57P01", "57P03", "58030", "3D000", "08006")],
)
async def test_a_connection_is_given_up_when_it_was_the_server_that_refused(
    pool: Pool, code: str, closed: bool
) -> None:
    async with pool.connection() as connection:
        with pytest.raises(psycopg.Error) as refused:
            async with transaction(connection) as tx:
                await tx.execute(SQL("DO $$ BEGIN RAISE SQLSTATE {}; END $$").format(Literal(code)))
        assert refused.value.sqlstate == code
        assert connection.closed == closed
    assert await sql(pool, "SELECT 1 AS one") == [{"one": 1}]


async def test_a_transaction_that_was_made_read_only_says_nothing_about_the_server(pool: Pool) -> None:
    await beating(pool)
    for _ in range(3):
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            async with pool.transaction() as tx:
                await tx.execute("SET TRANSACTION READ ONLY")
                await tx.execute(WRITE)
        await asyncio.sleep(0.15)
        assert pool.pulse.away is None


async def test_a_pool_that_is_closed_leaves_no_connection(database_url: str) -> None:
    async with pool_over_a_wire(database_url) as (pool, wire):
        await beating(pool)
        wire.passing.clear()
        await until(lambda: pool.pulse.away)
        wire.passing.set()
    await until(lambda: not backends(database_url))


async def sql_elsewhere(url: str, text: str) -> None:
    async with await elsewhere(url) as connection:
        await connection.execute(text.encode())
