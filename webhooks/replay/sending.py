"""Deliveries of the inbox, or out of files, to a receiver somewhere, through its front door."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from webhooks import sending
from webhooks.pool import Pool
from webhooks.replay.arriving import Arrival, Desk
from webhooks.replay.pump import Halt, pump
from webhooks.replay.report import Limits, Progress, Report, Result, Tally, unheard
from webhooks.selection import Reader, Scope
from webhooks.sending import Outcome

MOST_TRIES = 5
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
RESULTS: Mapping[Outcome, Result] = {
    "accepted": "accepted",
    "duplicate": "duplicate",
    "rearmed": "rearmed",
    "answered": "answered",
    "refused": "refused",
    "failed": "failed",
}


async def sent(
    base: str,
    arrivals: AsyncGenerator[Arrival],
    limits: Limits,
    progress: Progress = unheard,
    *,
    after: int = 0,
    upto: int | None = None,
) -> Report:
    """Send deliveries to a receiver as they are. One that does not take them now is asked again a few times.

    Args:
        base: the receiver's base address.
        arrivals: in their order.
        limits: how fast, how many at a time, and when to stop.
        progress: told after each.
        after: where they start, and `upto`: where they end; for the report.

    Raises:
        ConfigurationError: `base` is no address.
    """
    sending.target(base, "source")
    tally = Tally(after, upto)
    async with sending.opened(base, limits.at_once) as client:

        async def each(arrival: Arrival) -> None:
            if arrival.pruned:
                tally.count("pruned", cause="its body was pruned")
                return
            cause: str | None = None
            for number in range(MOST_TRIES):
                answer = await sending.send(client, base, arrival.source, arrival.headers, arrival.body)
                if answer.outcome != "unavailable":
                    tally.signed += arrival.signed
                    tally.count(RESULTS[answer.outcome], cause=answer.cause)
                    return
                cause = answer.cause
                asked = 0.0 if answer.retry_after is None else answer.retry_after.total_seconds()
                wait_s = max(FIRST_WAIT_S * 2**number, asked)
                if number + 1 < MOST_TRIES and (wait_s > LONGEST_WAIT_S or await limits.stopped(wait_s)):
                    break
            raise Halt(f"the receiver does not take deliveries: {cause}")

        await pump(arrivals, each, limits, tally, progress)
    return tally.report()


async def stored(pool: Pool, scope: Scope, desk: Desk) -> AsyncGenerator[Arrival]:
    """Yield deliveries of the inbox as they came in, signed where they carry no signature.

    Args:
        pool: the connections.
        scope: which; of the unit `original`.
        desk: who signs, and whose sources read the bodies that `where_json` looks into.
    """
    reader = Reader(pool, desk.sources, scope)
    async with aclosing(reader.batches(bodies=True)) as batches:
        async for batch in batches:
            for found in batch:
                if found.body is None:
                    yield Arrival(place=found.id, source=found.source, pruned=True)
                    continue
                yield desk.signed(
                    Arrival(
                        place=found.id,
                        source=found.source,
                        headers=found.headers,
                        body=found.body,
                        received_at=found.received_at,
                    )
                )
