"""What `webhooks replay` does once its options are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from webhooks.captures import captures
from webhooks.cli.naming import doubt
from webhooks.cli.replayed import looking, reporting
from webhooks.cli.selecting import names, pooled, stopped_by_signals
from webhooks.consumer import Consumer
from webhooks.replay import (
    Again,
    Arrival,
    Desk,
    Limits,
    Plan,
    Report,
    Weighed,
    again,
    arrivals,
    imported,
    planned,
    sent,
    stored,
    weighed,
)
from webhooks.selection import Selection
from webhooks.settings import Settings
from webhooks.source_secrets import secrets_found

STANDARD_INPUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for.

    Args:
        selection: which deliveries.
        how: the same deliveries again, or copies of them.
        file: out of this file, instead of the inbox.
        to: to this receiver, instead of the inbox here.
        resign: whether to sign anew.
        yes: do it, however many they are; `dry`: do nothing, however few.
        rate: so many a second at most.
        concurrency: so many sent at a time.
        by: who wants it, and `reason`: why.
    """

    selection: Selection
    how: Literal["same", "new"]
    file: Path | None
    to: str | None
    resign: bool
    yes: bool
    dry: bool
    rate: float | None
    concurrency: int
    by: str
    reason: str

    def limits(self, stop: asyncio.Event) -> Limits:
        """Return what the replay keeps to."""
        return Limits(rate=self.rate, at_once=self.concurrency, stop=stop)


async def from_here(settings: Settings, consumer: Consumer, wanted: Wanted) -> Plan | Report:
    """Replay out of the inbox; or, of more than one without `yes`, only plan it."""
    unit: Literal["original", "run", "request"] = "run" if wanted.how == "same" else "request"
    async with pooled(settings) as pool:
        with looking("reading") as seen:
            unit = unit if wanted.to is None else "original"
            plan = await planned(pool, consumer.sources, wanted.selection, unit, seen)
        if not plan.total:
            async with pool.transaction() as tx:
                await doubt(tx, names(wanted.selection), consumer)
        if wanted.dry or (plan.total > 1 and not wanted.yes):
            return plan
        async with stopped_by_signals() as stop:
            limits = wanted.limits(stop)
            with reporting(plan.total) as progress:
                if wanted.to is None:
                    request = Again(how=wanted.how, decided_by=wanted.by, reason=wanted.reason)
                    return await again(pool, consumer.sources, plan.scope, request, limits, progress)
                found = stored(pool, plan.scope, _desk(settings, consumer, wanted))
                after, upto = wanted.selection.after, plan.scope.upto
                return await sent(wanted.to, found, limits, progress, after=after, upto=upto)


async def from_a_file(settings: Settings, consumer: Consumer, wanted: Wanted) -> Weighed | Report:
    """Replay out of a file; or, of more than one without `yes`, only say what would become of each."""
    desk = _desk(settings, consumer, wanted)
    async with AsyncExitStack() as ending:
        pool = None if wanted.to is not None else await ending.enter_async_context(pooled(settings))
        found, many = await _several(_read(consumer, desk, wanted))
        if wanted.dry or (many and not wanted.yes):
            return await weighed(pool, found, desk)
        limits = wanted.limits(await ending.enter_async_context(stopped_by_signals()))
        progress = ending.enter_context(reporting(None))
        after = wanted.selection.after
        if pool is not None:
            return await imported(pool, consumer, found, desk, limits, progress, after=after)
        return await sent(wanted.to or "", found, limits, progress, after=after)


def _desk(settings: Settings, consumer: Consumer, wanted: Wanted) -> Desk:
    secrets = {name: secrets_found(settings.home, name) for name in consumer.sources}
    return Desk(sources=consumer.sources, secrets=secrets, resign=wanted.resign, most_bytes=settings.max_body_bytes)


def _read(consumer: Consumer, desk: Desk, wanted: Wanted) -> AsyncGenerator[Arrival]:
    which = wanted.selection
    path = None if wanted.file in (None, STANDARD_INPUT) else wanted.file
    read = captures(path, consumer.sources, source=which.source, event=which.event)
    return arrivals(read, desk, after=which.after, limit=which.limit)


async def _several(found: AsyncGenerator[Arrival]) -> tuple[AsyncGenerator[Arrival], bool]:
    """Say whether there is more than one, and return all of them all the same."""
    begun = [arrival for _ in range(2) if (arrival := await anext(found, None)) is not None]

    async def all_of_them() -> AsyncGenerator[Arrival]:
        async with aclosing(found):
            for arrival in begun:
                yield arrival
            begun.clear()
            async for arrival in found:
                yield arrival

    return all_of_them(), len(begun) > 1
