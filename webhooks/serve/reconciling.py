"""Reconciling on a schedule, beside everything else that a process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

from webhooks.db import Ready
from webhooks.pool import Pool
from webhooks.reconcile.scheduled import Plan, round_of
from webhooks.serve.schedule import every
from webhooks.settings import Settings

FIRST_AFTER_S = 10.0
"""A process that just started has better things to do, and what arrives while it does is here by then."""


async def reconciling(every_s: float, pool: Pool, plan: Plan, on_moved: Callable[[Sequence[Ready]], None]) -> None:
    """Reconcile a little after the start, and then every `every_s` seconds, until cancelled.

    Args:
        every_s: seconds between the end of one round and the start of the next; of many processes one does each.
        pool: the connections of this process.
        plan: what to reconcile.
        on_moved: called with the deliveries that were accepted.
    """

    async def once() -> None:
        # Read anew: a token may have been replaced, and under --dev the addresses are set later.
        await round_of(pool, Settings.load(), plan, timedelta(seconds=every_s), on_moved)

    await asyncio.sleep(min(every_s, FIRST_AFTER_S))
    await every(every_s, "reconcile", once)
