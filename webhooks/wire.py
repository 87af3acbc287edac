"""A connection whose owner cannot wait: work on it that is not done in time is given up, and the connection with it.

No time-out around a driver's call does that: against a frozen server the driver first asks it to cancel the statement,
which takes many seconds. So the socket is shut, which ends at once whatever waits on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from webhooks.db import Connection
from webhooks.db.connect import shut
from webhooks.errors import Unavailable
from webhooks.pool import Pool

GIVES_UP_WITHIN_S = 0.1
SILENT = "it did not answer in time"


class Wire:
    """One connection outside the pool, made again by its owner when it was lost.

    Args:
        pool: whose address and settings it takes.

    Attributes:
        failure: what last went wrong.
        busy: whether work is being done on it.
    """

    def __init__(self, pool: Pool) -> None:
        self.failure = ""
        self.busy = False
        self._pool = pool
        self._connection: Connection | None = None

    @property
    def up(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None and not self._connection.closed

    async def connect(self, within_s: float) -> bool:
        """Connect anew, and return whether that succeeded in time."""
        await self.close()
        try:
            async with asyncio.timeout(within_s):
                self._connection = await self._pool.database.connect()
        except TimeoutError:
            self.failure = SILENT
        except Exception as error:  # a wrong address as much as a server that is away
            self.failure = _told(error)
        return self.up

    async def run(self, work: Callable[[Connection], Awaitable[None]], within_s: float) -> BaseException | None:
        """Do some work on the connection; return what went wrong, `Unavailable` when it was not done in time."""
        connection = self._connection
        if connection is None:
            return Unavailable(self.failure)
        task = asyncio.ensure_future(work(connection))
        task.add_done_callback(_looked_at)
        self.busy = True
        try:
            await asyncio.wait({task}, timeout=max(within_s, 0))
        finally:
            self.busy = False
            if not task.done():
                self._leave(connection, task)
        error = await self._given_up(task) if self._connection is None else task.exception()
        if error is not None:
            self.failure = _told(error)
        return error

    async def _given_up(self, task: asyncio.Future[None]) -> Unavailable | None:
        # With its socket shut, the driver gives up at once. If it does not, it is left to itself.
        await asyncio.wait({task}, timeout=GIVES_UP_WITHIN_S)
        if task.done() and task.exception() is None:
            return None
        task.cancel()
        return Unavailable(SILENT)

    def _leave(self, connection: Connection, task: asyncio.Future[None]) -> None:
        """Shut the socket, and close what is left of the connection once nothing uses it: not before, or the driver
        would go on with a connection that it has freed."""
        self._connection = None
        shut(connection)
        task.add_done_callback(lambda _: connection.pgconn.finish())

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _looked_at(task: asyncio.Future[None]) -> None:
    """Read how work ended though nobody may wait for it any more, so that asyncio does not complain of it."""
    if not task.cancelled():
        task.exception()


def _told(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
