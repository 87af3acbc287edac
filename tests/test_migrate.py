"""Migrations on a real database: once, all or nothing, and by two at a time."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier

from webhooks.errors import ConfigurationError, SchemaBehind
from webhooks.migrate import behind, migrate, require_current, schema_sql, sections

FIRST = """\
-- What this schema is for.

-- section 1: letters

CREATE TABLE letters (letter text PRIMARY KEY CHECK (letter NOT LIKE '%1%'));
INSERT INTO letters VALUES ('a'), ('b');
"""
SECOND = FIRST + "\n-- section 2: more letters\n\nINSERT INTO letters VALUES ('c');\n"
BROKEN = (
    SECOND + "\n-- section 3: a mistake\n\nINSERT INTO letters VALUES ('d');\nSELECT no_such_column FROM letters;\n"
)

ROOT = Path(__file__).parent.parent
MIGRATE = """
import asyncio, sys
import psycopg
from webhooks.migrate import migrate

async def main() -> None:
    async with await psycopg.AsyncConnection.connect(sys.argv[1], autocommit=True) as connection:
        print(await migrate(connection, sql=sys.argv[2]))

asyncio.run(main())
"""


@pytest.fixture
def empty_url(database_url: str) -> str:
    """A database without the library's tables: the test's own, with its schema emptied."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return database_url


@pytest.fixture
async def connection(empty_url: str) -> AsyncIterator[AsyncConnection]:
    async with await AsyncConnection.connect(empty_url, autocommit=True) as opened:
        yield opened


async def letters(connection: AsyncConnection, schema: str = "public") -> str:
    query = SQL("SELECT string_agg(letter, '' ORDER BY letter) FROM {}").format(Identifier(schema, "letters"))
    [(found,)] = await (await connection.execute(query)).fetchall()
    return str(found)


async def recorded(connection: AsyncConnection) -> list[tuple[object, ...]]:
    return await (await connection.execute("SELECT section, title FROM webhooks_schema ORDER BY section")).fetchall()


async def test_a_section_is_applied_once(connection: AsyncConnection) -> None:
    assert await migrate(connection, sql=FIRST) == [1]
    assert await migrate(connection, sql=FIRST) == []
    assert await letters(connection) == "ab"
    assert await recorded(connection) == [(1, "letters")]


async def test_only_the_sections_above_the_recorded_one_are_applied(connection: AsyncConnection) -> None:
    await migrate(connection, sql=FIRST)

    assert await migrate(connection, sql=SECOND) == [2]
    assert await letters(connection) == "abc"
    assert await recorded(connection) == [(1, "letters"), (2, "more letters")]


async def test_a_section_that_fails_leaves_nothing_behind_and_is_named(connection: AsyncConnection) -> None:
    await migrate(connection, sql=FIRST)

    with pytest.raises(psycopg.errors.UndefinedColumn) as raised:
        await migrate(connection, sql=BROKEN)
    assert raised.value.__notes__ == ["in section 3 of schema.sql: a mistake"]
    assert await letters(connection) == "ab"
    assert await recorded(connection) == [(1, "letters")]


async def test_a_first_migration_that_fails_leaves_not_even_its_record(connection: AsyncConnection) -> None:
    with pytest.raises(psycopg.errors.UndefinedColumn):
        await migrate(connection, sql=BROKEN)

    [(record,)] = await (await connection.execute("SELECT to_regclass('webhooks_schema')")).fetchall()
    assert record is None
    assert await migrate(connection, sql=SECOND) == [1, 2]


async def test_a_database_newer_than_the_code_is_left_as_it_is(connection: AsyncConnection) -> None:
    await migrate(connection, sql=SECOND)

    assert await migrate(connection, sql=FIRST) == []
    assert await behind(connection, sql=FIRST) == []
    await require_current(connection, sql=FIRST)


async def test_two_processes_that_migrate_at_once_apply_each_section_once(
    connection: AsyncConnection, empty_url: str
) -> None:
    # Both wait for the lock held here, as `pg_locks` shows; then they are let go together.
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(7742301953811266)")
        command = (sys.executable, "-c", MIGRATE, empty_url, SECOND)
        started = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE) for _ in range(2)]
        waiting = 0
        while waiting < 2 and all(process.returncode is None for process in started):
            cursor = await connection.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            [(waiting,)] = await cursor.fetchall()
        assert waiting == 2
    printed = [(await process.communicate())[0].strip() for process in started]

    assert sorted(printed) == [b"[1, 2]", b"[]"]
    assert await letters(connection) == "abc"


async def test_many_connections_that_migrate_at_once_apply_each_section_once(
    connection: AsyncConnection, empty_url: str
) -> None:
    async def one() -> list[int]:
        async with await AsyncConnection.connect(empty_url, autocommit=True) as own:
            return await migrate(own, sql=SECOND)

    applied = await asyncio.gather(*(one() for _ in range(8)))

    assert sorted(applied) == [[]] * 7 + [[1, 2]]
    assert await letters(connection) == "abc"


