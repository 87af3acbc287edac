"""Wakes the workers of other processes, through NOTIFY; polling is the floor beneath it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg_pool import PoolTimeout

from webhooks.db import ended
from webhooks.errors import ConfigurationError
from webhooks.pool import Pool

log = structlog.get_logger(__name__)

TELL = "SELECT pg_notify('webhooks', %(process)s)"
LISTEN = "LISTEN webhooks"
# A NOTIFY inside a transaction serialises commits, so it is sent outside, and one stands for all of this long.
COALESCE_S = 0.05
SELF_TEST_WITHIN_S = 2.0
LISTEN_AGAIN_AFTER_S = 2.0


class Bell:
    """Tells other processes that there is work, and hears them.

    Attributes:
        heard: set when another process said so; who waits for it clears it.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.heard = asyncio.Event()
        self._rung = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._self_test = False

    def ring(self) -> None:
        """Tell every other process that there is work."""
        self._rung.set()

    def start(self, *, listen: bool = True) -> None:
        self._tasks.append(asyncio.create_task(self._tell(), name="webhooks-notify"))
        if listen:
            self._tasks.append(asyncio.create_task(self._listen(), name="webhooks-listen"))

    async def stop(self) -> None:
        await ended(self._tasks)
        self._tasks.clear()

    async def _tell(self) -> None:
        while True:
            await self._rung.wait()
            self._rung.clear()
            with suppress(psycopg.Error, PoolTimeout):
                async with self._pool.connection() as connection:
                    await connection.execute(TELL, {"process": self._pool.process})
            await asyncio.sleep(COALESCE_S)

    async def _listen(self) -> None:
        """Listen, again whenever the connection is lost. Behind a pooler nothing arrives: then polling has to do."""
        url = self._pool.settings.direct_url or self._pool.url
        while True:
            try:
                async with await self._pool.database.connect(url) as connection:
                    await connection.execute(LISTEN)
                    # Whoever rang while nobody listened is not heard: so look.
                    self.heard.set()
                    self.ring()
                    if not await self._hears(connection, SELF_TEST_WITHIN_S) and not self._self_test:
                        log.warning("NOTIFY does not arrive: work is found by polling", setting="WEBHOOKS_DIRECT_URL")
                    self._self_test = True
                    while True:
                        # Asked now and then: a connection can die, or its server be replaced, without a word.
                        if not await self._hears(connection, LISTEN_AGAIN_AFTER_S):
                            await self._pool.database.greet(connection)
            except (psycopg.Error, OSError, ConfigurationError) as error:
                log.warning("the LISTEN connection was lost, connecting again", error=str(error).strip())
                await asyncio.sleep(LISTEN_AGAIN_AFTER_S)

    async def _hears(self, connection: AsyncConnection[dict[str, Any]], within_s: float) -> bool:
        heard = False
        async for notify in connection.notifies(timeout=within_s, stop_after=1):
            heard = True
            if notify.payload != self._pool.process:
                self.heard.set()
        return heard
