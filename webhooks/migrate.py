"""Bring a database to the sections of `schema.sql` it lacks.

A section starts with a line ``-- section N: title`` and is never edited once released. What a database has is
recorded in its own table, `webhooks_schema`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Composed, Identifier

from webhooks.errors import ConfigurationError, SchemaBehind

HEADING = re.compile(r"^-- section (\d+): (.*)$", re.MULTILINE)

# One at a time in a database. The lock belongs to the transaction: behind a pooler a session's would never be released.
ALONE = """
SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET LOCAL synchronous_commit = on;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SELECT set_config('transaction_timeout', '0', true) WHERE current_setting('transaction_timeout', true) <> '0';
SELECT pg_advisory_xact_lock(7742301953811266);
"""
# The tables of a running system are changed only when their locks are to be had soon: whoever waits for one makes
# everybody else wait behind it.
SOON = "SET LOCAL lock_timeout = '10s'"
SCHEMA_EXISTS = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %(schema)s"
TABLE_EXISTS = "SELECT to_regclass(%(table)s) IS NOT NULL"
ELSEWHERE = """
SELECT n.nspname, current_user, current_setting('search_path')
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = 'webhooks_schema' AND c.relkind = 'r' ORDER BY n.nspname
"""
# What is new goes to where the rest is, though by now another schema may come first in the search path.
ENTER_ITS_SCHEMA = """
SELECT set_config('search_path', format('%I, %s', n.nspname, nullif(current_setting('search_path'), '')), true)
FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass('webhooks_schema') AND n.nspname <> current_schema()
"""
CREATE_RECORD = """
CREATE TABLE webhooks_schema (
    section    integer     PRIMARY KEY,
    title      text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT statement_timestamp()
)
"""
RECORD = "INSERT INTO webhooks_schema (section, title) VALUES (%(section)s, %(title)s)"


@dataclass(frozen=True, slots=True)
class Section:
    """One numbered part of `schema.sql`."""

    number: int
    title: str
    sql: str


def schema_sql() -> str:
    """Return the text of `schema.sql`: from the installed package, or from beside it in a checkout.

    Raises:
        ConfigurationError: it is in neither place.
    """
    packaged, beside = files("webhooks") / "schema.sql", Path(__file__).parent.parent / "schema.sql"
    for place in (packaged, beside):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise ConfigurationError(f"schema.sql is neither in the package nor at {beside}: install the package again")


def sections(sql: str) -> list[Section]:
    """Split `schema.sql` at its headings.

    Raises:
        ConfigurationError: something other than comments stands before the first section, or the numbers do not go
            up one by one from 1.
    """
    preface, *parts = HEADING.split(sql)
    if any(line.strip() and not line.startswith("--") for line in preface.splitlines()):
        raise ConfigurationError("schema.sql: only comments may stand before the first section")
    found = [
        Section(int(number), title.strip(), text)
        for number, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]
    if [section.number for section in found] != list(range(1, len(found) + 1)):
        raise ConfigurationError("schema.sql: sections must be numbered 1, 2, 3, … in order")
    return found


async def migrate(connection: AsyncConnection[Any], *, sql: str | None = None, schema: str | None = None) -> list[int]:
    """Apply the sections that the database lacks, all or none, and return their numbers.

    Safe in several processes at once: the later one waits and finds nothing left to do. A database newer than this
    code is left as it is.

    Args:
        connection: in autocommit, outside any transaction.
        sql: the text of `schema.sql`, where it is not ours.
        schema: `WEBHOOKS_SCHEMA`: the database schema for the tables, made where it does not exist.

    Raises:
        psycopg.Error: what the database refused, with a note that says in which section. Nothing was changed.
        ConfigurationError: `schema.sql` cannot be read.
    """
    wanted = sections(schema_sql() if sql is None else sql)
    async with connection.transaction():
        await connection.execute(ALONE, prepare=False)
        if schema is not None:
            await _enter(connection, schema)
        missing = await _missing(connection, wanted, schema, create=True)
        await connection.execute(SOON, prepare=False)
        for section in missing:
            try:
                # As bytes and without parameters: many statements, and `%` is no placeholder.
                await connection.execute(section.sql.encode(), prepare=False)
            except Exception as error:
                error.add_note(f"in section {section.number} of schema.sql: {section.title}")
                raise
            await connection.execute(RECORD, {"section": section.number, "title": section.title}, prepare=False)
    return [section.number for section in missing]


async def behind(
    connection: AsyncConnection[Any], *, sql: str | None = None, schema: str | None = None
) -> list[Section]:
    """Return the sections that the database lacks, without changing anything.

    Args:
        connection: any; two statements are run.
        sql: the text of `schema.sql`, where it is not ours.
        schema: `WEBHOOKS_SCHEMA`.
    """
    return await _missing(connection, sections(schema_sql() if sql is None else sql), schema)


async def require_current(
    connection: AsyncConnection[Any], *, sql: str | None = None, schema: str | None = None
) -> None:
    """Refuse to go on with a database that lacks sections; the arguments are those of `behind`.

    Raises:
        SchemaBehind: the message says which command to run.
    """
    missing = await behind(connection, sql=sql, schema=schema)
    if missing:
        named = ", ".join(f"{section.number} ({section.title})" for section in missing)
        raise SchemaBehind(f"the database lacks sections of schema.sql: {named}; run: webhooks migrate")


async def _enter(connection: AsyncConnection[Any], schema: str) -> None:
    # Asked first, because CREATE SCHEMA IF NOT EXISTS wants the right to create one even where it exists.
    if not await _rows(connection, SCHEMA_EXISTS, {"schema": schema}):
        await connection.execute(SQL("CREATE SCHEMA {}").format(Identifier(schema)), prepare=False)
    await connection.execute(SQL("SET LOCAL search_path TO {}").format(Identifier(schema)), prepare=False)


async def _missing(
    connection: AsyncConnection[Any], wanted: list[Section], schema: str | None, *, create: bool = False
) -> list[Section]:
    """Return the sections above the recorded one."""
    record = Identifier("webhooks_schema") if schema is None else Identifier(schema, "webhooks_schema")
    [(exists,)] = await _rows(connection, TABLE_EXISTS, {"table": record.as_string(connection)})
    if not exists:
        if schema is None:
            await _refuse_another(connection)
        if create:
            await connection.execute(CREATE_RECORD, prepare=False)
        return wanted
    if create and schema is None:
        await connection.execute(ENTER_ITS_SCHEMA, prepare=False)
    [(last,)] = await _rows(connection, SQL("SELECT coalesce(max(section), 0) FROM {}").format(record))
    return [section for section in wanted if section.number > last]


async def _refuse_another(connection: AsyncConnection[Any]) -> None:
    """Refuse to take a database for an empty one whose tables are where the search path does not lead.

    Raises:
        ConfigurationError: they are in one other schema; the message says where, and what to do.
    """
    elsewhere = await _rows(connection, ELSEWHERE)
    if len(elsewhere) == 1:  # several have been made on purpose, each with its WEBHOOKS_SCHEMA
        [(schema, role, path)] = elsewhere
        raise ConfigurationError(
            f"the tables of webhooks are in the schema {schema}, and the search_path of {role} ({path}) does not lead "
            f"there: set WEBHOOKS_SCHEMA={schema}, or the search_path; for tables of your own elsewhere set "
            "WEBHOOKS_SCHEMA to where they shall be"
        )


async def _rows(
    connection: AsyncConnection[Any], query: LiteralString | Composed, parameters: dict[str, object] | None = None
) -> list[tuple[Any, ...]]:
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(query, parameters, prepare=False)
        return await cursor.fetchall()
