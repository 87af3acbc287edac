"""Accepting in groups: while one flush is on its way the next requests collect, and one commit answers them all.

Two long-lived tasks, each with a connection of its own, take turns at flushing, so that one group is on its way to the
disk while the next is being sent; requests only wait for their answer. A server that does not answer in time is left,
and until a new connection stands every request is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import LiteralString

import structlog

from webhooks import inbox
from webhooks.consumer import Consumer
from webhooks.db import Connection, Ready, Transaction, transaction
from webhooks.db.sqlstate import is_about_the_work
from webhooks.delivery import Delivery
from webhooks.errors import Unavailable, Unreadable
from webhooks.inbox import Accepted, Copy, Identity, identity
from webhooks.inbox.wants import NO_HANDLER, NO_SOURCE
from webhooks.pool import Pool
from webhooks.text import message_of
from webhooks.wire import Wire

log = structlog.get_logger(__name__)

MOST_DELIVERIES = 200
MOST_BYTES = 8 * 1024 * 1024
MOST_WAITING_BYTES = 64 * 1024 * 1024
MOST_TRIES = 3
WITHIN_S = 3.0
RECONNECT_EVERY_S = 0.5
FLUSHES_AT_ONCE = 2
LIMITS = "; SET LOCAL statement_timeout = '3s'"
# A delivery tried by itself, because its group was refused, must not hold up the others behind another copy of it.
LIMITS_ALONE = "; SET LOCAL statement_timeout = '3s'; SET LOCAL lock_timeout = '100ms'"
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


async def store(tx: Transaction, consumer: Consumer, arrivals: Sequence[Delivery]) -> dict[Identity, Accepted]:
    """Store verified deliveries, and help on those that were here already.

    Args:
        tx: what can be applied afterwards is added to its `moved`.
        consumer: says whether it has a handler by now for a delivery that was ignored.
        arrivals: of several copies among them the first counts.

    Returns:
        What became of each. One that is missing was there, and is gone again: whoever sent it tries again.
    """
    first = {identity(arrival): arrival for arrival in reversed(arrivals)}
    new = await inbox.insert(tx, list(first.values()))
    tx.moved += [Ready(inbox.inbox.table, "applying", id_) for id_ in new.values()]
    became = {key: Accepted(id_, "accepted") for key, id_ in new.items()}
    copies = [key for key in first if key not in new]
    if copies:
        found = await inbox.find(tx, copies)
        wanted = [copy.id for key, copy in found.items() if _has_handler_now(consumer, first[key], copy)]
        await inbox.nudge(tx, copies)
        rearmed = await inbox.rearm(tx, copies, wanted)
        became |= {key: Accepted(copy.id, "rearmed" if key in rearmed else "duplicate") for key, copy in found.items()}
    return became


def _has_handler_now(consumer: Consumer, delivery: Delivery, copy: Copy) -> bool:
    if copy.status != "ignored" or not (copy.reason or "").startswith((NO_HANDLER, NO_SOURCE)):
        return False
    source = consumer.sources[delivery.source]
    try:
        events = source.events(delivery.headers, source.read(delivery.headers, delivery.body))
    except Unreadable:
        return False
    return any(event.name in source.handlers for event in events)


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
        self._health = pool.health
        self._arrived = asyncio.Event()
        self._pulse = pool.pulse
        self._wires = [Wire(pool) for _ in range(FLUSHES_AT_ONCE)]
        self._away = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def away(self) -> bool:
        """Whether the database does not answer, so that every delivery is refused at once."""
        return self._away

    @property
    def cannot_store(self) -> str | None:
        """Why deliveries are refused without being tried; None while they are tried."""
        if self._away:
            return AWAY
        refused = self._pulse.refused
        return None if refused is None else f"the database takes no writes: {refused}"

    async def start(self) -> None:
        """Connect, and start the tasks that flush. A database that is away is no error: it may come."""
        if not all(await asyncio.gather(*(self._connect(wire, WITHIN_S) for wire in self._wires))):
            self._leave()
        self._tasks = [asyncio.create_task(self._run(wire), name="webhooks-accept") for wire in self._wires]

    async def stop(self) -> None:
        """Answer what waits, refuse what cannot be stored within three seconds, then end."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=WITHIN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._away = True
        self._refuse_all()
        for wire in self._wires:
            await wire.close()

    async def accept(self, delivery: Delivery) -> Accepted:
        """Store a delivery, and return once it is durable.

        Raises:
            Unavailable: the database does not answer. The delivery may have been stored all the same; a second copy
                will find out.
        """
        if (reason := self.cannot_store) is not None:
            raise Unavailable(reason)
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

    async def _run(self, wire: Wire) -> None:
        while True:
            if not wire.up and not await self._connect(wire, WITHIN_S):
                self._leave()
                await asyncio.sleep(RECONNECT_EVERY_S)
            elif self._queue:
                await self._answer(wire, self._next_group())
            else:
                self._arrived.clear()
                await self._arrived.wait()

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

    async def _answer(self, wire: Wire, group: list[Waiting]) -> None:
        """Store a group. Its senders have an answer within three seconds of the arrival of the oldest one."""
        now = asyncio.get_running_loop().time()
        # A group that waited behind a slow one still gets a fair try.
        until = max(min(waiting.since for waiting in group) + WITHIN_S, now + WITHIN_S / 3)
        try:
            if not await self._store(wire, group, until):
                await self._distrust_idle_ones()
                self._leave()
        finally:
            # Also when this task is stopped in the middle: what was sent may be stored, a second copy will find out.
            for waiting in group:
                waiting.give(Unavailable(AWAY))

    async def _store(self, wire: Wire, group: list[Waiting], until: float) -> bool:
        """Flush a group, and answer whom that answers; return whether the database is still there."""
        loop = asyncio.get_running_loop()
        for _ in range(MOST_TRIES):
            error = await wire.run(partial(self._flush, group, LIMITS), until - loop.time())
            if error is None:
                return True
            if isinstance(error, Unavailable):
                break
            if wire.up:
                log.warning("a group of deliveries was refused, trying each", count=len(group), error=message_of(error))
                return await self._store_each(wire, group, until)
            # Whether it was stored is unknown: tried again, it may come back as a copy of itself.
            log.warning("the connection was lost under a flush", error=str(error))
            if not await self._connect(wire, until - loop.time()):
                break
        return False

    async def _store_each(self, wire: Wire, group: list[Waiting], until: float) -> bool:
        """Flush each delivery for itself, because one of them, or a lock, refused the whole."""
        loop = asyncio.get_running_loop()
        for waiting in group:
            if loop.time() > until:
                break
            error = await wire.run(partial(self._flush, [waiting], LIMITS_ALONE), WITHIN_S / 3)
            if not wire.up:
                return False
            if error is not None:
                self._tell_of_refused(waiting.delivery, error)
                waiting.give(Unavailable("the database refused it just now"))
        return True

    def _tell_of_refused(self, delivery: Delivery, error: BaseException) -> None:
        """Log why a delivery cannot be stored; until one is, this is a fault of the process's."""
        reason = " ".join(filter(None, (message_of(error), inbox.advice(error))))
        log.error("a delivery was refused", source=delivery.source, key=delivery.dedup_key, error=reason)
        if is_about_the_work(error):
            self._health.report("deliveries", f"the database refuses to store one: {reason}")

    async def _flush(self, group: list[Waiting], limits: LiteralString, connection: Connection) -> None:
        async with transaction(connection, limits) as tx:
            became = await store(tx, self._consumer, [waiting.delivery for waiting in group])
        self._on_moved(tx.moved)
        if any(accepted.status == "accepted" for accepted in became.values()):
            self._health.report("deliveries", None)
        for waiting in group:
            key = identity(waiting.delivery)
            accepted = became.get(key)
            if accepted is None:
                log.warning("a copy was here and is gone again", source=waiting.delivery.source, key=key[1])
                waiting.give(Unavailable("another copy was removed just now"))
                continue
            waiting.give(accepted)
            if accepted.status == "accepted":
                # Of several copies in one group the first is the new one.
                became[key] = Accepted(accepted.delivery, "duplicate")

    async def _connect(self, wire: Wire, within_s: float) -> bool:
        if not await wire.connect(within_s):
            return False
        if self._away:
            log.info("the inbox takes deliveries again")
        self._away = False
        return True

    async def _distrust_idle_ones(self) -> None:
        """Have every idle connection made anew: it may be as dead, and the next request would have to find that out."""
        for wire in self._wires:
            if not wire.busy:
                await wire.close()

    def _leave(self) -> None:
        """Do without the database until a new connection stands, and refuse what waits; nothing while one stands."""
        if any(wire.up for wire in self._wires):
            return
        if not self._away:
            failure = next((wire.failure for wire in self._wires if wire.failure), "")
            log.error("the database does not answer: deliveries are refused with 503", error=failure)
        self._away = True
        self._refuse_all()

    def _refuse_all(self) -> None:
        while self._queue:
            self._take().give(Unavailable(AWAY))
