"""Throughput before and while somebody else's transaction holds a snapshot.

Meanwhile nothing that is claimed can be cleaned away, so that a queue which is read from its front gets longer and
longer. Rows come in all the time, as many as are worked off: the worker is told of each, the other two read the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
import uvloop
from psycopg.rows import dict_row

from handlers.issues import issues
from peers.ours import AGENTS, fill_issues, fill_jobs, gate_of_jobs, pool_on
from webhooks import Consumer, Pool
from webhooks.db import Ready
from webhooks.worker import Worker

BACKLOG = 3000
OPEN_JOBS = """
INSERT INTO jobs (id, payload, status)
SELECT n, 'job ' || n, 'waiting' FROM generate_series(%s::bigint, %s::bigint) AS n
"""
OPEN_ISSUES = """
INSERT INTO issues (company_id, assigned_agent_id, title)
SELECT 'acme', 'ada', 'issue ' || n FROM generate_series(%s::bigint, %s::bigint) AS n
"""
# What queues usually run: find the first row that nobody has locked, from the front.
PLAIN_CLAIM = """
UPDATE jobs SET status = 'working', claimed_from = 'waiting', attempt_count = attempt_count + 1,
    lease_until = now() + interval '60 s'
WHERE id = (SELECT id FROM jobs WHERE status = 'waiting' ORDER BY not_before, id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id
"""
PLAIN_COMPLETE = "UPDATE jobs SET status = 'finished', lease_until = NULL WHERE id = %(id)s AND status = 'working'"


@dataclass(frozen=True, slots=True)
class Held:
    """Completions a second.

    Args:
        before: without a snapshot.
        meanwhile: while it was held.
        at_last: in the last quarter of that.
        after: once it was let go.
    """

    before: float
    meanwhile: float
    at_last: float
    after: float


Work = Callable[["_Queue"], Awaitable[None]]


class _Queue:
    """Rows that come in as they are worked off, and how many were."""

    def __init__(self, url: str, pool: Pool, opening: LiteralString) -> None:
        self.url = url
        self.pool = pool
        self.completed = 0
        self.opened = 0
        self.told: Callable[[range], None] = lambda keys: None
        self._opening = opening

    async def keep_filled(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            while True:
                if (count := self.completed + BACKLOG - self.opened) >= BACKLOG // 10:
                    keys = range(self.opened + 1, self.opened + count + 1)
                    await connection.execute(self._opening, (keys[0], keys[-1]))
                    self.opened += count
                    self.told(keys)
                await asyncio.sleep(0.02)


def known_rows(url: str, before_s: float, held_s: float) -> Held:
    """A worker that is told of each row."""
    return uvloop.run(_measured(url, fill_jobs, OPEN_JOBS, _work_known, before_s, held_s))


def heartbeat(url: str, before_s: float, held_s: float) -> Held:
    """The loop of one agent: claim what is next, complete it."""
    return uvloop.run(_measured(url, fill_issues, OPEN_ISSUES, _work_next, before_s, held_s))


def plain(url: str, before_s: float, held_s: float) -> Held:
    """The plain claim, by one connection."""
    return uvloop.run(_measured(url, fill_jobs, OPEN_JOBS, _work_plain, before_s, held_s))


async def _measured(
    url: str,
    fill: Callable[[str, int], Awaitable[None]],
    opening: LiteralString,
    work: Work,
    before_s: float,
    held_s: float,
) -> Held:
    await fill(url, 0)
    async with pool_on(url) as pool:
        queue = _Queue(url, pool, opening)
        tasks = [asyncio.ensure_future(part) for part in (queue.keep_filled(), work(queue))]
        try:
            await _rate(queue, min(3.0, before_s), tasks)  # connections, plans
            before = await _rate(queue, before_s, tasks)
            async with await psycopg.AsyncConnection.connect(url) as holder:
                await holder.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
                await holder.execute("SELECT count(*) FROM gated")
                rates = [await _rate(queue, held_s / 4, tasks) for _ in range(4)]
            after = await _rate(queue, before_s, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=10)
    return Held(before, sum(rates) / 4, rates[-1], after)


async def _rate(queue: _Queue, seconds: float, tasks: list[asyncio.Future[None]]) -> float:
    completed, started = queue.completed, time.perf_counter()
    ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return (queue.completed - completed) / (time.perf_counter() - started)


async def _work_known(queue: _Queue) -> None:
    def done(_: int) -> None:
        queue.completed += 1

    gate = gate_of_jobs(done=done)
    worker = Worker(queue.pool, Consumer(gates=[gate], sources=[]))
    queue.told = lambda keys: worker.know(Ready("jobs", "working", key) for key in keys)
    worker.start()
    try:
        await asyncio.Event().wait()
    finally:
        await worker.stop(1)


async def _work_next(queue: _Queue) -> None:
    agent = {"company_id": "acme", "assigned_agent_id": AGENTS[0]}
    while True:
        async with issues.claim_next(queue.pool, "claimed", **agent) as claim:
            if claim is not None:
                await claim.complete()
        if claim is None:
            await asyncio.sleep(0.02)
        else:
            queue.completed += 1


async def _work_plain(queue: _Queue) -> None:
    async with await psycopg.AsyncConnection[dict[str, Any]].connect(
        queue.url, autocommit=True, row_factory=dict_row
    ) as connection:
        while True:
            claimed = await (await connection.execute(PLAIN_CLAIM)).fetchone()
            if claimed is None:
                await asyncio.sleep(0.02)
                continue
            await connection.execute(PLAIN_COMPLETE, claimed)
            queue.completed += 1
