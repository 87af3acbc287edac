"""The connections of one process, its name, its block of fences, and its renewer."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import LiteralString

from psycopg_pool import PoolTimeout

from webhooks.db import BLOCK, LIMITS, Connection, Cursor, Statement, Transaction, at_once, draw, transaction
from webhooks.db.connect import Connections, is_lost
from webhooks.db.pulse import Pulse
from webhooks.embedded import embedded
from webhooks.marks import Marks
from webhooks.observe import Health
from webhooks.outcome import Backoff
from webhooks.renewer import Renewer
from webhooks.settings import Settings
from webhooks.settling import Settling
from webhooks.stuck import Stuck
from webhooks.threads import Threads

MOST_CONNECTIONS = 16


class Pool:
    """A psycopg pool with our connection settings, and the thread that renews this process's claims.

    Attributes:
        url: the database's address.
        database: how its connections are opened, and all of them dropped.
        pulse: whether this process can write now, and why not (`pulse.away`).
        process: this process's name in `claimed_by`: host, pid and four random bytes.
        backoff: the wait between charged attempts.
        renewer: keeps the leases of this process's claims alive.
        settling: writes the ends of its claims.
        marks: where its last looks through the queues ended.
        health: what is at fault in this process.
        threads: which claims wait for threads that work for them.
        stuck: which rows refused lately.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        self.settings = settings
        self.process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.backoff = Backoff(timedelta(seconds=settings.backoff_base_s), timedelta(seconds=settings.backoff_max_s))
        self.database = Connections(url, prepare=settings.prepare)
        self.pulse = Pulse(self.database)
        self.renewer = Renewer(self.database.connect_in_thread)
        self.connections = self.database.pool(MOST_CONNECTIONS)
        self.settling = Settling(self)
        self.marks = Marks()
        self.health = Health()
        self.threads = Threads()
        self.stuck = Stuck()
        self._fence = 0
        self._fences_left = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncGenerator[Pool]:
        """Open the pool of this process. It is closed when no thread works for a claim any more.

        Args:
            url: a PostgreSQL address; None takes `DATABASE_URL`, and without that the embedded server.
            settings: where the environment is not to be read.

        Raises:
            ConfigurationError: a setting is wrong, or there is neither an address nor an embedded server.
        """
        settings = settings or Settings.load()
        address = url or settings.database_url
        if address is None:
            async with embedded(settings.home) as started, cls.open(started, settings=settings) as pool:
                yield pool
            return
        pool = cls(address, settings)
        await pool.connections.open()
        pool.renewer.start()
        pool.pulse.start()
        try:
            yield pool
        finally:
            try:
                await pool.threads.all_ended()
                await pool.pulse.stop()
                await pool.settling.stop()
                await pool.renewer.stop()
            finally:
                await pool.connections.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Transaction]:
        """Open a transaction of ours on a connection of the pool.

        Raises:
            psycopg_pool.PoolTimeout: no connection was free, or none could be made, within three seconds.
            psycopg.Error: the database refused a statement or went away.
        """
        async with self.connection() as connection, transaction(connection) as tx:
            yield tx

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Connection]:
        """Take a connection of the pool, in autocommit.

        Raises:
            psycopg_pool.PoolTimeout: none was free, or none could be made, within three seconds.
        """
        task = asyncio.current_task()
        cancelling = 0 if task is None else task.cancelling()
        async with self._waited_for() as connection:
            # Before Python 3.12 `wait_for`, by which the pool waits, loses a cancellation that comes with the answer.
            if task is not None and task.cancelling() > cancelling:
                raise asyncio.CancelledError
            yield connection

    @asynccontextmanager
    async def _waited_for(self) -> AsyncGenerator[Connection]:
        while is_lost(connection := await self._got()):
            # Its server closed it while it lay idle, or it was dropped: the pool makes another one for it.
            await connection.close()
            await self.connections.putconn(connection)
        try:
            async with connection:
                yield connection
        finally:
            await self.connections.putconn(connection)

    async def _got(self) -> Connection:
        try:
            return await self.connections.getconn()
        except PoolTimeout as error:
            # The pool itself does not say why none could be made.
            reason = self.database.failure
            raise PoolTimeout(f"{error}: {reason}" if reason else str(error)) from None

    async def at_once(self, statements: Sequence[Statement], limits: LiteralString = LIMITS) -> list[Cursor]:
        """Run a whole transaction in one trip; see `db.at_once`."""
        async with self.connection() as connection:
            return await at_once(connection, statements, limits)
        return []

    async def fences(self, count: int = 1, tx: Transaction | None = None) -> int:
        """Return the first of `count` consecutive numbers that nobody ever had, taken before the statement using them.

        Args:
            count: how many are needed, at most 100.
            tx: where a new block is drawn from the sequence when this process's own is used up; None: by itself.

        Raises:
            ValueError: more are needed than a block holds; the next numbers are another process's.
        """
        if not 0 < count <= BLOCK:
            raise ValueError(f"between 1 and {BLOCK} rows are claimed at once, not {count}")
        if count > self._fences_left:
            if tx is None:
                async with self.transaction() as own:
                    drawn = await draw(own)
            else:
                drawn = await draw(tx)
            if count > self._fences_left:  # others may have drawn meanwhile
                self._fence, self._fences_left = drawn, BLOCK
        first = self._fence
        self._fence += count
        self._fences_left -= count
        return first
