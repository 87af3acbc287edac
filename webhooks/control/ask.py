"""Questions to the database that nobody waits for longer than a set time, however the database fares."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import LiteralString, TypeVar

from webhooks.db import Connection, Transaction, transaction
from webhooks.errors import Unavailable
from webhooks.pool import Pool
from webhooks.wire import Wire

T = TypeVar("T")

WITHIN_S = 2.0
LIMIT = "SET LOCAL statement_timeout = '2s'"


class Asker:
    """One connection of the control plane's own, so that its questions and the work never wait for each other.

    Args:
        pool: whose address and settings the connection takes.
        within_s: how long a question may take in seconds, waiting for its turn included.
        limit: the statement that keeps the database to that.
    """

    def __init__(self, pool: Pool, within_s: float = WITHIN_S, limit: LiteralString = LIMIT) -> None:
        self.pool = pool
        self._within_s = within_s
        self._limit: LiteralString = limit
        self._wire = Wire(pool)
        self._turn = asyncio.Lock()
        self._beside: list[Asker] = []

    def beside(self) -> Asker:
        """Return another one, with a connection of its own and closed with this one: neither waits for the other."""
        another = Asker(self.pool, self._within_s, self._limit)
        self._beside.append(another)
        return another

    async def ask(self, question: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run a question in a transaction of its own.

        Raises:
            Unavailable: there was no answer in time.
            psycopg.Error: the database refused it.
        """
        until = asyncio.get_running_loop().time() + self._within_s
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("others are still asking") from None
        try:
            return await self._ask(question, until)
        finally:
            self._turn.release()

    async def _ask(self, question: Callable[[Transaction], Awaitable[T]], until: float) -> T:
        loop = asyncio.get_running_loop()
        answers: list[T] = []

        async def work(connection: Connection) -> None:
            async with transaction(connection) as tx:
                await tx.execute(self._limit)
                answers.append(await question(tx))

        while True:
            fresh = not self._wire.up
            if fresh and not await self._wire.connect(until - loop.time()):
                break
            error = await self._wire.run(work, until - loop.time())
            if error is None:
                return answers[0]
            if isinstance(error, Unavailable):
                break
            if self._wire.up:
                raise error
            if fresh:  # an old connection may have died unnoticed, a new one has not
                break
        raise Unavailable(" ".join(self._wire.failure.split()) or "it does not answer")

    async def close(self) -> None:
        for another in self._beside:
            await another.close()
        await self._wire.close()
