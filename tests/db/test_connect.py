"""How connections are opened, whatever the database's settings are; and how they are given up."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psycopg
import pytest
from gates import sql
from processes import webhooks
from psycopg.conninfo import make_conninfo
from psycopg.errors import ReadOnlySqlTransaction
from psycopg.rows import dict_row
from psycopg.sql import SQL, Identifier, Literal
from psycopg_pool import PoolTimeout

from webhooks.db.connect import Connections, is_lost, parameters, shut
from webhooks.errors import ConfigurationError
from webhooks.pool import Pool
from webhooks.settings import Settings


def setting(url: str, name: str, value: str) -> None:
    """Make a setting the database's own, for every connection from now on."""
    with psycopg.connect(url, autocommit=True) as admin:
        database = Identifier(admin.info.dbname)
        admin.execute(SQL("ALTER DATABASE {} SET {} = {}").format(database, Identifier(name), Literal(value)))


@pytest.fixture(params=["SQL_ASCII", "LATIN1"])
def other_encoding(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database in another encoding than ours."""
    name = f"encoded_{secrets.token_hex(4)}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        make = "CREATE DATABASE {} TEMPLATE template0 ENCODING {} LOCALE 'C'"
        provider = " LOCALE_PROVIDER libc" if admin.info.server_version >= 150_000 else ""
        admin.execute(SQL(f"{make}{provider}").format(Identifier(name), Literal(request.param)))
        try:
            yield make_conninfo(server_url, dbname=name)
        finally:
            admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


async def test_a_database_that_is_not_in_utf8_is_refused_by_name(other_encoding: str) -> None:
    connections = Connections(other_encoding)
    with pytest.raises(ConfigurationError, match=r"encoding of database encoded_\w+ is (SQL_ASCII|LATIN1), and UTF8"):
        await connections.connect()
    with pytest.raises(ConfigurationError, match="UTF8 is needed"):
        connections.connect_in_thread()


@pytest.mark.parametrize("command", [("migrate",), ("status",), ("work", "--app", "shop:consumer")])
def test_a_command_refuses_such_a_database_in_one_line(
    other_encoding: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = webhooks(tmp_path, *command, DATABASE_URL=other_encoding)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "the encoding of database encoded_" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("datestyle", "German, DMY"),
        ("datestyle", "SQL"),
        ("timezone", "Asia/Kolkata"),
        ("timezone", "<+05>-05:30"),
        ("client_encoding", "LATIN1"),
        ("client_encoding", "SQL_ASCII"),
    ],
)
async def test_a_time_and_a_text_are_read_as_they_were_written(database_url: str, name: str, value: str) -> None:
    setting(database_url, name, value)
    moment, text = datetime(2026, 2, 3, 4, 5, 6, 789, timezone(timedelta(hours=5, minutes=30))), "žluť ☂"
    connections = Connections(database_url)
    query = "SELECT %(moment)s::timestamptz AS moment, %(text)s AS text, %(moment)s::timestamptz::text AS written"
    async with await connections.connect() as connection:
        row = await (await connection.execute(query, {"moment": moment, "text": text})).fetchone()
    with connections.connect_in_thread() as in_thread:
        assert in_thread.execute(query, {"moment": moment, "text": text}).fetchone() == row
    assert row == {"moment": moment, "text": text, "written": "2026-02-02 22:35:06.000789+00"}


async def test_a_server_that_takes_no_writes_is_refused_by_who_writes_and_read_by_who_reads(database_url: str) -> None:
    setting(database_url, "default_transaction_read_only", "on")
    with pytest.raises(ReadOnlySqlTransaction, match="read-only"):
        await Connections(database_url).connect()
    async with await Connections(database_url, writes=False).connect() as connection:
        assert (await connection.execute("SELECT 1")).rowcount == 1


async def test_who_waits_in_vain_for_a_connection_is_told_why_there_is_none(database_url: str) -> None:
    setting(database_url, "default_transaction_read_only", "on")
    async with Pool.open(database_url, settings=Settings()) as pool:
        with pytest.raises(PoolTimeout, match="read-only"):
            await sql(pool, "SELECT 1")


async def test_a_connection_that_the_server_closed_while_it_lay_idle_is_not_given_out(database_url: str) -> None:
    setting(database_url, "idle_session_timeout", "300ms")
    async with Pool.open(database_url, settings=Settings()) as pool:
        for _ in range(3):
            assert await sql(pool, "SELECT 1 AS one") == [{"one": 1}]
            await asyncio.sleep(0.4)


async def test_all_connections_of_a_process_are_dropped_at_once_and_made_anew(pool: Pool) -> None:
    waiting = asyncio.create_task(sql(pool, "SELECT pg_sleep(60)"))
    await sql(pool, "SELECT 1")
    in_thread = pool.database.connect_in_thread()
    alone = await pool.database.connect()
    pool.database.drop()
    for lost in (waiting, alone.execute("SELECT 1")):
        with pytest.raises(psycopg.OperationalError):
            await lost
    with pytest.raises(psycopg.OperationalError):
        in_thread.execute("SELECT 1")
    in_thread.close()
    await alone.close()
    assert await sql(pool, "SELECT 1 AS one") == [{"one": 1}]


async def test_a_connection_that_is_shut_twice_or_closed_already_does_no_harm(database_url: str) -> None:
    connection = await Connections(database_url).connect()
    shut(connection)
    shut(connection)
    await connection.close()
    shut(connection)


@pytest.mark.parametrize("url", ["postgresql://u:secret%zz@h/d", "host=h pass word=secret", "postgresql://[::1"])
def test_an_address_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError, match="DATABASE_URL: write") as refused:
        Connections(url)
    assert "secret" not in str(refused.value)


def test_what_an_address_names_itself_is_kept_except_the_encoding() -> None:
    given = parameters("postgresql:///d?connect_timeout=9&application_name=mine&client_encoding=latin1")
    assert "connect_timeout" not in given
    assert "application_name" not in given
    assert given["client_encoding"] == "utf8"
    assert "options" not in given
    assert parameters("postgresql://a,b/d")["target_session_attrs"] == "read-write"


async def test_a_connection_that_is_just_being_made_is_left_alone_where_others_lead_elsewhere(
    database_url: str,
) -> None:
    connections = Connections(database_url)
    making = await psycopg.AsyncConnection[dict[str, Any]].connect(database_url, autocommit=True, row_factory=dict_row)
    made = await connections.connect()
    original = making.execute

    async def dropped_meanwhile(*args: Any, **kwargs: Any) -> Any:
        connections.drop(but="another server")
        return await original(*args, **kwargs)

    making.execute = dropped_meanwhile  # type: ignore[method-assign]
    await connections.greet(making)
    assert not is_lost(making)
    assert is_lost(made)
    await making.close()
    await made.close()