async def test_the_lock_ends_with_the_transaction_and_nothing_stays_set(connection: AsyncConnection) -> None:
    await migrate(connection, sql=FIRST, schema="tenant")

    held = await (await connection.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")).fetchall()
    names = ("search_path", "lock_timeout", "statement_timeout")
    cursor = await connection.execute("SELECT current_setting(name) FROM unnest(%s::text[]) AS name", [list(names)])
    settings = await cursor.fetchall()
    assert held == []
    assert settings == [('"$user", public',), ("0",), ("0",)]


async def test_the_time_outs_and_isolation_a_role_has_do_not_matter(connection: AsyncConnection) -> None:
    await connection.execute("SET default_transaction_isolation = 'serializable'")
    await connection.execute("SET statement_timeout = '50ms'")
    await connection.execute("SET lock_timeout = '50ms'")

    assert await migrate(connection, sql=FIRST.replace("INSERT", "SELECT pg_sleep(0.1); INSERT")) == [1]


async def test_a_schema_of_its_own_is_made_and_used(connection: AsyncConnection) -> None:
    assert await migrate(connection, sql=FIRST, schema="tenant") == [1]
    assert await migrate(connection, sql=SECOND, schema="other") == [1, 2]

    assert await letters(connection, "tenant") == "ab"
    assert await letters(connection, "other") == "abc"
    assert [section.number for section in await behind(connection, sql=SECOND, schema="tenant")] == [2]
    assert await behind(connection, sql=SECOND, schema="other") == []
    assert [section.number for section in await behind(connection, sql=SECOND)] == [1, 2]


async def test_a_schema_that_exists_is_used_by_a_role_that_may_not_make_one(
    connection: AsyncConnection, empty_url: str
) -> None:
    role = f"plain_{psycopg.conninfo.conninfo_to_dict(empty_url)['dbname']}"
    await connection.execute(SQL("CREATE ROLE {}").format(Identifier(role)))
    try:
        await connection.execute(SQL("CREATE SCHEMA tenant AUTHORIZATION {}").format(Identifier(role)))
        await connection.execute(SQL("SET ROLE {}").format(Identifier(role)))

        assert await migrate(connection, sql=FIRST, schema="tenant") == [1]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await migrate(connection, sql=FIRST, schema="another")
    finally:
        await connection.execute("RESET ROLE")
        await connection.execute("DROP SCHEMA IF EXISTS tenant CASCADE")
        await connection.execute(SQL("DROP ROLE {}").format(Identifier(role)))


async def test_a_database_without_the_tables_is_behind_by_everything(connection: AsyncConnection) -> None:
    assert [section.title for section in await behind(connection, sql=SECOND)] == ["letters", "more letters"]

    with pytest.raises(SchemaBehind, match=r"1 \(letters\), 2 \(more letters\); run: webhooks migrate"):
        await require_current(connection, sql=SECOND)


async def test_a_database_that_lacks_the_last_section_is_refused_until_it_is_migrated(
    connection: AsyncConnection,
) -> None:
    await migrate(connection, sql=FIRST)

    with pytest.raises(SchemaBehind, match=r"sections of schema.sql: 2 \(more letters\); run: webhooks migrate"):
        await require_current(connection, sql=SECOND)
    await migrate(connection, sql=SECOND)
    await require_current(connection, sql=SECOND)


async def test_connections_whose_rows_are_dicts_will_do(empty_url: str) -> None:
    async with await AsyncConnection.connect(empty_url, autocommit=True, row_factory=dict_row) as connection:
        assert await migrate(connection, sql=FIRST) == [1]
        assert await behind(connection, sql=FIRST) == []


async def test_the_project_s_own_schema_applies_and_is_then_current(connection: AsyncConnection) -> None:
    numbers = [section.number for section in sections(schema_sql())]

    assert await migrate(connection) == numbers
    assert await migrate(connection) == []
    await require_current(connection)


async def test_the_project_s_own_schema_applies_in_a_schema_of_its_own(connection: AsyncConnection) -> None:
    await migrate(connection, schema="tenant")

    await require_current(connection, schema="tenant")
    [(elsewhere,)] = await (
        await connection.execute("SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace")
    ).fetchall()
    assert elsewhere == 0


def test_sections_are_split_at_their_headings() -> None:
    first, second = sections(SECOND)

    assert (first.number, first.title) == (1, "letters")
    assert first.sql.strip().startswith("CREATE TABLE letters")
    assert (second.number, second.title) == (2, "more letters")
    assert second.sql.strip() == "INSERT INTO letters VALUES ('c');"
    assert sections("-- nothing yet\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "-- section 2: late\nSELECT 1;\n",
        "-- section 1: one\n-- section 1: again\n",
        "-- section 1: one\n-- section 3: three\n",
        "SELECT 1;\n-- section 1: one\n",
    ],
)
def test_sections_out_of_order_or_statements_outside_of_them_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"schema\.sql: "):
        sections(text)
