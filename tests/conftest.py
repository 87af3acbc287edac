"""One PostgreSQL for the whole run, one migrated template database, a fresh copy of it for every test.

`DATABASE_URL_TEST`, else `DATABASE_URL`, names a server to use instead of the embedded one; its user must be allowed to
create databases, and no database that exists is touched.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

# The suite brings its own environment: a developer's secrets and settings must not decide what passes.
GIVEN = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("WEBHOOKS_", "DATABASE_URL"))}

import psycopg  # noqa: E402
import pytest  # noqa: E402
import structlog  # noqa: E402
from psycopg.sql import SQL, Identifier  # noqa: E402

from webhooks.embedded import EmbeddedServer  # noqa: E402
from webhooks.errors import WebhooksError  # noqa: E402
from webhooks.migrate import migrate  # noqa: E402
from webhooks.pool import Pool  # noqa: E402
from webhooks.settings import Settings  # noqa: E402

# Not structlog's own tracebacks: each takes a second to draw, and a worker that fails on purpose draws many.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ],
    wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
)

# A test database need not outlive a power cut.
FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}


def in_memory() -> str | None:
    """A directory that needs no disk, where there is one with room: a database is made and dropped for every test."""
    memory = Path("/dev/shm")  # noqa: S108
    room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 << 30
    return str(memory) if room else None


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """The server of this run; tests want `database_url`."""
    given = GIVEN.get("DATABASE_URL_TEST") or GIVEN.get("DATABASE_URL")
    if given:
        yield given
        return
    # Not pytest's own directory: a second run closes it to everybody but root, and PostgreSQL does not run as root.
    with tempfile.TemporaryDirectory(prefix="webhooks-tests-", dir=in_memory()) as home:
        server = EmbeddedServer(Path(home), FAST)
        try:
            try:
                url = server.start()
            except WebhooksError as error:
                # Once, and not by every test: each of them needs it.
                pytest.exit(f"no PostgreSQL for the tests: {error}", returncode=4)
            yield url
        finally:
            server.close()


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """The name of a database with the current schema and no rows."""
    name = f"webhooks_test_{secrets.token_hex(4)}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
    try:
        asyncio.run(_migrate(_database(server_url, name)))
        yield name
    finally:
        _drop(server_url, name)


@pytest.fixture
def database_url(server_url: str, template: str) -> Iterator[str]:
    """The URL of a fresh database with the current schema, dropped after the test whoever is still connected."""
    name = f"{template}_{secrets.token_hex(4)}"
    with psycopg.connect(server_url, autocommit=True) as admin:
        strategy = SQL("STRATEGY file_copy" if admin.info.server_version >= 150_000 else "")
        made = SQL("CREATE DATABASE {} TEMPLATE {} {}").format(Identifier(name), Identifier(template), strategy)
        admin.execute(made)
    try:
        yield _database(server_url, name)
    finally:
        _drop(server_url, name)


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    """The connections of one process, on the test's own database."""
    async with Pool.open(database_url, settings=Settings()) as opened:
        yield opened


async def _migrate(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await migrate(connection)


def _database(server_url: str, name: str) -> str:
    return urlsplit(server_url)._replace(path=f"/{name}").geturl()


def _drop(server_url: str, name: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as admin:
        admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
