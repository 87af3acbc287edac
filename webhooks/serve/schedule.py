"""Work that is done again and again beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger(__name__)


async def every(seconds: float, name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` now and then every `seconds`, counted from its end, until cancelled. What it raises is logged.

    Args:
        seconds: between the end of one round and the start of the next.
        name: what the log calls it.
        work: one round.
    """
    while True:
        try:
            await work()
        except Exception as error:  # whatever it was, the next round may go better
            log.warning("could not do it, trying again later", task=name, error=f"{type(error).__name__}: {error}")
        await asyncio.sleep(seconds)
