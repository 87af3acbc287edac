"""Ours, three ways: rows whose keys are known, rows found in the queue, and the queues of agents.

The first two are a gate over a table of its own, worked by a `Worker`; the third is the table `issues` and the loop of
a heartbeat: claim what is next, complete it, until nothing is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row
from pydantic import BaseModel

from handlers.issues import issues
from peers import Enqueue, Go, Mode, Peer
from peers.feed import feed
from peers.ran import ran
from webhooks import Claim, Consumer, Done, Gate, Pool
from webhooks.bell import Bell
from webhooks.db import Ready, Transaction, database_time
from webhooks.migrate import migrate
from webhooks.observe import configure_logging
from webhooks.settings import Settings
from webhooks.worker import Worker

FIFTY = 50
AT_ONCE = Settings.model_fields["concurrency"].default
TABLE = """
CREATE TABLE jobs (id bigint PRIMARY KEY, payload text NOT NULL, LIKE gated INCLUDING ALL) WITH (fillfactor = 80);
CREATE INDEX jobs_waiting ON jobs (not_before, id) WHERE status = 'waiting';
CREATE INDEX jobs_working ON jobs (id) WHERE status = 'working';
"""
FILL = "INSERT INTO jobs (id, payload, status) SELECT n, 'job ' || n, 'waiting' FROM generate_series(1, %(jobs)s) AS n"
AGENTS = ("ada", "bob", "cyd", "dan")
COMPANY = """
INSERT INTO companies (id, name) VALUES ('acme', 'Acme');
INSERT INTO agents (company_id, id, name, adapter)
SELECT 'acme', id, id, '{"type": "process", "command": ["true"]}'
FROM unnest(ARRAY['ada', 'bob', 'cyd', 'dan']) AS id;
"""
FILL_ISSUES = """
INSERT INTO issues (company_id, assigned_agent_id, title, created_at)
SELECT 'acme', (ARRAY['ada', 'bob', 'cyd', 'dan'])[1 + n %% 4], 'issue ' || n,
    now() - interval '30 days' + n * interval '1 s'
FROM generate_series(1, %(jobs)s) AS n
"""


class Job(BaseModel):
    id: int
    payload: str


def gate_of_jobs(concurrency: int | None = None, done: Callable[[int], None] = ran) -> Gate[Job]:
    """A gate with one phase that does nothing; `None` is the default number at once."""
    gate = Gate("jobs", key="id", row=Job)

    @gate.phase("waiting", claimed="working", done="finished", concurrency=concurrency)
    async def work(job: Job, claim: Claim[Job]) -> Done:
        done(job.id)
        return claim.done()

    return gate


@asynccontextmanager
async def pool_on(url: str) -> AsyncGenerator[Pool]:
    configure_logging(level=logging.ERROR)
    async with Pool.open(url, settings=Settings(database_url=url)) as pool:
        yield pool


@asynccontextmanager
async def _migrated(url: str) -> AsyncGenerator[psycopg.AsyncConnection[dict[str, Any]]]:
    connection = await psycopg.AsyncConnection[dict[str, Any]].connect(url, autocommit=True, row_factory=dict_row)
    async with connection:
        await migrate(connection)
        yield connection


async def fill_jobs(url: str, jobs: int) -> None:
    async with _migrated(url) as connection:
        await connection.execute(TABLE)
        await connection.execute(FILL, {"jobs": jobs})


async def fill_issues(url: str, jobs: int) -> None:
    async with _migrated(url) as connection:
        await connection.execute(COMPANY)
        await connection.execute(FILL_ISSUES, {"jobs": jobs})


# ---- one at a time


async def claim_each(pool: Pool, gate: Gate[Job], jobs: int) -> None:
    """Claim rows by their keys, one after the other."""
    for key in range(1, jobs + 1):
        async with gate.claim(pool, "working", key) as claim:
            if claim is not None:
                ran(claim.row.id)
                await claim.complete()


async def claim_all_next(pool: Pool, gate: Gate[Any], phase: str, **claiming: Any) -> None:
    """Claim what is next until nothing is left."""
    left = True
    while left:
        async with gate.claim_next(pool, phase, **claiming) as claim:
            left = claim is not None
            if claim is not None:
                ran(claim.row.id)
                await claim.complete()


# ---- a worker


async def work_off(pool: Pool, gate: Gate[Job], go: Go, known: int = 0) -> None:
    """Run a worker until cancelled; the keys of the first rows are made known to it."""
    worker = Worker(pool, Consumer(gates=[gate], sources=[]))
    await go()
    worker.know(Ready("jobs", "working", key) for key in range(1, known + 1))
    worker.start()
    try:
        await asyncio.Event().wait()
    finally:
        await worker.stop(1)


async def open_job(tx: Transaction, gate: Gate[Job], number: int) -> None:
    await gate.open(tx, id=number, payload=f"job {number}")


async def work_known(url: str, mode: Mode, jobs: int, go: Go) -> None:
    gate = gate_of_jobs(FIFTY if mode == "tuned" else None)
    async with pool_on(url) as pool:
        if mode == "single":
            await go()
            await claim_each(pool, gate, jobs)
        elif mode == "pickup":
            await _work_what_comes(pool, gate, jobs, go)
        else:
            await work_off(pool, gate, go, known=jobs)


async def _work_what_comes(pool: Pool, gate: Gate[Job], jobs: int, go: Go) -> None:
    """Open rows in the worker's own process, as its receiver and its other phases do."""
    worker = Worker(pool, Consumer(gates=[gate], sources=[]))

    async def enqueue(number: int) -> None:
        async with pool.transaction() as tx:
            await open_job(tx, gate, number)
        worker.know(tx.moved)

    worker.start()
    try:
        await go()
        await feed(enqueue, jobs)
        await asyncio.Event().wait()
    finally:
        await worker.stop(1)


