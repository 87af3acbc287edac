"""One pulse a process: whether the database that its connections lead to still answers, and takes writes.

After a failover, standing connections may lead to a server that only reads, or that never answers again, and no error
says so: a proxy goes on to acknowledge what it cannot pass on. So a connection of its own asks every second. When the
server is read-only, silent, or another one than before, the sockets of all connections of the process are shut, and
each is made anew by whoever needs it. A single statement has no limit: a long one of a handler lives as long as the
server answers others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import LiteralString

import psycopg
import structlog

from webhooks.db import BEGIN, Connection, compose, ended
from webhooks.db.connect import Connections, one_line, shut, takes_no_writes
from webhooks.db.sqlstate import is_about_the_server

log = structlog.get_logger(__name__)

EVERY_S = 1.0
SILENT_AFTER_S = 3.0
# Silence is counted in pieces: an event loop that was blocked meanwhile is no silence of the server.
PIECES = 6

QUESTION: LiteralString = (
    "SELECT pg_is_in_recovery() AS standby, current_setting('transaction_read_only')::boolean AS read_only,"
    " pg_postmaster_start_time()::text AS server"
)
# A line as a claim writes it, longer than what is left of a page, so that a full disk refuses it; it is rolled back.
WRITE = compose(
    "INSERT INTO {attempts} (claim_seq, table_name, key, phase, visit, attempt, error)\n"
    "SELECT -1 - (random() * 1e15)::bigint, '', '', '', 0, 0, string_agg(md5(random()::text), '')\n"
    "FROM generate_series(1, 500)"
)


class Pulse:
    """Watches over the connections of one process.

    Args:
        connections: all of them.

    Attributes:
        away: why this process cannot write now, for a person; None while it can.
        refused: why a database that answers refuses to write; None while it does not.
    """

    def __init__(self, connections: Connections) -> None:
        self.away: str | None = None
        self.refused: str | None = None
        self._connections = connections
        self._connection: Connection | None = None
        self._server: str | None = None
        self._doubted = False  # whether a write was refused since one was tried here
        self._suspicious = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        connections.on_failure = self._suspect

    def start(self) -> None:
        """Start to watch; the first question is asked a second later."""
        self._task = asyncio.create_task(self._run(), name="webhooks-pulse")

    async def stop(self) -> None:
        if self._task is not None:
            await ended([self._task])
        await self._leave()

    def _suspect(self, error: psycopg.Error) -> None:
        self._doubted = self._doubted or error.sqlstate is not None
        self._suspicious.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    # While it is away, it is asked once a second, however many find out.
                    await (self._suspicious.wait() if self.away is None else asyncio.sleep(EVERY_S))
            self._suspicious.clear()
            standing = self._connection is not None
            self._tell(await self._beat())
            if standing and self.away is not None:
                self._tell(await self._beat())  # a new connection may lead to another server already

    def _tell(self, reason: str | None) -> None:
        if reason is not None and self.away is None:
            log.error("the database takes no writes from here: connecting anew", reason=reason)
        elif reason is None and self.away is not None:
            log.info("the database takes writes again")
        self.away = reason

    async def _beat(self) -> str | None:
        """Return why nothing can be written."""
        began = time.monotonic()
        try:
            if self._connection is not None:
                with suppress(psycopg.Error):
                    return await self._asked(self._connection)
                await self._leave()  # it may be the only one that was lost
            self._connection = await self._connections.connect()
            return await self._asked(self._connection)
        except Exception as error:  # whatever it is, it is asked again
            await self._leave()
            # Where others are answered, there is only no room for one connection more.
            return None if self._connections.answered_at > began else one_line(error)

    async def _asked(self, connection: Connection) -> str | None:
        """Ask a server; where it cannot be written to, drop all connections.

        Raises:
            psycopg.Error: the connection was lost.
        """
        found: list[str | None] = []

        async def question() -> None:
            answer = await (await connection.execute(QUESTION, prepare=False)).fetchone()
            if answer is None:
                raise RuntimeError("the database answered nothing")
            if self._server != answer["server"]:
                # What was opened before leads to another server, or to one that is gone.
                self._server = answer["server"]
                self._connections.drop(but=self._server)
            found.append(takes_no_writes(answer))

        if not await self._in_time(connection, question):
            found.append("the database does not answer")
        if (reason := found[-1]) is not None:
            await self._leave()
            self._connections.drop()
            return reason
        if self._doubted:
            self.refused = await self._tried(connection)
            self._doubted = self.refused is not None
        return self.refused

    async def _tried(self, connection: Connection) -> str | None:
        """Try a write, because one was refused; return why this one is."""
        found: list[str | None] = []

        async def write() -> None:
            try:
                await connection.execute(BEGIN, prepare=False)
                await connection.execute(WRITE, prepare=False)
            except psycopg.Error as error:
                found.append(one_line(error) if is_about_the_server(error) else None)
            else:
                found.append(None)
            await connection.execute("ROLLBACK", prepare=False)

        if not await self._in_time(connection, write):
            found.append("the database does not answer")
        if found[-1] is not None:
            await self._leave()
        return found[-1]

    async def _in_time(self, connection: Connection, work: Callable[[], Awaitable[None]]) -> bool:
        """Do some work; return whether it was done before the server, to everybody in this process, was silent for
        three seconds. Else the connection is given up."""
        task = asyncio.ensure_future(work())
        pieces, heard = 0, time.monotonic()
        try:
            while not task.done() and pieces < PIECES:
                await asyncio.wait({task}, timeout=SILENT_AFTER_S / PIECES)
                if self._connections.answered_at > heard:
                    pieces, heard = 0, time.monotonic()
                pieces += 1
        finally:
            if not task.done():
                self._connection = None
                shut(connection)
                task.add_done_callback(partial(_given_up, connection))
        if task.done():
            task.result()
            return True
        return False

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _given_up(connection: Connection, task: asyncio.Future[None]) -> None:
    """Close what is left of a connection, not before nothing uses it any more."""
    connection.pgconn.finish()
    if not task.cancelled():
        task.exception()  # read, so that asyncio does not complain of it
