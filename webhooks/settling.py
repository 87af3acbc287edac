"""Claims' ends, many in one commit: while one group is on its way the next ones collect.

A group is one transaction, in the order of its rows so that two processes cannot deadlock, and every end in it carries
its own fence: an end whose row is somebody else's by now changes nothing, and the others are written all the same. A
group that fails is nobody's answer: each claim then settles for itself, and sees for itself what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import LiteralString, Protocol

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from webhooks.db import IMPATIENT, Cursor, Ready, Statement, ended
from webhooks.statements import WAKE_PARKED

log = structlog.get_logger(__name__)

MOST = 100


class Database(Protocol):
    """What a group needs of the pool."""

    async def at_once(self, statements: Sequence[Statement], limits: LiteralString) -> list[Cursor]: ...

    async def fences(self, count: int = 1) -> int: ...


@dataclass(slots=True, eq=False)
class Ending:
    """How one claim ends, as a statement.

    Args:
        row: the row, as `table:key`.
        statement: one fenced UPDATE that also closes the attempt; it returns the new status, or no row.
        params: its parameters.
        visits: whether it enters a ready status, and needs the parameter `visit`.
        status: the row's new status once it was written; None when the row was not ours any more.
        woken: the deliveries that waited for the row.
    """

    row: str
    statement: bytes
    params: Mapping[str, object]
    visits: bool
    status: str | None = None
    woken: list[Ready] = field(default_factory=list[Ready])


class Settling:
    """Writes the ends of one process's claims.

    Args:
        database: whose transactions and fences are used.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Ending, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, ending: Ending) -> bool:
        """Write one end together with whatever else waits; return False when its group failed, and nobody knows more.

        Whether the row was ours is `ending.status`.
        """
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((ending, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="webhooks-settle")
        return await answer

    async def stop(self) -> None:
        if self._task is not None:
            await ended([self._task])

    async def _run(self) -> None:
        while self._waiting:
            self._waiting, group = self._waiting[MOST:], self._waiting[:MOST]
            group = sorted((one for one in group if not one[1].done()), key=lambda one: one[0].row)
            async with _answered([answer for _, answer in group]):
                await self._write([ending for ending, _ in group])

    async def _write(self, group: list[Ending]) -> None:
        visits = sum(ending.visits for ending in group)
        first = await self._database.fences(visits) if visits else 0
        # A row that somebody locks is left to its own claim to wait for.
        await read(group, await self._database.at_once(statements(group, first), IMPATIENT))


def statements(group: Sequence[Ending], visit: int) -> list[Statement]:
    """Return what writes these ends, and makes the deliveries due that wait for their rows.

    Args:
        group: in the order in which rows are locked.
        visit: the first of as many numbers as there are ends that need one.
    """
    written: list[Statement] = []
    for ending in group:
        written.append((ending.statement, {**ending.params, "visit": visit}))
        visit += ending.visits
    # A statement of its own: it has to see who parked while the rows above were being waited for.
    return [*written, (WAKE_PARKED, {"rows": [ending.row for ending in group]})]


async def read(group: Sequence[Ending], cursors: Sequence[Cursor]) -> None:
    """Read the answers of those statements."""
    woken = await cursors[-1].fetchall()
    for ending, cursor in zip(group, cursors[:-1], strict=True):
        row = await cursor.fetchone()
        ending.status = None if row is None else row["status"]
        ending.woken = [Ready("deliveries", "applying", row["id"]) for row in woken if row["parked_on"] == ending.row]


@asynccontextmanager
async def _answered(answers: list[asyncio.Future[bool]]) -> AsyncGenerator[None]:
    written = False
    try:
        yield
        written = True
    except (psycopg.Error, PoolTimeout) as error:
        log.debug("a group of claims could not be settled, each is by itself", count=len(answers), error=str(error))
    finally:
        for answer in answers:
            if not answer.done():
                answer.set_result(written)