async def work_queue(url: str, mode: Mode, jobs: int, go: Go) -> None:
    gate = gate_of_jobs(FIFTY if mode == "tuned" else None)
    async with pool_on(url) as pool:
        if mode == "single":
            await go()
            await claim_all_next(pool, gate, "working")
        else:
            await work_off(pool, gate, go)


@asynccontextmanager
async def enqueueing(url: str) -> AsyncGenerator[Enqueue]:
    gate = gate_of_jobs()
    async with pool_on(url) as pool:
        bell = Bell(pool)
        bell.start(listen=False)

        async def enqueue(number: int) -> None:
            async with pool.transaction() as tx:
                await open_job(tx, gate, number)
            bell.ring()

        yield enqueue
        await asyncio.sleep(0.5)  # one NOTIFY stands for several rows, and the last of them waits for it
        await bell.stop()


# ---- heartbeats


async def work_agents(url: str, mode: Mode, jobs: int, go: Go) -> None:
    async with pool_on(url) as pool:
        async with pool.transaction() as tx:
            due_by = await database_time(tx)
        await go()
        if mode == "single":
            for agent in AGENTS:
                await _heartbeat(pool, agent, due_by)
        elif mode == "tuned":
            for agent in AGENTS:
                await _in_fifties(pool, agent, due_by)
        else:
            async with asyncio.TaskGroup() as group:
                for agent in AGENTS:
                    group.create_task(_heartbeat(pool, agent, due_by))


async def _heartbeat(pool: Pool, agent: str, due_by: datetime) -> None:
    queue = {"company_id": "acme", "assigned_agent_id": agent}
    await claim_all_next(pool, issues, "claimed", claimed_by="run:1", due_by=due_by, **queue)


async def _in_fifties(pool: Pool, agent: str, due_by: datetime) -> None:
    queue = {"company_id": "acme", "assigned_agent_id": agent}
    while claims := await issues.take_next(pool, "claimed", FIFTY, claimed_by="run:1", due_by=due_by, equal=queue):
        async with asyncio.TaskGroup() as group:
            for claim in claims:
                group.create_task(_complete(claim))


async def _complete(claim: Claim[Any]) -> None:
    async with claim.held():
        ran(claim.row.id)
        await claim.complete()


_OF_JOBS = "SELECT count(*) FROM jobs WHERE status = 'finished'"
known = Peer(
    name="webhooks, known rows",
    distributions=("psycopg",),
    fill=fill_jobs,
    done=_OF_JOBS,
    work=work_known,
    enqueueing=None,
    settings={
        "single": "`claim` by key",
        "default": f"`Worker`, concurrency {AT_ONCE}, told of the rows",
        "tuned": "`Worker`, concurrency 50, told of the rows",
        "pickup": "opened in the worker's process",
    },
    uvloop=True,
)
queue = Peer(
    name="webhooks, queue",
    distributions=("psycopg",),
    fill=fill_jobs,
    done=_OF_JOBS,
    work=work_queue,
    enqueueing=enqueueing,
    settings={
        "single": "`claim_next`",
        "default": f"`Worker`, concurrency {AT_ONCE}",
        "tuned": "`Worker`, concurrency 50",
        "pickup": "opened in another process, which tells the worker's",
    },
    uvloop=True,
)
agents = Peer(
    name="webhooks, heartbeats",
    distributions=("psycopg",),
    fill=fill_issues,
    done="SELECT count(*) FROM issues WHERE status = 'resolved'",
    work=work_agents,
    enqueueing=None,
    settings={
        "single": "`claim_next`, one agent after the other",
        "default": "`claim_next`, four agents side by side",
        "tuned": "`take_next` of 50",
    },
    uvloop=True,
)
