"""One look for all followers of this process at how far the feed is."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psycopg
import structlog

from webhooks import feed
from webhooks.bell import Bell
from webhooks.control.ask import Asker
from webhooks.db import ended
from webhooks.errors import Unavailable
from webhooks.feed import Level, Place

log = structlog.get_logger(__name__)

SOON_S = 0.01
"""What is held back mostly comes when the commit beside it is through; looked for at once, then less and less often."""
GAP_S = 0.005


class Watch:
    """Reads the level of the feed while somebody follows it: when told of an accept, and else every `WEBHOOKS_POLL_S`.

    Args:
        asker: the way to the database.

    Attributes:
        level: what was seen last.
    """

    def __init__(self, asker: Asker) -> None:
        self.level = Level(0, feed.START, 0, 0.0)
        self._asker = asker
        self._bell = Bell(asker.pool)
        self._poll_s = asker.pool.settings.poll_s
        self._followers = 0
        self._called = asyncio.Event()
        self._followed = asyncio.Event()
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def look(self) -> None:
        """Look now: something was accepted."""
        self._called.set()

    @contextmanager
    def following(self) -> Generator[None]:
        """Keep looking for the block; the first block of a process starts it."""
        if not self._tasks:
            self._bell.start()
            self._tasks = [
                asyncio.create_task(self._run(), name="webhooks-feed"),
                asyncio.create_task(self._hear(), name="webhooks-feed-hear"),
            ]
        self._followers += 1
        self._followed.set()
        self.look()
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._followed.clear()

    async def stop(self) -> None:
        await ended(self._tasks)
        await self._bell.stop()

    async def fresh(self) -> Level:
        """Look by oneself.

        Raises:
            Unavailable: the database did not answer in time.
            psycopg.Error: it refused.
        """
        before, self.level = self.level, await self._asker.ask(feed.level)
        if self.level.last > before.last:
            news, self._news = self._news, asyncio.Event()
            news.set()
        return self.level

    async def beyond(self, place: Place, within_s: float) -> Level:
        """Wait until something lies beyond a place, at most so long, and return the level then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.level.last <= place:
                    await self._news.wait()
        return self.level

    async def _run(self) -> None:
        pause_s, failed = SOON_S, False
        while True:
            await self._followed.wait()
            called = self._called.is_set()
            self._called.clear()
            before = self.level
            try:
                level = await self.fresh()
            except (Unavailable, psycopg.Error) as error:
                if not failed:
                    log.warning("the feed cannot be read, trying again", error=" ".join(str(error).split()))
                pause_s, failed = self._poll_s, True
            else:
                failed = False
                if not level.held:
                    pause_s = self._poll_s
                elif called or level.last > before.last:
                    pause_s = SOON_S
                else:
                    pause_s = min(pause_s * 2, self._poll_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._called.wait()
            # Under a stream of accepts one look stands for those of this long.
            await asyncio.sleep(GAP_S)

    async def _hear(self) -> None:
        while True:
            await self._bell.heard.wait()
            self._bell.heard.clear()
            self.look()
