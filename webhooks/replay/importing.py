"""Deliveries out of files into the inbox of this database, through the same door as those that are received."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from webhooks.accept import Accepter
from webhooks.bell import Bell
from webhooks.consumer import Consumer
from webhooks.errors import Refused, Unavailable
from webhooks.pool import Pool
from webhooks.replay.arriving import Arrival, Desk
from webhooks.replay.pump import Halt, pump
from webhooks.replay.report import Limits, Progress, Report, Tally, unheard
from webhooks.replay.rerunning import tell

MOST_TRIES = 5
FIRST_WAIT_S = 0.5


async def imported(
    pool: Pool,
    consumer: Consumer,
    arrivals: AsyncGenerator[Arrival],
    desk: Desk,
    limits: Limits,
    progress: Progress = unheard,
    *,
    after: int = 0,
) -> Report:
    """Store deliveries that are verified as of their own time. What is refused is counted, and stored nowhere.

    Args:
        pool: the connections.
        consumer: says whether it has a handler by now for a delivery that is here and was ignored.
        arrivals: signed, in their order.
        desk: who judges.
        limits: how fast, how many at a time, and when to stop.
        progress: told after each.
        after: the place after which they start; for the report.
    """
    tally = Tally(after)
    bell = Bell(pool)
    bell.start(listen=False)
    accepter = Accepter(pool, consumer, lambda _: bell.ring())
    await accepter.start()

    async def each(arrival: Arrival) -> None:
        tally.signed += arrival.signed
        try:
            delivery = desk.judged(arrival)
        except Refused as refused:
            tally.count("refused", cause=refused.cause)
            return
        if desk.is_test(arrival):
            tally.count("answered")
            return
        reason = ""
        for number in range(MOST_TRIES):
            try:
                tally.count((await accepter.accept(delivery)).status)
                return
            except Unavailable as error:
                reason = str(error)
                if await limits.stopped(FIRST_WAIT_S * 2**number):
                    break
        raise Halt(f"the inbox does not take deliveries: {reason}")

    try:
        await pump(arrivals, each, limits, tally, progress)
    finally:
        await accepter.stop()
        await bell.stop()
        await tell(pool)
    return tally.report()
