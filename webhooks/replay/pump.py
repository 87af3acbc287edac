"""Many deliveries a few at a time, in their order, until the end or until somebody says stop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import psycopg

from webhooks.db.sqlstate import is_about_the_work
from webhooks.errors import ConfigurationError
from webhooks.replay.arriving import Arrival
from webhooks.replay.report import INTERRUPTED, Limits, Progress, Tally, unanswered

MOST_BYTES_AT_ONCE = 32 * 1024 * 1024


class Halt(Exception):
    """Trying on is of no use now: the message says why. What was begun is not done."""


async def pump(
    arrivals: AsyncGenerator[Arrival],
    each: Callable[[Arrival], Awaitable[None]],
    limits: Limits,
    tally: Tally,
    progress: Progress,
) -> None:
    """Do something with each arrival, and keep in the tally how far everything is done.

    Args:
        arrivals: in their order; read no faster than they are done.
        each: does one, and counts it; raises `Halt` to end all.
        limits: how many at a time, how fast, and when to stop. What was begun is finished.
        tally: `after` is the place up to which everything is done.
        progress: told after each.

    What cannot be read, or signed, ends it: everything before it is done, nothing after it is.

    Raises:
        ConfigurationError: the first of them cannot be signed, so that nothing was done.
        psycopg.Error: the database did not answer before anything was done.
    """
    running: dict[asyncio.Task[None], Arrival] = {}
    begun: deque[Arrival] = deque()
    undone: set[int] = set()

    async def some_done() -> None:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            arrival = running.pop(task)
            error = task.exception()
            if error is None:
                undone.discard(arrival.place)
            elif isinstance(error, Halt):
                tally.stopped = tally.stopped or (INTERRUPTED if limits.stop.is_set() else str(error))
            else:
                raise error
        while begun and begun[0].place not in undone:
            tally.after = begun.popleft().place
        progress(tally.report())

    async def coming() -> Arrival | None:
        try:
            return await _next(arrivals, limits)
        except (ConfigurationError, psycopg.Error) as error:
            if is_about_the_work(error) or (not running and not tally.report().total):
                raise
            tally.stopped = tally.stopped or (unanswered(error) if isinstance(error, psycopg.Error) else str(error))
            return None

    try:
        async with aclosing(arrivals):
            while (arrival := await coming()) is not None and arrival.broken is None:
                while running and (len(running) >= limits.at_once or _too_much(running, arrival)):
                    await some_done()
                if tally.stopped is not None or not await limits.turn():
                    break
                begun.append(arrival)
                undone.add(arrival.place)
                running[asyncio.ensure_future(_one(each, arrival))] = arrival
        while running:
            await some_done()
        if arrival is not None and arrival.broken is not None and tally.stopped is None:
            tally.count("failed")
            tally.after, tally.stopped, tally.broken = arrival.place, arrival.broken, True
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if limits.stop.is_set():
        tally.stopped = tally.stopped or INTERRUPTED


async def _one(each: Callable[[Arrival], Awaitable[None]], arrival: Arrival) -> None:
    await each(arrival)


def _too_much(running: dict[asyncio.Task[None], Arrival], arrival: Arrival) -> bool:
    return sum(len(other.body) for other in running.values()) + len(arrival.body) > MOST_BYTES_AT_ONCE


async def _next(arrivals: AsyncGenerator[Arrival], limits: Limits) -> Arrival | None:
    """Return the next arrival; None at the end, or when asked to stop while none comes."""
    if limits.stop.is_set():
        return None
    coming = asyncio.ensure_future(_or_none(arrivals))
    asked = asyncio.ensure_future(limits.stop.wait())
    try:
        await asyncio.wait({coming, asked}, return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        asked.cancel()
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


async def _or_none(arrivals: AsyncGenerator[Arrival]) -> Arrival | None:
    return await anext(arrivals, None)
