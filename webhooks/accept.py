"""Accepting in groups: while one flush is on its way the next requests collect, and one commit answers them all.

One long-lived task owns the connection and every flush; requests only wait for their answer. A server that does not
answer in time is left: its connection's socket is shut, which no time-out around a driver call does in time, and
until a new connection stands every request is refused at once.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from webhooks import inbox
from webhooks.consumer import Consumer
from webhooks.db import Connection, Ready, transaction
from webhooks.delivery import Delivery
from webhooks.errors import Unavailable, Unreadable
from webhooks.inbox import NO_HANDLER, Accepted, Copy, identity
from webhooks.pool import Pool, connection_parameters

log = structlog.get_logger(__name__)

MOST_DELIVERIES = 200
MOST_BYTES = 8 * 1024 * 1024
WITHIN_S = 3.0
RECONNECT_EVERY_S = 0.5
STATEMENT_TIMEOUT = "SET LOCAL statement_timeout = '3s'"


@dataclass(slots=True, eq=False)
class Waiting:
    """A delivery and the request that waits for its answer."""

    delivery: Delivery
    answer: asyncio.Future[Accepted]
    since: float

    def give(self, answer: Accepted | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)


class Accepter:
    """Stores deliveries, many in one commit.

    Args:
        pool: whose address and settings the connection takes; the pool's own connections are not used.
        consumer: says whether it has a handler by now for a delivery that was ignored.
        on_moved: called after each commit with the deliveries that can be applied.
    """

    def __init__(self, pool: Pool, consumer: Consumer, on_moved: Callable[[Sequence[Ready]], None]) -> None:
        self._pool = pool
        self._consumer = consumer
        self._on_moved = on_moved
        self._queue: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self._connection: Connection | None = None
        self._away = True
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether the database does not answer, so that every delivery is refused at once."""
        return self._away

    async def start(self) -> None:
        """Connect, and start the task that flushes."""
        await self._connect()
        self._task = asyncio.create_task(self._run(), name="webhooks-accept")

    async def stop(self) -> None:
        """Answer what waits, then end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                await self._idle.wait()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        connection = self._connection
        self._leave()
        if connection is not None:
            await connection.close()

    async def accept(self, delivery: Delivery) -> Accepted:
        """Store a delivery, and return once it is durable.

        Raises:
            Unavailable: the database does not answer. The delivery may have been stored all the same; a second copy
                will find out.
        """
        if self._away:
            raise Unavailable("the database does not answer")
        loop = asyncio.get_running_loop()
        waiting = Waiting(delivery, loop.create_future(), loop.time())
        self._queue.append(waiting)
        self._idle.clear()
        self._arrived.set()
        return await waiting.answer

    async def _run(self) -> None:
        while True:
            if self._connection is None or self._connection.closed:
                await self._connect()
            if self._connection is None:
                self._leave()
                await asyncio.sleep(RECONNECT_EVERY_S)
                continue
            self._idle.set()
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue and self._connection is not None:
                await self._answer(self._next_group())

    def _next_group(self) -> list[Waiting]:
        group: list[Waiting] = []
        size = 0
        while self._queue and len(group) < MOST_DELIVERIES:
            size += len(self._queue[0].delivery.body)
            if group and size > MOST_BYTES:
                break
            group.append(self._queue.popleft())
        return group

    async def _answer(self, group: list[Waiting]) -> None:
        """Flush a group. Its senders have an answer within three seconds of the arrival of the oldest one."""
        for _ in range(2):
            connection = self._connection
            if connection is None:
                break
            error = await self._try(connection, group)
            if error is None:
                return
            if isinstance(error, Unavailable):
                break
            if not connection.closed:
                log.warning(
                    "a group of deliveries was refused, trying each", count=len(group), error=str(error).strip()
                )
                await self._one_by_one(connection, group)
                return
            # Whether it was stored is unknown: tried again, it may come back as a copy of itself.
            log.warning("the connection was lost under a flush", error=str(error).strip())
            await self._connect()
        self._leave()
        for waiting in group:
            waiting.give(Unavailable("the database does not answer"))

    async def _try(self, connection: Connection, group: list[Waiting]) -> BaseException | None:
        """Flush; return what went wrong, `Unavailable` when there was no answer in time."""
        task = asyncio.create_task(self._flush(connection, group))
        oldest = min(waiting.since for waiting in group)
        # A group that waited behind a slow one still gets a fair try.
        left = max(WITHIN_S - (asyncio.get_running_loop().time() - oldest), WITHIN_S / 3)
        await asyncio.wait({task}, timeout=left)
        if task.done():
            return task.exception()
        shut(connection)
        await asyncio.wait({task}, timeout=1)
        if not task.done() or (error := task.exception()) is not None:
            task.cancel()
            return Unavailable("the database did not answer in time")
        return error

    async def _one_by_one(self, connection: Connection, group: list[Waiting]) -> None:
        """Flush each delivery for itself, because one of them, or a lock, refused the whole."""
        for waiting in group:
            error = await self._try(connection, [waiting])
            if error is not None:
                log.error("a delivery was refused", source=waiting.delivery.source, error=str(error).strip())
                waiting.give(Unavailable("the database refused it just now"))
            if connection.closed:
                break
        for waiting in group:
            waiting.give(Unavailable("the database does not answer"))

    async def _flush(self, connection: Connection, group: list[Waiting]) -> None:
        arrivals = {identity(waiting.delivery): waiting.delivery for waiting in reversed(group)}
        async with transaction(connection) as tx:
            await tx.execute(STATEMENT_TIMEOUT)
            new = await inbox.insert(tx, list(arrivals.values()))
            copies = [key for key in arrivals if key not in new]
            found: dict[inbox.Identity, Copy] = {}
            rearmed: set[inbox.Identity] = set()
            if copies:
                found = await inbox.find(tx, copies)
                wanted = [copy.id for key, copy in found.items() if self._has_handler_now(arrivals[key], copy)]
                rearmed = await inbox.rearm(tx, copies, wanted)
                await inbox.nudge(tx, copies)
        self._on_moved([*(Ready(inbox.inbox.table, "applying", id_) for id_ in new.values()), *tx.moved])
        for waiting in group:
            key = identity(waiting.delivery)
            if key in new:
                # Of several copies in one group the first is the new one.
                waiting.give(Accepted(new[key], "accepted"))
                found[key] = Copy(new.pop(key), "received", None)
            elif key in found:
                waiting.give(Accepted(found[key].id, "rearmed" if key in rearmed else "duplicate"))
            else:
                waiting.give(Unavailable("another copy is being stored just now"))

    def _has_handler_now(self, delivery: Delivery, copy: Copy) -> bool:
        if copy.status != "ignored" or not (copy.reason or "").startswith(NO_HANDLER):
            return False
        source = self._consumer.sources[delivery.source]
        try:
            events = source.events(delivery.headers, source.read(delivery.headers, delivery.body))
        except Unreadable:
            return False
        return any(event.name in source.handlers for event in events)

    async def _connect(self) -> None:
        """Make a new connection, or none within three seconds."""
        self._connection = None
        parameters: dict[str, Any] = connection_parameters(self._pool.url)
        connecting = asyncio.create_task(
            AsyncConnection[dict[str, Any]].connect(
                self._pool.url,
                autocommit=True,
                row_factory=dict_row,
                prepare_threshold=self._pool.prepare_threshold,
                **parameters,
            )
        )
        await asyncio.wait({connecting}, timeout=WITHIN_S)
        if not connecting.done():
            connecting.cancel()
        elif (error := connecting.exception()) is None:
            if self._away:
                log.info("the inbox takes deliveries")
            self._connection, self._away = connecting.result(), False
        elif not isinstance(error, psycopg.Error):
            raise error

    def _leave(self) -> None:
        """Do without the database until a new connection stands, and refuse what waits."""
        if not self._away:
            log.error("the database does not answer: deliveries are refused with 503")
        self._away, self._connection = True, None
        while self._queue:
            self._queue.popleft().give(Unavailable("the database does not answer"))


def shut(connection: AsyncConnection[Any]) -> None:
    """Shut a connection's socket, so that whatever waits on it ends now."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
