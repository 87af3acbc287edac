"""Accepting in groups: while one flush is on its way the next requests collect, and one commit answers them all.

One long-lived task owns the connection and every flush; requests only wait for their answer. A server that does not
answer in time is left, and until a new connection stands every request is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from webhooks import inbox
from webhooks.consumer import Consumer
from webhooks.db import Connection, Ready, transaction
from webhooks.delivery import Delivery
from webhooks.errors import Unavailable, Unreadable
from webhooks.inbox import NO_HANDLER, Accepted, Copy, identity
from webhooks.pool import Pool
from webhooks.wire import Wire

log = structlog.get_logger(__name__)

MOST_DELIVERIES = 200
MOST_BYTES = 8 * 1024 * 1024
MOST_WAITING_BYTES = 64 * 1024 * 1024
MOST_TRIES = 3
WITHIN_S = 3.0
RECONNECT_EVERY_S = 0.5
LIMITS = "SELECT set_config('statement_timeout', '3s', true), set_config('lock_timeout', %(lock_timeout)s, true)"
LOCK_TIMEOUT = "1s"
# A delivery tried by itself, because its group was refused, must not hold up the others behind another copy of it.
LOCK_TIMEOUT_ALONE = "100ms"
AWAY = "the database does not answer"


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
        self._consumer = consumer
        self._on_moved = on_moved
        self._queue: deque[Waiting] = deque()
        self._waiting_bytes = 0
        self._unanswered: set[asyncio.Future[Accepted]] = set()
        self._arrived = asyncio.Event()
        self._wire = Wire(pool)
        self._away = False
        self._task: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether the database does not answer, so that every delivery is refused at once."""
        return self._away

    async def start(self) -> None:
        """Connect, and start the task that flushes. A database that is away is no error: it may come."""
        if not await self._connect(WITHIN_S):
            self._leave()
        self._task = asyncio.create_task(self._run(), name="webhooks-accept")

    async def stop(self) -> None:
        """Answer what waits, refuse what cannot be stored within three seconds, then end."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=WITHIN_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._away = True
        self._refuse_all()
        await self._wire.close()

    async def accept(self, delivery: Delivery) -> Accepted:
        """Store a delivery, and return once it is durable.

        Raises:
            Unavailable: the database does not answer. The delivery may have been stored all the same; a second copy
                will find out.
        """
        if self._away:
            raise Unavailable(AWAY)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            raise Unavailable("too much waits for the database already")
        loop = asyncio.get_running_loop()
        waiting = Waiting(delivery, loop.create_future(), loop.time())
        self._queue.append(waiting)
        self._waiting_bytes += len(delivery.body)
        self._arrived.set()
        self._unanswered.add(waiting.answer)
        try:
            return await waiting.answer
        finally:
            self._unanswered.discard(waiting.answer)

    async def _run(self) -> None:
        while True:
            if not self._wire.up and not await self._connect(WITHIN_S):
                self._leave()
                await asyncio.sleep(RECONNECT_EVERY_S)
                continue
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
            await self._answer(self._next_group())

    def _next_group(self) -> list[Waiting]:
        group: list[Waiting] = []
        size = 0
        while self._queue and len(group) < MOST_DELIVERIES:
            size += len(self._queue[0].delivery.body)
            if group and size > MOST_BYTES:
                break
            group.append(self._take())
        return group

    def _take(self) -> Waiting:
        waiting = self._queue.popleft()
        self._waiting_bytes -= len(waiting.delivery.body)
        return waiting

    async def _answer(self, group: list[Waiting]) -> None:
        """Store a group. Its senders have an answer within three seconds of the arrival of the oldest one."""
        now = asyncio.get_running_loop().time()
        # A group that waited behind a slow one still gets a fair try.
        until = max(min(waiting.since for waiting in group) + WITHIN_S, now + WITHIN_S / 3)
        try:
            if not await self._store(group, until):
                self._leave()
        finally:
            # Also when this task is stopped in the middle: what was sent may be stored, a second copy will find out.
            for waiting in group:
                waiting.give(Unavailable(AWAY))

    async def _store(self, group: list[Waiting], until: float) -> bool:
        """Flush a group, and answer whom that answers; return whether the database is still there."""
        loop = asyncio.get_running_loop()
        for _ in range(MOST_TRIES):
            error = await self._wire.run(partial(self._flush, group, LOCK_TIMEOUT), until - loop.time())
            if error is None:
                return True
            if isinstance(error, Unavailable):
                break
            if self._wire.up:
                log.warning("a group of deliveries was refused, trying each", count=len(group), error=str(error))
                return await self._store_each(group, until)
            # Whether it was stored is unknown: tried again, it may come back as a copy of itself.
            log.warning("the connection was lost under a flush", error=str(error))
            if not await self._connect(until - loop.time()):
                break
        return False

    async def _store_each(self, group: list[Waiting], until: float) -> bool:
        """Flush each delivery for itself, because one of them, or a lock, refused the whole."""
        loop = asyncio.get_running_loop()
        for waiting in group:
            if loop.time() > until:
                break
            error = await self._wire.run(partial(self._flush, [waiting], LOCK_TIMEOUT_ALONE), WITHIN_S / 3)
            if not self._wire.up:
                return False
            if error is not None:
                log.error("a delivery was refused", source=waiting.delivery.source, error=str(error))
                waiting.give(Unavailable("the database refused it just now"))
        return True

    async def _flush(self, group: list[Waiting], lock_timeout: str, connection: Connection) -> None:
        arrivals = {identity(waiting.delivery): waiting.delivery for waiting in reversed(group)}
        async with transaction(connection) as tx:
            await tx.execute(LIMITS, {"lock_timeout": lock_timeout})
            new = await inbox.insert(tx, list(arrivals.values()))
            copies = [key for key in arrivals if key not in new]
            found: dict[inbox.Identity, Copy] = {}
            rearmed: set[inbox.Identity] = set()
            if copies:
                found = await inbox.find(tx, copies)
                wanted = [copy.id for key, copy in found.items() if self._has_handler_now(arrivals[key], copy)]
                await inbox.nudge(tx, copies)
                rearmed = await inbox.rearm(tx, copies, wanted)
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

    async def _connect(self, within_s: float) -> bool:
        if not await self._wire.connect(within_s):
            return False
        if self._away:
            log.info("the inbox takes deliveries again")
        self._away = False
        return True

    def _leave(self) -> None:
        """Do without the database until a new connection stands, and refuse what waits."""
        if not self._away:
            log.error("the database does not answer: deliveries are refused with 503", error=self._wire.failure)
        self._away = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self._queue:
            self._take().give(Unavailable(AWAY))
