"""A switchover behind a proxy or a service name: the process leaves a server that only reads, by itself, with all its
connections, and loses and repeats nothing.

Two servers of their own; the way to them is a proxy that leads new connections elsewhere and keeps what stands.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from conftest import FAST, in_memory
from consumers import Stack, from_shortcut, patching, quick, stack, stories
from gates import backends, elsewhere, until
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier
from switchover import read_only
from wire import wired

from webhooks.embedded import EmbeddedServer
from webhooks.migrate import migrate


@pytest.fixture(scope="module")
def other_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="webhooks-failover-", dir=in_memory()) as home:
        server = EmbeddedServer(Path(home), FAST)
        try:
            yield server.start()
        finally:
            server.close()


@pytest.fixture
async def other_url(other_server: str, database_url: str) -> AsyncIterator[str]:
    """A database of the same name on the other server, empty."""
    name = str(conninfo_to_dict(database_url)["dbname"])
    async with await elsewhere(other_server) as admin:
        await admin.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        url = make_conninfo(other_server, dbname=name)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await migrate(connection)
        try:
            yield url
        finally:
            await admin.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


async def status(running: Stack, key: int) -> int:
    return (await running.send(from_shortcut(stories(key, id=f"delivery-{key}")))).status_code


async def accepted(running: Stack, key: int) -> bool:
    return await status(running, key) in (200, 202)


async def processed(url: str) -> int:
    async with await elsewhere(url) as connection:
        found = await connection.execute("SELECT FROM deliveries WHERE status IN ('processed', 'ignored')")
        return found.rowcount


async def test_after_a_failover_behind_a_proxy_everything_goes_over_to_the_new_primary(
    database_url: str, other_url: str
) -> None:
    async with wired(database_url) as wire, stack(wire.url, patching(), settings=quick()) as running:
        assert await status(running, 1) == 202
        await until(lambda: len(backends(database_url)) >= 5)  # pool, pulse, LISTEN and both of the accepter
        async with read_only(database_url):
            wire.lead_to(other_url)
            await until(lambda: accepted(running, 2))

            async def moved() -> bool:
                return not backends(database_url) and await processed(other_url) == 1

            await until(moved)
            await until(lambda: running.pool.pulse.away is None)
            assert await status(running, 3) == 202
        assert {row["dedup_key"] for row in await running.deliveries()} == {"delivery-2", "delivery-3"}


async def test_a_database_that_only_reads_for_a_while_is_refused_and_goes_on_by_itself(database_url: str) -> None:
    async with stack(database_url, patching(), settings=quick()) as running:
        assert await status(running, 1) == 202
        async with read_only(database_url):
            assert await status(running, 2) == 503
            await until(lambda: running.pool.pulse.away)
            assert "read-only" in str(running.pool.pulse.away)
            assert await status(running, 2) == 503
        await until(lambda: accepted(running, 2))
        await until(lambda: running.pool.pulse.away is None)

        async def all_processed() -> bool:
            return await processed(database_url) == 2

        await until(all_processed)


async def test_a_proxy_that_went_silent_is_left_for_where_it_leads_next(database_url: str, other_url: str) -> None:
    async with wired(database_url) as wire, stack(wire.url, patching(), settings=quick()) as running:
        assert await status(running, 1) == 202
        await until(lambda: running.pool.pulse._connection)
        wire.passing.clear()
        await until(lambda: running.pool.pulse.away)
        wire.lead_to(other_url)
        async with read_only(database_url):
            wire.passing.set()
            await until(lambda: accepted(running, 2))

            async def worked_off() -> bool:
                return await processed(other_url) == 1

            await until(worked_off)
            await until(lambda: running.pool.pulse.away is None)
