"""What would become of the deliveries of a file: each is judged as it would be, and nothing is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from webhooks import inbox
from webhooks.delivery import Delivery
from webhooks.errors import Refused, Unreadable
from webhooks.pool import Pool
from webhooks.replay.arriving import Arrival, Desk
from webhooks.replay.report import Result

AT_ONCE = 200
SAMPLE = 5


@dataclass(frozen=True, slots=True)
class Fate:
    """How many deliveries of a file are alike, and what would become of them.

    Args:
        source: whose they are.
        event: what they say, where that can be read.
        result: `accepted`, `duplicate` (which arms a dead one again), `answered`, `refused` or `failed`.
        cause: why not.
        count: how many.
    """

    source: str
    event: str | None
    result: Result
    cause: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Weighed:
    """The deliveries of a file, counted, and the first few of them as (place, source, event)."""

    fates: tuple[Fate, ...]
    sample: tuple[tuple[int, str, str | None], ...]

    @property
    def total(self) -> int:
        """How many deliveries there are, those that cannot be read included."""
        return sum(fate.count for fate in self.fates)

    @property
    def broken(self) -> tuple[str, ...]:
        """Which places cannot be read, and why, in their order: a replay ends at the first."""
        return tuple(fate.cause for fate in self.fates if fate.result == "failed" and fate.cause is not None)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "total": self.total,
            "groups": [
                {
                    "source": fate.source,
                    "event": fate.event,
                    "result": fate.result,
                    "cause": fate.cause,
                    "count": fate.count,
                }
                for fate in self.fates
            ],
            "sample": [{"place": place, "source": source, "event": event} for place, source, event in self.sample],
        }


Alike = tuple[str, str | None, Result, str | None]


async def weighed(pool: Pool | None, arrivals: AsyncGenerator[Arrival], desk: Desk) -> Weighed:
    """Go through a file.

    Args:
        pool: where it is looked up what is here already; None: they go to another receiver, which will judge.
        arrivals: what is in the file.
        desk: who judges.
    """
    counts: Counter[Alike] = Counter()
    sample: list[tuple[int, str, str | None]] = []
    waiting: list[tuple[inbox.Identity, str | None]] = []
    ahead: set[inbox.Identity] = set()

    async def look_up() -> None:
        if pool is None or not waiting:
            return
        async with pool.transaction() as tx:
            here = await inbox.find(tx, [key for key, _ in waiting])
        for key, event in waiting:
            result: Result = "duplicate" if key in here or key in ahead else "accepted"
            ahead.add(key)
            counts[key[0], event, result, None] += 1
        waiting.clear()

    async with aclosing(arrivals):
        async for arrival in arrivals:
            event = _event(arrival, desk)
            if len(sample) < SAMPLE and arrival.broken is None:
                sample.append((arrival.place, arrival.source, event))
            judged = _judged(arrival, desk, stored=pool is not None)
            if isinstance(judged, Delivery):
                waiting.append((inbox.identity(judged), event))
                if len(waiting) == AT_ONCE:
                    await look_up()
            else:
                counts[arrival.source, event, *judged] += 1
    await look_up()
    return Weighed(tuple(Fate(*alike, count) for alike, count in counts.most_common()), tuple(sample))


def _judged(arrival: Arrival, desk: Desk, *, stored: bool) -> Delivery | tuple[Result, str | None]:
    if arrival.broken is not None:
        return "failed", arrival.broken
    if not stored:
        return "accepted", None
    try:
        delivery = desk.judged(arrival)
    except Refused as refused:
        return "refused", refused.cause
    return ("answered", None) if desk.is_test(arrival) else delivery


def _event(arrival: Arrival, desk: Desk) -> str | None:
    source = desk.sources.get(arrival.source)
    if source is None:
        return None
    try:
        events = source.events(arrival.headers, source.read(arrival.headers, arrival.body))
    except Unreadable:
        return None
    return ", ".join(dict.fromkeys(event.name for event in events)) or None
