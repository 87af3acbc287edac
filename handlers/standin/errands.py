"""What the stand-in does later, by itself: it sends deliveries, and its people answer and review."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import TracebackType

import structlog

log = structlog.get_logger(__name__)


class Errands:
    """Runs each errand in a task of its own, and ends what is left of them when the block is left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Errands:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def after(self, delay: timedelta, errand: Callable[[], Awaitable[object]]) -> None:
        """Run `errand` once `delay` is over; what goes wrong is logged."""
        task = asyncio.create_task(self._run(delay, errand))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, delay: timedelta, errand: Callable[[], Awaitable[object]]) -> None:
        await asyncio.sleep(delay.total_seconds())
        try:
            await errand()
        except Exception:
            log.exception("the stand-in could not do what it meant to")
