"""Claims' ends, many in one commit: while one group is on its way the next ones collect.

A group is one transaction, in the order of its rows as far as one statement does not write several, and every end in
it carries its own fence: an end whose row is somebody else's by now changes nothing, and the others are written all the
same. A group that fails is nobody's answer: each claim then settles for itself, and sees for itself what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, LiteralString, Protocol

import psycopg
import structlog

from webhooks.db import IMPATIENT, Cursor, Ready, Statement, Transaction, ended
from webhooks.db.batch import each, savepoint
from webhooks.statements import PARKED, WAKE, WAKE_PARKED
from webhooks.text import message_of

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
        claim_seq: the fence.
        statement: one fenced UPDATE that also closes the attempt; it returns the new status, or no row.
        params: its parameters.
        lists: the parameters that are lists, one value a claim; empty where the statement ends one claim only.
        alone: whether it writes values of its handler's, which get their types from a statement of its own.
        entered: the row, where it enters a ready status, and so needs a number for its visit.
        status: the row's new status once it was written; None when the row was not ours any more.
        woken: the deliveries that waited for the row.
    """

    row: str
    claim_seq: int
    statement: bytes
    params: Mapping[str, object]
    lists: Mapping[str, object]
    alone: bool
    entered: Ready | None
    status: str | None = None
    woken: list[Ready] = field(default_factory=list[Ready])

    @property
    def moved(self) -> list[Ready]:
        """What can be claimed once it is written."""
        return self.woken if self.entered is None else [self.entered, *self.woken]


class Settling:
    """Writes the ends of one process's claims.

    Args:
        database: whose transactions and fences are used.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Ending, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    def submit(self, ending: Ending) -> asyncio.Future[bool]:
        """Have one end written together with whatever else waits; the answer is False when its group failed, and
        nobody knows more. Whether the row was ours is `ending.status`."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((ending, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="webhooks-settle")
        return answer

    async def stop(self) -> None:
        if self._task is not None:
            await ended([self._task])

    async def _run(self) -> None:
        group: list[tuple[Ending, asyncio.Future[bool]]] = []
        try:
            while self._waiting:
                self._waiting, group = self._waiting[MOST:], self._waiting[:MOST]
                group.sort(key=lambda one: one[0].row)
                _answer(group, await self._write([ending for ending, _ in group]))
        finally:  # when this task is stopped, whoever waits has to find out by itself
            _answer([*group, *self._waiting], False)
            self._waiting = []

    async def _write(self, group: list[Ending]) -> bool:
        together = alike(group)
        visits = sum(ending.entered is not None for ending in group)
        try:
            first = await self._database.fences(visits) if visits else 0
            # A statement of its own: it has to see who parked while the rows above were being waited for.
            waking: Statement = (WAKE_PARKED, {"rows": [ending.row for ending in group]})
            # A row that somebody locks is left to its own claim to wait for.
            *cursors, woken = await self._database.at_once([*statements(together, first), waking], IMPATIENT)
            await read(together, cursors, await woken.fetchall())
        except Exception as error:  # also a value that the driver cannot send: its own claim is told of it
            log.debug("a group of claims could not be settled, each is by itself", count=len(group), error=str(error))
            return False
        return True


def alike(group: Sequence[Ending]) -> list[list[Ending]]:
    """Return the ends that one statement writes side by side, in the order of the group."""
    together: dict[object, list[Ending]] = {}
    for ending in group:
        together.setdefault(id(ending) if ending.alone else ending.statement, []).append(ending)
    return list(together.values())


def statements(together: Sequence[Sequence[Ending]], visit: int) -> list[Statement]:
    """Return what writes these ends.

    Args:
        together: what each statement ends.
        visit: the first of as many numbers as there are ends that need one.
    """
    written: list[Statement] = []
    for endings in together:
        first = endings[0]
        lists = {name: [ending.lists[name] for ending in endings] for name in first.lists}
        # `array_position` counts from one.
        written.append((first.statement, {**first.params, **lists, "visit": visit - 1}))
        visit += sum(ending.entered is not None for ending in endings)
    return written


async def wake(tx: Transaction, row: str) -> list[dict[str, Any]]:
    """Make the deliveries due that wait for a row, because it moved; one that refuses is woken by its own look."""
    waiting = [parked["id"] for parked in await (await tx.execute(PARKED, {"rows": [row]})).fetchall()]

    async def run(ids: Sequence[int]) -> list[dict[str, Any]]:
        async with savepoint(tx):
            return await (await tx.execute(WAKE, {"ids": list(ids)})).fetchall()
        return []

    def refused(id: int, error: psycopg.Error) -> None:
        log.warning("a parked delivery cannot be made due", delivery=id, error=message_of(error))

    return [woken for answer in await each(waiting, run, refused) for woken in answer]


async def read(
    together: Sequence[Sequence[Ending]], cursors: Sequence[Cursor], woken: Sequence[Mapping[str, Any]]
) -> None:
    """Read the answers of those statements, given the deliveries that were made due."""
    for endings, cursor in zip(together, cursors, strict=True):
        statuses = {row["claim_seq"]: row["status"] for row in await cursor.fetchall()}
        for ending in endings:
            ending.status = statuses.get(ending.claim_seq)
            if woken:
                ending.woken = [Ready("deliveries", "applying", w["id"]) for w in woken if w["parked_on"] == ending.row]


def _answer(waiting: Sequence[tuple[Ending, asyncio.Future[bool]]], written: bool) -> None:
    for _, answer in waiting:
        if not answer.done():
            answer.set_result(written)
