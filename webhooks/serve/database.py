"""Where the database is, and that it can be used: given or embedded, reachable, with our tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psycopg
import structlog

from webhooks.consumer import Consumer
from webhooks.db import Connection, ended, transaction
from webhooks.db.connect import Connections
from webhooks.db.sequences import OURS, behind
from webhooks.db.sqlstate import is_about_the_work
from webhooks.embedded import EmbeddedServer
from webhooks.errors import ConfigurationError, Unavailable
from webhooks.inbox import inbox
from webhooks.migrate import migrate, require_current
from webhooks.settings import Settings

log = structlog.get_logger(__name__)

PATIENCE_S = 30.0
TRY_EVERY_S = 2.0
PING_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Database:
    """The database of this process.

    Args:
        url: its address.
        keeper: the task that starts the embedded server again when it dies; it ends only when that is hopeless.
    """

    url: str
    keeper: asyncio.Task[None] | None = None


@asynccontextmanager
async def database(settings: Settings) -> AsyncGenerator[Database]:
    """Find the database that `DATABASE_URL` names, or run the embedded one while the block lasts.

    Raises:
        ConfigurationError: there is neither.
    """
    if settings.database_url is not None:
        yield Database(settings.database_url)
        return
    async with EmbeddedServer(settings.home) as server:
        keeper = asyncio.create_task(_keep_running(server), name="webhooks-embedded")
        try:
            yield Database(server.url, keeper)
        finally:
            await ended([keeper])
            if not keeper.cancelled():
                keeper.exception()  # told already, by whoever watches it


async def _keep_running(server: EmbeddedServer) -> None:
    told = False
    while True:
        await asyncio.sleep(PING_EVERY_S)
        try:
            await server.ensure_running()
            told = False
        except Unavailable as error:
            if not told:
                log.error("the embedded PostgreSQL cannot be started again, trying on", error=str(error))
            told = True
        except OSError as error:
            raise ConfigurationError(f"{server.home} cannot be used any more: {error}") from error


@asynccontextmanager
async def connected(settings: Settings, *, make: bool = False) -> AsyncGenerator[Connection]:
    """Open a connection for a command that does one thing and ends.

    Args:
        settings: the environment.
        make: whether to make the embedded database where there is none yet.

    Raises:
        ConfigurationError: there is no database, or none that can be used.
        psycopg.Error: it does not answer.
    """
    made = (settings.home / "postgres" / "PG_VERSION").exists()
    if settings.database_url is None and not made and not make:
        raise ConfigurationError(
            f"there is no database in {settings.home.resolve()}: set DATABASE_URL, or run webhooks serve --dev here"
        )
    async with database(settings) as found:
        # A command may read from a standby; what writes is refused there by the server itself.
        connection = await Connections(found.url, prepare=settings.prepare, writes=False).connect()
        async with connection:
            yield connection


async def prepared(found: Database, settings: Settings, consumer: Consumer, patience_s: float = PATIENCE_S) -> None:
    """Wait for the database, and make sure that it has our tables and the consumer's.

    The embedded one is migrated; any other is left as it is.

    Raises:
        Unavailable: it did not answer within `patience_s` seconds.
        SchemaBehind: it lacks sections of `schema.sql`.
        ConfigurationError: a gated table lacks indexes or columns, those that handlers write among them, or a sequence
            of ours is behind its data; the message holds the statements to run.
    """
    async with await _patiently(found.url, settings, patience_s) as connection:
        if found.keeper is None:
            await require_current(connection, schema=settings.schema_name)
        elif applied := await migrate(connection, schema=settings.schema_name):
            log.info("migrated the embedded database", sections=applied)
        async with transaction(connection) as tx:
            problems = [*await inbox.check(tx), *await consumer.check(tx)]
            sequences = await behind(tx, dict.fromkeys((*OURS, *consumer.gates)))
    # Numbers of a user's own table may be given by hand, far from where its sequence is.
    for theirs in (sequence for sequence in sequences if sequence.table not in OURS):
        log.warning(theirs.told, run=theirs.remedy)
    if ours := [str(sequence) for sequence in sequences if sequence.table in OURS]:
        raise ConfigurationError("nothing new can be numbered:\n  " + "\n  ".join(ours))
    if problems:
        raise ConfigurationError("the tables do not fit their gates:\n  " + "\n  ".join(problems))


async def _patiently(url: str, settings: Settings, patience_s: float) -> Connection:
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    connections = Connections(url, prepare=settings.prepare)
    while True:
        try:
            return await connections.connect()
        except psycopg.Error as error:
            if is_about_the_work(error):
                raise
            reason = " ".join(str(error).split())
            left = until - loop.time()
            if left <= 0:
                raise Unavailable(f"the database did not answer within {patience_s:.0f} s: {reason}") from error
            log.warning("the database does not answer yet", error=reason, gives_up_in_s=round(left))
            await asyncio.sleep(min(TRY_EVERY_S, left))
